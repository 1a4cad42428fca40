//go:build e2e

package suite

import (
	"strings"
	"testing"

	"plimsoll.dev/suite/pages"
)

// TestTutorialHoldsAPodInTheIdleClassAndRestoresIt runs every command of docs/first-policy.md, with an image that is on the nodes. It locks all nodes,
// because its rule applies to each.
func TestTutorialHoldsAPodInTheIdleClassAndRestoresIt(t *testing.T) {
	t.Parallel()
	needShell(t)
	if !*long {
		t.Skip("takes five minutes: -args -long")
	}
	lockAllNodes(t)
	for _, node := range nodes {
		onNode(t, node, "ctr --namespace k8s.io images tag --force plimsoll.dev/e2e/tools:latest docker.io/library/busybox:1.37")
	}
	t.Cleanup(func() {
		tryKubectl("", "delete", "nodeqos/tutorial", "avoidanceaction/tutorial", "podqos/tutorial", "namespace/tutorial", "--ignore-not-found")
	})
	page := pages.Read(t, absolute("."), "docs/first-policy.md", binary(), "KUBECONFIG="+absolute("target/e2e/kubeconfig"))
	for _, step := range []struct{ heading, expected string }{
		{"A batch pod", "batch-"},
		{"A policy", "0 errors and 0 warnings"},
		{"What would it do?", "idle class at all times: 1 pod (tutorial/batch-"},
		{"Apply it as a Preview", "WouldSetIdleClass"},
		{"Enforce it", "IdleClassSet"},
		{"Remove it", `namespace "tutorial" deleted`},
	} {
		if out := page.Run(t, step.heading); !strings.Contains(out, step.expected) {
			t.Errorf("%s: %q is not in the output of its commands:\n%s", step.heading, step.expected, out)
		}
	}
	page.CheckAllRun()
	for _, node := range nodes {
		if now, err := watermarkOf(node); err != nil || now.Status.Counts.Throttled != 0 {
			t.Errorf("%s still has throttled pods: %+v (%v)", node, now, err)
		}
	}
}
