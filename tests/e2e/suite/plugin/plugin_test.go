//go:build e2e

// Package plugin tests `kubectl plimsoll`.
package plugin

import (
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"plimsoll.dev/suite/plane"
)

// TestKubectlCompletesThePlugin requests completions from kubectl as a shell does.
func TestKubectlCompletesThePlugin(t *testing.T) {
	binary := cmp.Or(os.Getenv("PLIMSOLL_E2E_BINARY"), plane.Absolute(t, "target/x86_64-unknown-linux-musl/debug/plimsoll"))
	if _, err := os.Stat(binary); err != nil {
		t.Skipf("NOT TESTED: %v (cargo build --target x86_64-unknown-linux-musl)", err)
	}
	path := t.TempDir()
	for name, target := range map[string]string{"kubectl-plimsoll": binary, "kubectl_complete-plimsoll": plane.Absolute(t, "scripts/kubectl_complete-plimsoll")} {
		if err := os.Symlink(target, filepath.Join(path, name)); err != nil {
			t.Fatal(err)
		}
	}
	const noFiles, files = ":4", ":0"
	for words, want := range map[string][]string{
		"do":                  {"doctor", noFiles},
		"doctor --on":         {"--only", noFiles},
		"check --output ":     {"text", "json", "yaml", noFiles},
		"check manifests/som": {files},
		"stop --nothing":      {files},
	} {
		command := exec.Command(plane.Tool(t, "kubectl"), append([]string{"__complete", "plimsoll"}, strings.Split(words, " ")...)...)
		command.Env = append(os.Environ(), "HOME="+t.TempDir(), "PATH="+path+":"+os.Getenv("PATH"))
		out, err := command.Output()
		if err != nil {
			t.Fatal(err)
		}
		if found := strings.Fields(string(out)); !slices.Equal(found, want) {
			t.Errorf("kubectl completes %q with %v, not %v", words, found, want)
		}
	}
	// Placeholders of arguments must not be suggested.
	command := exec.Command(plane.Absolute(t, "scripts/kubectl_complete-plimsoll"), "check", "")
	command.Env = append(os.Environ(), "PATH="+path+":"+os.Getenv("PATH"))
	if out, err := command.Output(); err != nil || strings.Contains(string(out), "[") {
		t.Errorf("after check: %s (%v)", out, err)
	}
}
