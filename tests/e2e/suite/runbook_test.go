//go:build e2e

package suite

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"plimsoll.dev/suite/pages"
	"plimsoll.dev/suite/plane"
)

// TestRunbookCommandsWork runs all commands of the runbook on a healthy installation.
func TestRunbookCommandsWork(t *testing.T) {
	needShell(t)
	values := filepath.Join(t.TempDir(), "values.yaml")
	repository, tag, err := image()
	if err != nil {
		t.Fatal(err)
	}
	(&release{values: values}).setValues(t, repository, tag, generousBudgets)
	// kubectl logs fails for terminating pods, such as replicas of the previous scene.
	eventually(t, 2*time.Minute, "no replica is starting or terminating", func() error {
		list, err := kube.CoreV1().Pods(namespace).List(background, metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=controller"})
		if err != nil {
			return err
		}
		for _, pod := range list.Items {
			if pod.DeletionTimestamp != nil || !plane.IsReady(&pod) {
				return fmt.Errorf("%s is not ready, or terminating", pod.Name)
			}
		}
		return nil
	})
	page := pages.Read(t, absolute("."), "docs/runbook.md", binary(), "KUBECONFIG="+absolute("target/e2e/kubeconfig"))
	page.Helm(absolute("target/e2e/bin/helm"), values)
	apply(t, `{apiVersion: ensurance.crane.io/v1alpha1, kind: NodeQOS, metadata: {name: runbook}, spec: {selector: {matchLabels: {no-node: has-this}},
  rules: [{name: nothing, avoidanceThreshold: 2, restoreThreshold: 2, actionName: disable, strategy: Preview, metricRule: {name: cpu_total_usage, value: 5000}}]}}`)
	t.Cleanup(func() { kubectl(t, "delete", "nodeqos", "runbook", "--ignore-not-found") })
	expected := map[string]string{
		"PlimsollNoLeader":               "holderIdentity",
		"PlimsollTwoLeaders":             "plimsoll-controller",
		"PlimsollDefinitionsOutdated":    "serverside-applied",
		"PlimsollRolloutStopped":         "runbook",
		"PlimsollNodesWait":              "runbook",
		"PlimsollCapReached":             nodes[0],
		"PlimsollAgentsUnresponsive":     nodes[0],
		"PlimsollReportsNotAcknowledged": "plimsoll-report",
		"PlimsollRulesRefused":           nodes[0],
		"PlimsollEvictionsRefused":       "plimsoll-report",
		"PlimsollEvictionsUnrecorded":    "evictions.json",
		"PlimsollStopped":                "resume",
	}
	const withCertManager, renewed = "With cert-manager", "The Secret is new and the log names an old date"
	const damaged = "The log says that the journal cannot be used"
	for _, heading := range page.Headings() {
		// The first two run elsewhere. The last is never run: no journal is damaged.
		if heading == withCertManager || heading == renewed || heading == damaged {
			continue
		}
		out := page.RunEach(t, heading, " NAME", " runbook", " NODE", " "+nodes[0], " POD", " "+agentPod(nodes[0]))
		if !strings.Contains(out, expected[heading]) {
			t.Errorf("%s: %q is not in the output of its commands:\n%s", heading, expected[heading], out)
		}
	}
	guide := pages.Read(t, absolute("."), "docs/kubernetes.md", binary(), "KUBECONFIG="+absolute("target/e2e/kubeconfig"))
	for _, heading := range guide.Headings() {
		switch heading {
		case "Edits":
			if out := guide.Run(t, heading, " NAME", " runbook"); strings.Count(out, "annotated") != 2 {
				t.Errorf("%s: unexpected output: %s", heading, out)
			}
		case "A node without an agent", "Certificates": // they have their own scenes
		default:
			t.Errorf("no test runs the commands of docs/kubernetes.md under the heading %q", heading)
		}
	}
	kubectl(t, "delete", "nodeqos", "runbook")
	t.Run("the commands of README.md for a cluster", runReadmeCommands)
	t.Run("new replicas", func(t *testing.T) {
		page.Run(t, renewed)
		waitReplicasReplaced(t)
	})
	stop := pages.Read(t, absolute("."), "docs/emergency-stop.md", binary(), "KUBECONFIG="+absolute("target/e2e/kubeconfig"))
	t.Cleanup(func() {
		tryKubectl("", "annotate", "configmap", "plimsoll-stop", "-n", "plimsoll-node-lease", "plimsoll.dev/stop-")
	})
	all := fmt.Sprintf("%[1]d of %[1]d nodes ", len(nodes))
	if out := stop.Run(t, "Emergency stop"); !strings.Contains(out, all+"have restored everything") || !strings.Contains(out, all+"have resumed") {
		t.Errorf("unexpected output: %s", out)
	}
	stop.CheckAllRun()
}

// readmePolicy is a valid policy without effect.
const readmePolicy = `{apiVersion: ensurance.crane.io/v1alpha1, kind: AvoidanceAction, metadata: {name: readme}, spec: {disableScheduling: {}}}
---
{apiVersion: ensurance.crane.io/v1alpha1, kind: NodeQOS, metadata: {name: readme}, spec: {rules: [{name: nothing, avoidanceThreshold: 2, restoreThreshold: 2,
  actionName: readme, strategy: Preview, metricRule: {name: memory_total_utilization, value: 99}}]}}
`

// readmePod is the pod that README.md asks about.
const readmePod = `{apiVersion: v1, kind: Namespace, metadata: {name: shop}}
---
{apiVersion: v1, kind: Pod, metadata: {name: web-0, namespace: shop},
  spec: {terminationGracePeriodSeconds: 1, containers: [{name: work, image: "%s", imagePullPolicy: IfNotPresent, args: [pause]}]}}
`

// runReadmeCommands runs the commands of README.md, except the builds, and the installation, which is the same as in docs/install.md
// (tests/pure/docs.rs checks that).
func runReadmeCommands(t *testing.T) {
	const heading = "Use it on your cluster"
	page := pages.Read(t, absolute("."), "README.md", binary(), "KUBECONFIG="+absolute("target/e2e/kubeconfig"))
	page.From(heading, "plimsoll doctor --wait")
	page.File("policy.yaml", readmePolicy)
	t.Cleanup(func() {
		kubectl(t, "delete", "nodeqos/readme", "avoidanceaction/readme", "namespace/shop", "--ignore-not-found")
	})
	apply(t, fmt.Sprintf(readmePod, toolsImage))
	// Leftovers of earlier scenes may take a moment to settle.
	out := page.Run(t, heading, " NODE ", " "+nodes[0]+" ", "plimsoll doctor --wait", "plimsoll doctor --wait --timeout=2m")
	for _, wanted := range []string{"nothing is wrong: ", "0 errors and 0 warnings", "nodeqos.ensurance.crane.io/readme created"} {
		if !strings.Contains(out, wanted) {
			t.Errorf("%q is not in the output of its commands:\n%s", wanted, out)
		}
	}
}

// waitReplicasReplaced waits until the controller's rollout is complete and one of the new replicas leads.
func waitReplicasReplaced(t *testing.T) {
	t.Helper()
	kubectl(t, "rollout", "status", "-n", namespace, "deployment/plimsoll-controller", "--timeout=180s")
	eventually(t, 2*time.Minute, "the old replicas are gone", func() error {
		pods := kubectl(t, "get", "pods", "-n", namespace, "-l", "app.kubernetes.io/component=controller", "-o", "jsonpath={.items[*].metadata.name}")
		leader, _, _ := strings.Cut(holder(t), "_")
		if len(strings.Fields(pods)) != 2 || leader == "" || !strings.Contains(pods, leader) {
			return fmt.Errorf("%q leads, and there are %s", leader, pods)
		}
		return nil
	})
}
