//go:build e2e

// Package pages runs the commands of the documentation unchanged: the lines of a page that are indented or fenced as sh, by heading. Every
// other fence must have a language.
package pages

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A Page is a page of the documentation. Its commands run in a directory with the parts of the repository that the documentation mentions.
type Page struct {
	t         *testing.T
	directory string
	bin       string
	env       []string
	// scripts are the commands under each heading, notRun the headings whose commands have not run yet.
	scripts map[string]string
	notRun  []string
}

// Read reads a page of the repository at root. Its commands have the tools of the test cluster, `plimsoll` (the binary) and
// additional environment variables.
func Read(t *testing.T, root, file, binary string, env ...string) *Page {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		t.Fatal(err)
	}
	p := &Page{t: t, directory: t.TempDir(), bin: t.TempDir()}
	p.env = append(env, "PATH="+p.bin+":"+filepath.Join(root, "target/e2e/bin")+":"+os.Getenv("PATH"))
	for link, target := range map[string]string{
		filepath.Join(p.directory, "charts"): filepath.Join(root, "charts"),
		filepath.Join(p.bin, "plimsoll"):     binary,
	} {
		if err := os.Symlink(target, link); err != nil {
			t.Fatal(err)
		}
	}
	if p.scripts, err = commands(string(text)); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	for heading := range p.scripts {
		p.notRun = append(p.notRun, heading)
	}
	if len(p.notRun) == 0 {
		t.Fatalf("%s has no commands", file)
	}
	return p
}

// externalTools are the tools of commands that can't be run here (```console): they build, or need a registry, OpenShift, kind or k3s.
var externalTools = []string{"make", "skopeo", "oc", "kind", "sudo", "export"}

// commands are the commands of a page by heading. It rejects commands in a fence that no test would run.
func commands(text string) (map[string]string, error) {
	scripts, heading, fence := map[string]string{}, "", ""
	for number, line := range strings.Split(text, "\n") {
		refuse := func(why string) error { return fmt.Errorf("line %d: %s: %s", number+1, line, why) }
		switch kind, fenced := strings.CutPrefix(line, "```"); {
		case fenced && fence == "":
			if !slices.Contains([]string{"sh", "console", "text", "yaml", "mermaid"}, kind) {
				return nil, refuse("a fence is sh, which is run, console, which can't be run here, text, yaml or mermaid")
			}
			fence = kind
		case fenced:
			fence = ""
		case fence == "sh":
			scripts[heading] += line + "\n"
		case fence == "console":
			if tool, _, _ := strings.Cut(line, " "); !slices.Contains(externalTools, tool) {
				return nil, refuse("this can be run: fence it as sh, or indent it")
			}
		case fence != "": // output, or a manifest
		case strings.HasPrefix(line, "#"):
			heading = strings.TrimLeft(line, "# ")
		default:
			if command, indented := strings.CutPrefix(line, "    "); indented {
				scripts[heading] += command + "\n"
			}
		}
	}
	if fence != "" {
		return nil, fmt.Errorf("a fence of %s has no end", fence)
	}
	return scripts, nil
}

// Helm adapts `helm` to the cluster under test: commands that render the chart get this additional values file, and the example registry of the pages is
// replaced.
func (p *Page) Helm(helm, values string) {
	p.t.Helper()
	wrapper := fmt.Sprintf("#!/bin/sh\nfor word do shift; case $word in image.repository=registry.example/*) word=image.pullPolicy=IfNotPresent ;; esac; set -- \"$@\" \"$word\"; done\n"+
		"case $1 in install | upgrade | template) exec %[1]s \"$@\" --values %[2]s ;; esac\nexec %[1]s \"$@\"\n", helm, values)
	if err := os.WriteFile(filepath.Join(p.bin, "helm"), []byte(wrapper), 0o700); err != nil {
		p.t.Fatal(err)
	}
}

// Try runs the commands under a heading until one fails, with words such as NODE replaced, and returns their output.
func (p *Page) Try(heading string, words ...string) (string, error) {
	p.t.Helper()
	script := strings.NewReplacer(words...).Replace(p.script(heading))
	out, stderr, err := p.bash(script)
	if err != nil {
		err = fmt.Errorf("%s\n%w:\n%s%s", script, err, out, stderr)
	}
	return out + stderr, err
}

// Run is Try; the commands must succeed.
func (p *Page) Run(t *testing.T, heading string, words ...string) string {
	t.Helper()
	out, err := p.Try(heading, words...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// RunEach runs each command under a heading separately, for commands that only read: grep may find nothing. It returns their output.
func (p *Page) RunEach(t *testing.T, heading string, words ...string) string {
	t.Helper()
	var all strings.Builder
	for _, line := range strings.Split(strings.TrimSpace(p.script(heading)), "\n") {
		out, stderr, err := p.bash(strings.NewReplacer(words...).Replace(line))
		all.WriteString(out)
		nothing := strings.Contains(line, "| grep ") && out == "" && strings.TrimPrefix(stderr, "No resources found\n") == ""
		if err != nil && !nothing {
			t.Errorf("%s: %s\n%v:\n%s%s", heading, line, err, out, stderr)
		}
	}
	return all.String()
}

// From removes the commands under a heading before the line that begins with this; another test runs them.
func (p *Page) From(heading, begin string) {
	p.t.Helper()
	before, rest, found := strings.Cut("\n"+p.scripts[heading], "\n"+begin)
	if !found || before == "" {
		p.t.Fatalf("under the heading %q no further line begins with %q", heading, begin)
	}
	p.scripts[heading] = begin + rest
}

// RunElsewhere counts the commands under a heading as run: another test runs them.
func (p *Page) RunElsewhere(heading string) {
	p.t.Helper()
	p.script(heading)
}

// File writes a file into the directory of the commands.
func (p *Page) File(name, content string) {
	p.t.Helper()
	if err := os.WriteFile(filepath.Join(p.directory, name), []byte(content), 0o600); err != nil {
		p.t.Fatal(err)
	}
}

// Headings are the headings that have commands.
func (p *Page) Headings() []string { return slices.Sorted(maps.Keys(p.scripts)) }

// script returns the commands under a heading, and counts them as run.
func (p *Page) script(heading string) string {
	p.t.Helper()
	script, known := p.scripts[heading]
	if !known {
		p.t.Fatalf("the page has no commands under the heading %q", heading)
	}
	p.notRun = slices.DeleteFunc(p.notRun, func(each string) bool { return each == heading })
	return script
}

// bash runs a script.
func (p *Page) bash(script string) (out, stderr string, err error) {
	command := exec.Command("bash", "-euo", "pipefail", "-c", script)
	command.Dir, command.Env = p.directory, append(os.Environ(), p.env...)
	var outBuffer, errBuffer strings.Builder
	command.Stdout, command.Stderr = &outBuffer, &errBuffer
	err = command.Run()
	return outBuffer.String(), errBuffer.String(), err
}

// CheckAllRun fails the test for every heading whose commands were not run.
func (p *Page) CheckAllRun() {
	p.t.Helper()
	for _, heading := range p.notRun {
		p.t.Errorf("the commands under the heading %q were not run", heading)
	}
}
