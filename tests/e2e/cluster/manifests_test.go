//go:build smoke

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// repository is the root of the project, seen from this directory.
const repository = "../../.."

func TestAPIServerAcceptsTheManifests(t *testing.T) {
	if os.Getenv(givenKubeconfig) == "" {
		t.Setenv("NODES", testNodes(t)[0]) // one node is enough
		must(t, "down")
		must(t, "up")
		t.Cleanup(func() { cluster(t, "", "down") })
	}
	definitions := manifests(t, "crds")
	for _, file := range definitions {
		must(t, "kubectl", "apply", "--server-side", "-f", file)
		must(t, "kubectl", "wait", "--for=condition=Established", "--timeout=20s", "-f", file)
		if violations := must(t, "kubectl", "get", "-f", file,
			"-o", `jsonpath={.status.conditions[?(@.type=="NonStructuralSchema")].message}`); violations != "" {
			t.Errorf("%s: %s", file, violations)
		}
	}
	for _, directory := range []string{"examples/ensurance", "tests/guide"} {
		for _, file := range manifests(t, directory) {
			t.Run(directory+"/"+filepath.Base(file), func(t *testing.T) {
				t.Log(must(t, "kubectl", "apply", "--dry-run=server", "--validate=strict", "-f", file))
			})
		}
	}
	t.Run("explain describes the rules", func(t *testing.T) {
		if text := must(t, "kubectl", "explain", "nodeqos.spec.rules"); !strings.Contains(text, "avoidanceThreshold") {
			t.Fatal(text)
		}
	})
	t.Run("an action with an empty throttle is rejected", func(t *testing.T) {
		_, err := cluster(t, `
apiVersion: ensurance.crane.io/v1alpha1
kind: AvoidanceAction
metadata: {name: empty}
spec: {throttle: {}}
`, "kubectl", "apply", "-f", "-")
		if err == nil || !strings.Contains(err.Error(), "is invalid: spec.throttle") {
			t.Fatal(err)
		}
	})
}

func manifests(t *testing.T, directory string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(repository, directory, "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no manifests in %s (%v)", directory, err)
	}
	return files
}
