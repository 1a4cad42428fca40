//go:build e2e

package suite

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// wrongKubepods are `kubepods` values of cgroup v2 layouts that do not fit these nodes: the chart's default on a cgroup v1 node, and the
// cgroupfs driver's on a node with the systemd driver.
var wrongKubepods = map[string]string{"v1": "kubepods.slice", "v2": "kubepods"}

// TestWrongLayoutIsReportedAndCreatesNoCgroup has the cluster to itself: the nodes have no agents meanwhile.
func TestWrongLayoutIsReportedAndCreatesNoCgroup(t *testing.T) {
	needShell(t)
	repository, _, err := image()
	if err != nil {
		t.Fatal(err)
	}
	checkNoCgroups(t)
	t.Cleanup(func() {
		if _, err := helm("", "rollback", "plimsoll", "--namespace", namespace, "--wait"); err != nil { // as docs/install.md says
			t.Error(err)
		}
		waitAgentsRun(t, repository)
	})
	var layouts []string
	for _, node := range nodes {
		layouts = append(layouts, fmt.Sprintf(`{"name":%[1]q,"cgroup":"v2","kubepods":%[2]q,"nodeSelector":{"e2e.plimsoll.dev/cgroup":%[1]q}}`, node, wrongKubepods[node]))
	}
	_, err = helm("", "upgrade", "plimsoll", absolute("charts/plimsoll"), "--namespace", namespace, "--reset-then-reuse-values", "--wait",
		"--set", "waitForAgents.timeoutSeconds=60", "--set-json", "agent.layouts=["+strings.Join(layouts, ",")+"]")
	if err == nil {
		t.Fatal("helm upgrade --wait succeeds without a single agent")
	}
	shown, read := tryKubectl("", "get", "pod", "-n", namespace, "-l", "app.kubernetes.io/component=wait", "-o", "jsonpath={.items[*].status.containerStatuses[*].state.terminated.message}")
	for _, node := range nodes {
		reason := fmt.Sprintf("DaemonSet %s/plimsoll-agent-%[2]s: 0 of 1 agents are ready; ContainerCreating (no directory /sys/fs/cgroup/%[3]s) on %[2]s\n"+
			"  fix: in the entry %[2]s of agent.layouts set ", namespace, node, wrongKubepods[node])
		if !strings.Contains(err.Error(), reason) {
			t.Errorf("the error of Helm does not contain %q: %v", reason, err)
		}
		if read != nil || !strings.Contains(shown, reason) {
			t.Errorf("the container's message is not %q, but %q (%v)", reason, shown, read)
		}
	}

	for _, node := range nodes {
		missing := "/sys/fs/cgroup/" + wrongKubepods[node] + " is not a directory"
		eventually(t, 90*time.Second, "the agent's pod on "+node+" waits, and its events give the reason", func() error {
			pod := agentPod(node)
			shown, err := tryKubectl("", "get", "pod", "-n", namespace, pod, "--no-headers")
			if err != nil {
				return err
			}
			reported, err := tryKubectl("", "describe", "pod", "-n", namespace, pod)
			if err == nil && !(strings.Contains(shown, " ContainerCreating ") && strings.Contains(reported, missing)) {
				err = fmt.Errorf("%s\n%s", shown, reported)
			}
			return err
		})
	}
	eventually(t, time.Minute, "plimsoll doctor reports it with a fix", func() error {
		output, err := run("", binary(), "doctor", "--kubeconfig", absolute("target/e2e/kubeconfig"))
		if err == nil {
			return fmt.Errorf("plimsoll doctor found nothing: %s", output)
		}
		for _, node := range nodes {
			if !strings.Contains(output, fmt.Sprintf("DaemonSet %s/plimsoll-agent-%[2]s: 0 of 1 agents are ready; ContainerCreating (no directory /sys/fs/cgroup/%[3]s) on %[2]s\n"+
				"  fix: in the entry %[2]s of agent.layouts set ", namespace, node, wrongKubepods[node])) {
				return fmt.Errorf("plimsoll doctor does not report %s: %w", node, err)
			}
		}
		return nil
	})
	checkNoCgroups(t)
}

// checkNoCgroups fails the test if a node has a cgroup with the wrong layout's name, in any hierarchy.
func checkNoCgroups(t *testing.T) {
	t.Helper()
	for _, node := range nodes {
		if found := onNode(t, node, fmt.Sprintf("ls -d /sys/fs/cgroup/%[1]s /sys/fs/cgroup/*/%[1]s 2>/dev/null || true", wrongKubepods[node])); found != "" {
			t.Fatalf("%s has a cgroup of the wrong layout: %s", node, found)
		}
	}
}
