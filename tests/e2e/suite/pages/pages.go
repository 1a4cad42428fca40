//go:build e2e

// Package pages runs what the documentation tells to run, word for word: the lines of a page that are indented, or fenced as sh, heading
// by heading. Every other fence has to say what it is.
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

// A Page is a page of the documentation. Its commands are run in a folder that has of the repository what users are told of.
type Page struct {
	t      *testing.T
	folder string
	bin    string
	env    []string
	// scripts are the commands under each heading, unrun those headings that nothing was run of yet.
	scripts map[string]string
	unrun   []string
}

// Read reads a page of the repository at root. Its commands find the tools of the test cluster and `plimsoll`, which is binary, and
// have env besides.
func Read(t *testing.T, root, file, binary string, env ...string) *Page {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		t.Fatal(err)
	}
	p := &Page{t: t, folder: t.TempDir(), bin: t.TempDir()}
	p.env = append(env, "PATH="+p.bin+":"+filepath.Join(root, "target/e2e/bin")+":"+os.Getenv("PATH"))
	for link, target := range map[string]string{
		filepath.Join(p.folder, "charts"): filepath.Join(root, "charts"),
		filepath.Join(p.bin, "plimsoll"):  binary,
	} {
		if err := os.Symlink(target, link); err != nil {
			t.Fatal(err)
		}
	}
	if p.scripts, err = commands(string(text)); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	for heading := range p.scripts {
		p.unrun = append(p.unrun, heading)
	}
	if len(p.unrun) == 0 {
		t.Fatalf("%s tells nothing to run", file)
	}
	return p
}

// elsewhere are the tools of commands that can't be run here (```console): they build, or need a registry or OpenShift.
var elsewhere = []string{"make", "skopeo", "oc"}

// commands are those that a page has under each heading. One that is fenced so that nothing would run it, or not see that it is one, is refused.
func commands(text string) (map[string]string, error) {
	scripts, heading, fence := map[string]string{}, "", ""
	for number, line := range strings.Split(text, "\n") {
		refuse := func(why string) error { return fmt.Errorf("line %d: %s: %s", number+1, line, why) }
		switch kind, fenced := strings.CutPrefix(line, "```"); {
		case fenced && fence == "":
			if !slices.Contains([]string{"sh", "console", "text", "yaml"}, kind) {
				return nil, refuse("a fence is sh, which is run, console, which can't be run here, text or yaml")
			}
			fence = kind
		case fenced:
			fence = ""
		case fence == "sh":
			scripts[heading] += line + "\n"
		case fence == "console":
			if tool, _, _ := strings.Cut(line, " "); !slices.Contains(elsewhere, tool) {
				return nil, refuse("this can be run: fence it as sh, or indent it")
			}
		case fence != "": // what is printed, or an object
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

// Helm has `helm` fit the cluster under test: whatever renders the chart gets this file of values besides, and its image where the page names a registry
// that is an example.
func (p *Page) Helm(helm, values string) {
	p.t.Helper()
	wrapper := fmt.Sprintf("#!/bin/sh\nfor word do shift; case $word in image.repository=registry.example/*) word=image.pullPolicy=IfNotPresent ;; esac; set -- \"$@\" \"$word\"; done\n"+
		"case $1 in install | upgrade | template) exec %[1]s \"$@\" --values %[2]s ;; esac\nexec %[1]s \"$@\"\n", helm, values)
	if err := os.WriteFile(filepath.Join(p.bin, "helm"), []byte(wrapper), 0o700); err != nil {
		p.t.Fatal(err)
	}
}

// Try runs all that stands under a heading, up to what fails, with words such as NODE replaced, and gives what it printed.
func (p *Page) Try(heading string, words ...string) (string, error) {
	p.t.Helper()
	script := strings.NewReplacer(words...).Replace(p.script(heading))
	out, said, err := p.bash(script)
	if err != nil {
		err = fmt.Errorf("%s\n%w:\n%s%s", script, err, out, said)
	}
	return out + said, err
}

// Run is Try, and has to succeed.
func (p *Page) Run(t *testing.T, heading string, words ...string) string {
	t.Helper()
	out, err := p.Try(heading, words...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Look runs each command under a heading by itself, for those that look at something: grep may find nothing. It gives what they printed.
func (p *Page) Look(t *testing.T, heading string, words ...string) string {
	t.Helper()
	var all strings.Builder
	for _, line := range strings.Split(strings.TrimSpace(p.script(heading)), "\n") {
		out, said, err := p.bash(strings.NewReplacer(words...).Replace(line))
		all.WriteString(out)
		nothing := strings.Contains(line, "| grep ") && out == "" && strings.TrimPrefix(said, "No resources found\n") == ""
		if err != nil && !nothing {
			t.Errorf("%s: %s\n%v:\n%s%s", heading, line, err, out, said)
		}
	}
	return all.String()
}

// From leaves out what stands under a heading before the line that begins so: what another test runs.
func (p *Page) From(heading, begin string) {
	p.t.Helper()
	before, rest, found := strings.Cut("\n"+p.scripts[heading], "\n"+begin)
	if !found || before == "" {
		p.t.Fatalf("under the heading %q no line after others begins with %q", heading, begin)
	}
	p.scripts[heading] = begin + rest
}

// File puts a file where the commands run.
func (p *Page) File(name, content string) {
	p.t.Helper()
	if err := os.WriteFile(filepath.Join(p.folder, name), []byte(content), 0o600); err != nil {
		p.t.Fatal(err)
	}
}

// Headings are those that have commands.
func (p *Page) Headings() []string { return slices.Sorted(maps.Keys(p.scripts)) }

// script is what stands under a heading, which counts as run.
func (p *Page) script(heading string) string {
	p.t.Helper()
	script, known := p.scripts[heading]
	if !known {
		p.t.Fatalf("the page has no commands under the heading %q", heading)
	}
	p.unrun = slices.DeleteFunc(p.unrun, func(each string) bool { return each == heading })
	return script
}

// bash runs a script, and gives what it printed, and what of that was meant for people.
func (p *Page) bash(script string) (out, said string, err error) {
	command := exec.Command("bash", "-euo", "pipefail", "-c", script)
	command.Dir, command.Env = p.folder, append(os.Environ(), p.env...)
	var printed, complained strings.Builder
	command.Stdout, command.Stderr = &printed, &complained
	err = command.Run()
	return printed.String(), complained.String(), err
}

// AllRun fails the test for every heading whose commands were not run.
func (p *Page) AllRun() {
	p.t.Helper()
	for _, heading := range p.unrun {
		p.t.Errorf("nothing was run of what the page has under the heading %q", heading)
	}
}
