//go:build e2e

package pages

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCommandsAreGroupedByHeading(t *testing.T) {
	page := strings.ReplaceAll(`# Page

    first
~~~text
printed
~~~
## Part
~~~sh
second
~~~
~~~console
oc third
~~~
    fourth
~~~yaml
kind: Fifth
~~~
`, "~~~", "```")
	found, err := commands(page)
	if wanted := map[string]string{"Page": "first\n", "Part": "second\nfourth\n"}; err != nil || !maps.Equal(found, wanted) {
		t.Errorf("found %q (%v)", found, err)
	}
}

func TestFenceThatHidesACommandIsRejected(t *testing.T) {
	for page, words := range map[string]string{
		"~~~\nkubectl get nodes\n~~~":        "line 1: ```: a fence is sh",
		"\n~~~bash\nkubectl get nodes\n~~~":  "line 2: ```bash: a fence is sh",
		"~~~console\nkubectl get nodes\n~~~": "line 2: kubectl get nodes: this can be run",
		"~~~text\nprinted\n":                 "a fence of text has no end",
	} {
		if found, err := commands(strings.ReplaceAll(page, "~~~", "```")); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%q has %q (%v)", page, found, err)
		}
	}
}

// TestDocsHideNoCommand checks without a cluster what the cluster tests check, too.
func TestDocsHideNoCommand(t *testing.T) {
	for _, page := range []string{"README.md", "docs/install.md", "docs/migrating-from-crane.md", "docs/kubernetes.md", "docs/runbook.md", "docs/emergency-stop.md",
		"docs/without-kubernetes.md", "docs/quickstart.md", "docs/first-policy.md", "docs/labelling-batch-work.md"} {
		text, err := os.ReadFile(filepath.Join("../../../..", page))
		if err != nil {
			t.Fatal(err)
		}
		if found, err := commands(string(text)); err != nil || len(found) == 0 {
			t.Errorf("%s: %v, %d headings", page, err, len(found))
		}
	}
}
