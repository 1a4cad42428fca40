//go:build e2e

package suite

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"plimsoll.dev/suite/pages"
)

// TestTheRunbooksCommandsDoWhatTheySay runs them all, on an installation that is well.
func TestTheRunbooksCommandsDoWhatTheySay(t *testing.T) {
	needShell(t)
	values := filepath.Join(t.TempDir(), "values.yaml")
	repository, tag, err := image()
	if err != nil {
		t.Fatal(err)
	}
	(&release{values: values}).have(t, repository, tag, generous)
	page := pages.Read(t, absolute("."), "docs/runbook.md", binary(), "KUBECONFIG="+absolute("target/e2e/kubeconfig"))
	page.Helm(absolute("target/e2e/bin/helm"), values)
	apply(t, `{apiVersion: ensurance.crane.io/v1alpha1, kind: NodeQOS, metadata: {name: runbook}, spec: {selector: {matchLabels: {nobody: has-this}},
  rules: [{name: nothing, avoidanceThreshold: 2, restoreThreshold: 2, actionName: disable, strategy: Preview, metricRule: {name: cpu_total_usage, value: 5000}}]}}`)
	t.Cleanup(func() { kubectl(t, "delete", "nodeqos", "runbook") })
	says := map[string]string{
		"PlimsollNoLeader":               "holderIdentity",
		"PlimsollTwoLeaders":             "plimsoll-controller",
		"PlimsollDefinitionsOutdated":    "serverside-applied",
		"PlimsollRolloutStopped":         "runbook",
		"PlimsollNodesWait":              "runbook",
		"PlimsollCapReached":             nodes[0],
		"PlimsollAgentsSilent":           nodes[0],
		"PlimsollReportsNotAcknowledged": "plimsoll-report",
		"PlimsollRulesRefused":           nodes[0],
		"PlimsollEvictionsRefused":       "plimsoll-metrics",
		"PlimsollEvictionsUnguarded":     "caBundle",
		"PlimsollEvictionsUnrecorded":    "evictions.json",
		"PlimsollStopped":                "resume",
	}
	for _, heading := range page.Headings() {
		if heading == "PlimsollCertificateExpires" { // it asks cert-manager too
			continue
		}
		out := page.Look(t, heading, " NAME", " runbook", " NODE", " "+nodes[0], " POD", " "+agentPod(nodes[0]))
		if !strings.Contains(out, says[heading]) {
			t.Errorf("%s: %q is not in what its commands print:\n%s", heading, says[heading], out)
		}
	}
	stop := pages.Read(t, absolute("."), "docs/emergency-stop.md", binary(), "KUBECONFIG="+absolute("target/e2e/kubeconfig"))
	t.Cleanup(func() {
		tryKubectl("", "annotate", "configmap", "plimsoll-stop", "-n", "plimsoll-node-lease", "plimsoll.dev/stop-")
	})
	all := fmt.Sprintf("%[1]d of %[1]d nodes ", len(nodes))
	if out := stop.Run(t, "Emergency stop"); !strings.Contains(out, all+"have released everything") || !strings.Contains(out, all+"go on") {
		t.Errorf("it says %s", out)
	}
	stop.AllRun()
}
