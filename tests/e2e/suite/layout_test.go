//go:build e2e

package suite

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// unfit are the `kubepods` of layouts with cgroup v2 that do not fit these nodes: the chart's default, on one with cgroup v1, and what the
// cgroupfs driver has, on one with systemd's.
var unfit = map[string]string{"v1": "kubepods.slice", "v2": "kubepods"}

// TestALayoutThatDoesNotFitItsNodeIsToldAndMakesNoCgroup has the cluster alone: its nodes are without agents meanwhile.
func TestALayoutThatDoesNotFitItsNodeIsToldAndMakesNoCgroup(t *testing.T) {
	needShell(t)
	repository, _, err := image()
	if err != nil {
		t.Fatal(err)
	}
	noneMade(t)
	t.Cleanup(func() {
		if _, err := helm("", "rollback", "plimsoll", "--namespace", namespace, "--wait"); err != nil { // as docs/install.md says
			t.Error(err)
		}
		agentsRun(t, repository)
	})
	var layouts []string
	for _, node := range nodes {
		layouts = append(layouts, fmt.Sprintf(`{"name":%[1]q,"cgroup":"v2","kubepods":%[2]q,"nodeSelector":{"e2e.plimsoll.dev/cgroup":%[1]q}}`, node, unfit[node]))
	}
	_, err = helm("", "upgrade", "plimsoll", absolute("charts/plimsoll"), "--namespace", namespace, "--reset-then-reuse-values", "--wait",
		"--set", "waitForAgents.timeoutSeconds=60", "--set-json", "agent.layouts=["+strings.Join(layouts, ",")+"]")
	if err == nil {
		t.Fatal("helm upgrade --wait ends well without one agent")
	}
	shown, read := tryKubectl("", "get", "pod", "-n", namespace, "-l", "app.kubernetes.io/component=wait", "-o", "jsonpath={.items[*].status.containerStatuses[*].state.terminated.message}")
	for _, node := range nodes {
		reason := fmt.Sprintf("DaemonSet %s/plimsoll-agent-%[2]s: 0 of 1 agents are ready; ContainerCreating (no directory /sys/fs/cgroup/%[3]s) on %[2]s\n"+
			"  do: in the entry %[2]s of agent.layouts set ", namespace, node, unfit[node])
		if !strings.Contains(err.Error(), reason) {
			t.Errorf("Helm does not say %q, but %v", reason, err)
		}
		if read != nil || !strings.Contains(shown, reason) {
			t.Errorf("the container's message is not %q, but %q (%v)", reason, shown, read)
		}
	}

	for _, node := range nodes {
		missing := "/sys/fs/cgroup/" + unfit[node] + " is not a directory"
		eventually(t, 90*time.Second, "the agent's pod on "+node+" waits, and its events say why", func() error {
			pod := agentPod(node)
			shown, err := tryKubectl("", "get", "pod", "-n", namespace, pod, "--no-headers")
			if err != nil {
				return err
			}
			told, err := tryKubectl("", "describe", "pod", "-n", namespace, pod)
			if err == nil && !(strings.Contains(shown, " ContainerCreating ") && strings.Contains(told, missing)) {
				err = fmt.Errorf("%s\n%s", shown, told)
			}
			return err
		})
	}
	eventually(t, time.Minute, "plimsoll doctor says so, and what to do", func() error {
		said, err := run("", binary(), "doctor", "--kubeconfig", absolute("target/e2e/kubeconfig"))
		if err == nil {
			return fmt.Errorf("it says %s", said)
		}
		for _, node := range nodes {
			if !strings.Contains(said, fmt.Sprintf("DaemonSet %s/plimsoll-agent-%[2]s: 0 of 1 agents are ready; ContainerCreating (no directory /sys/fs/cgroup/%[3]s) on %[2]s\n"+
				"  do: in the entry %[2]s of agent.layouts set ", namespace, node, unfit[node])) {
				return fmt.Errorf("nothing of %s: %w", node, err)
			}
		}
		return nil
	})
	noneMade(t)
}

// noneMade fails the test where a node has a cgroup, in any tree, by the name that a layout has wrongly.
func noneMade(t *testing.T) {
	t.Helper()
	for _, node := range nodes {
		if found := onNode(t, node, fmt.Sprintf("ls -d /sys/fs/cgroup/%[1]s /sys/fs/cgroup/*/%[1]s 2>/dev/null || true", unfit[node])); found != "" {
			t.Fatalf("%s has %s", node, found)
		}
	}
}
