//go:build smoke

package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestTryThrottlesAndClosesWithinTwoMinutes runs `make try` after the builds, follows its output,
// and presses Ctrl-C.
func TestTryThrottlesAndClosesWithinTwoMinutes(t *testing.T) {
	if len(testNodes(t)) < 2 {
		t.Skip("`make try` needs node v2")
	}
	root, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	binary := filepath.Join(root, "target/x86_64-unknown-linux-musl/release/plimsoll")
	if _, err := os.Stat(binary); err != nil {
		t.Skip("run `make build` first: ", err)
	}
	must(t, "down")
	command := exec.Command("scripts/try", binary)
	command.Dir = root
	// As in a terminal, Ctrl-C goes to the whole process group.
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	command.Stderr = os.Stderr
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	interrupt := func() { syscall.Kill(-command.Process.Pid, syscall.SIGINT) }
	t.Cleanup(func() { cluster(t, "", "down") })
	stuck := time.AfterFunc(7*time.Minute, interrupt)
	defer stuck.Stop()

	lines, text, network := bufio.NewScanner(out), "", ""
	for lines.Scan() {
		text += lines.Text() + "\n"
		if strings.Contains(lines.Text(), "Ctrl-C removes everything") {
			network = followInstructions(t)
			interrupt()
		}
	}
	if err := command.Wait(); err == nil && network == "" {
		t.Error("it exited by itself")
	}
	t.Log(text)
	for _, stage := range []string{"pod batch is throttled", "node v2 takes no new pods"} {
		if after := secondsUntil(text, stage); after < 0 || after > 120 {
			t.Errorf("%q came after %d s", stage, after)
		}
	}
	if !strings.HasSuffix(strings.TrimSpace(text), "removing everything") {
		t.Error("it did not print that it removes everything")
	}
	checkNothingLeft(t, network)
}

// secondsUntil is the number of seconds that `try` printed with a stage, -1 if it did not print the stage.
func secondsUntil(text, stage string) int {
	match := regexp.MustCompile(`(?m)^ *(\d+) s  .*` + regexp.QuoteMeta(stage)).FindStringSubmatch(text)
	if match == nil {
		return -1
	}
	seconds, err := strconv.Atoi(match[1])
	if err != nil {
		return -1
	}
	return seconds
}

// followInstructions runs the commands that `try` prints. It returns the cluster's network.
func followInstructions(t *testing.T) string {
	t.Helper()
	examples := "cpu-pressure disk memory temperature watermark1 watermark2 watermark3"
	if applied := must(t, "kubectl", "get", "nodeqos", "-o", "jsonpath={.items[*].metadata.name}"); applied != examples {
		t.Errorf("unexpected NodeQOS objects are applied: %s", applied)
	}
	if output := must(t, "kubectl", "describe", "nodewatermark", "v2"); !strings.Contains(output, "batch") {
		t.Errorf("the NodeWatermark does not name the pod:\n%s", output)
	}
	if output := must(t, "kubectl", "describe", "node", "v2"); !strings.Contains(output, "interference.crane.io") {
		t.Errorf("the Node has no taint:\n%s", output)
	}
	if output := must(t, "kubectl", "get", "events", "--field-selector", "involvedObject.name=batch"); !strings.Contains(output, "PodThrottled") {
		t.Errorf("the events are\n%s", output)
	}
	if quota := must(t, "cgroup", "default/batch", "cpu.max"); strings.HasPrefix(quota, "max") {
		t.Errorf("cpu.max is %s", quota)
	}
	// With watches, so that polling does not load the node.
	must(t, "kubectl", "delete", "pod", "batch")
	must(t, "kubectl", "wait", "nodewatermark/v2", "--for=jsonpath={.status.scheduling.state}=Enabled", "--timeout=2m")
	must(t, "kubectl", "wait", "nodewatermark/v2", "--for=jsonpath={.status.counts.throttled}=0", "--timeout=10s")
	if taints := must(t, "kubectl", "get", "node", "v2", "-o", "jsonpath={.spec.taints}"); strings.Contains(taints, "interference.crane.io") {
		t.Errorf("the Node still has the taint: %s", taints)
	}
	pid, err := sandboxPid(testLayout(t))
	if err != nil || pid == 0 {
		t.Fatal(pid, err)
	}
	return networkOf(t, fmt.Sprint(pid))
}
