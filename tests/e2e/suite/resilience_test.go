//go:build e2e

package suite

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"plimsoll.dev/suite/pages"
	"plimsoll.dev/suite/plane"
)

// underPressure has everything in force in a scene that has its node to itself: two pods throttled (one of them without a limit), and the
// taint. A third pod, like the first, is not selected by the policies.
func underPressure(t *testing.T, s *scene) (*baseline, *victim) {
	t.Helper()
	selected := map[string]string{"app": "pressed"}
	s.running(
		work{name: "limited", args: []string{"burn"}, limits: "100m", requests: "10m", labels: selected},
		work{name: "free", args: []string{"burn", "150"}, labels: selected},
		work{name: "bystander", args: []string{"burn", "30"}, limits: "100m", requests: "10m"},
	)
	o := s.baseline("limited", "free")
	o.watchBystander("bystander")
	s.action(s.name, "{coolDownSeconds: 2, disableScheduling: {}, throttle: {cpuThrottle: {stepCPURatio: 25, minCPURatio: 50}}}")
	s.allow(s.name, "pressed", s.name)
	s.rule(s.name, rule{action: s.name})
	s.waitRulesEnforced(s.name)
	s.set(hot)
	limited := o.before[string(s.pod("limited").UID)]
	limited.quota = s.waitRatio(30*time.Second, limited, 50)
	s.waitRatio(30*time.Second, o.before[string(s.pod("free").UID)], 50)
	s.waitTaint(10*time.Second, corev1.TaintEffectNoSchedule)
	o.waitAccounted(5 * time.Second)
	return o, limited
}

// inForce checks that the pod still has the throttle's quota and the node is closed.
func (s *scene) inForce(v *victim) error {
	if err := s.checkQuota(v, v.quota); err != nil {
		return err
	}
	if found, err := taint(s.node); err != nil || found == nil {
		return fmt.Errorf("taint is %v (%v)", found, err)
	}
	return nil
}

func TestAgentUpgradeKeepsActionsInForce(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		o, limited := underPressure(t, s)
		old := agentContainer(s)
		kubectl(t, "rollout", "restart", "-n", namespace, "daemonset/plimsoll-agent-"+node)
		o.inForceUntil(90*time.Second, "the new agent is ready", limited, func() error { return s.agentReady(old) })
		always(t, 4*time.Second, "the throttle is adopted", func() error { return o.inForce(limited) })
		o.waitAccounted(5 * time.Second)
		s.set(cold)
		o.waitAllRestored(30 * time.Second)
	})
}

func TestDeletedDaemonSetRestoresEverything(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		o, _ := underPressure(t, s)
		name := "plimsoll-agent-" + node
		set, err := kube.AppsV1().DaemonSets(namespace).Get(background, name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			set.ObjectMeta = metav1.ObjectMeta{Name: set.Name, Namespace: set.Namespace, Labels: set.Labels, Annotations: set.Annotations}
			if _, err := kube.AppsV1().DaemonSets(namespace).Create(background, set, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			waitAgent(s, "")
		})
		kubectl(t, "delete", "daemonset", "-n", namespace, name)
		o.waitAllRestored(45 * time.Second)
		eventually(t, 60*time.Second, "the agent is gone", func() error {
			if name := agentPod(node); name != "" {
				return fmt.Errorf("%s still exists", name)
			}
			return nil
		})
		eventually(t, 30*time.Second, "the status that it leaves is correct", func() error {
			now, err := watermarkOf(node)
			if err != nil || now.Status.Counts.Throttled != 0 || len(now.Status.Rules) != 0 {
				return fmt.Errorf("the status is %+v (%v)", now.Status, err)
			}
			return nil
		})
	})
}

func TestNodeWithoutAgentIsRestoredManually(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		o, _ := underPressure(t, s)
		leave, back := s.stopAgent()
		t.Cleanup(back)
		leave()
		page := pages.Read(t, absolute("."), "docs/kubernetes.md", binary(), "KUBECONFIG="+absolute("target/e2e/kubeconfig"))
		if out := page.Run(t, "A node without an agent", "NODE", node, "LAYOUT", node); !strings.Contains(out, "deleted") {
			t.Errorf("the commands printed %s", out)
		}
		o.waitAllRestored(10 * time.Second)
		s.set(cold)
	})
}

// TestUnresponsiveAgentsTaintIsRemovedAndThrottledPodsReported sets the controllers' timeout to a minute instead of ten.
func TestUnresponsiveAgentsTaintIsRemovedAndThrottledPodsReported(t *testing.T) {
	t.Parallel()
	lockAllNodes(t)
	setControllerArgs(t, func(args []string) []string { return append(args, "--dead-agent-after=1m", "--short-dead-agent-after") })
	for _, node := range nodes {
		s := newScene(t, node)
		o, limited := underPressure(t, s)
		leave, back := s.stopAgent()
		t.Cleanup(back)
		before := reasons(t, node)
		stopped := time.Now()
		leave()
		eventually(t, 2*time.Minute, "our taint is removed", func() error {
			found, err := taint(node)
			if found != nil {
				err = fmt.Errorf("the taint is %v", found)
			}
			return err
		})
		took := time.Since(stopped)
		t.Logf("%s: the taint was removed %.0f s after its agent was stopped", node, took.Seconds())
		if took < 50*time.Second {
			t.Error("the agent was declared unresponsive too early")
		}
		if condition := nodeCondition(t, node); condition == nil || condition.Status == corev1.ConditionTrue {
			t.Errorf("the node's condition is %+v", condition)
		}
		for _, reason := range []string{"AgentUnresponsive", "TaintOfDeadAgentRemoved", "ThrottledByDeadAgent"} {
			eventually(t, 20*time.Second, reason+" is reported", func() error {
				if now := reasons(t, node); now[reason] <= before[reason] {
					return fmt.Errorf("before and now: %v, %v", before, now)
				}
				return nil
			})
		}
		if err := s.checkQuota(limited, limited.quota); err != nil {
			t.Errorf("the throttled pod does not stay throttled: %v", err)
		}
		back()
		s.waitTaint(40*time.Second, corev1.TaintEffectNoSchedule)
		s.set(cold)
		o.waitAllRestored(60 * time.Second)
	}
}

// reasons counts a node's events by reason.
func reasons(t *testing.T, node string) map[string]int {
	t.Helper()
	counts := map[string]int{}
	for event, times := range eventCounts(t, "Node", "", node) {
		reason, _, _ := strings.Cut(event, ": ")
		counts[reason] += times
	}
	return counts
}

func TestAgentKilledAtAnyTimeRecoversItsState(t *testing.T) {
	kills := 4
	if *long {
		kills = 50
	}
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		o, limited := underPressure(t, s)
		for i := range kills {
			// The value changes between kills, so that some of them interrupt a step.
			s.set([]int{cold, hot}[i%2])
			time.Sleep(time.Duration(rand.IntN(4000)) * time.Millisecond)
			var left []string
			eventually(t, 30*time.Second, "the agent is killed", func() error {
				pid, err := findProcess(node, "agent")
				if err == nil {
					left, err = o.changesLeftByKilling(pid)
				}
				return err
			})
			// An entry may exist before its write, but never a write without its entry.
			if len(left) > 0 {
				t.Fatalf("after kill %d the journal has no entry for %s", i+1, strings.Join(left, "; "))
			}
			eventually(t, 10*time.Second, "the pod that no policy selects is unchanged", o.checkBystander)
		}
		waitAgent(s, "")
		s.set(hot)
		s.waitRatio(30*time.Second, limited, 50)
		o.waitAccounted(10 * time.Second)
		s.set(cold)
		o.waitAllRestored(40 * time.Second)
	})
}

// exhaustMemory is a script for the scene's node that exhausts the memory of the agent's container until the kernel OOM-kills the agent, and
// prints the kernel's count of OOM kills. A process of the node in the container's cgroup allocates the memory, since the
// agent's image has no other program; oom_score_adj makes the kernel kill the agent first.
func (s *scene) exhaustMemory(agent string) string {
	s.Helper()
	pod := s.directoryOf(namespace, agentPod(s.node), "memory")
	return fmt.Sprintf(`set -e; procs=$(grep -lx %[1]s %[2]s/*/cgroup.procs); cd "${procs%%/cgroup.procs}"; echo 1000 >/proc/%[1]s/oom_score_adj; `+
		`sh -c 'echo $$ >cgroup.procs && x=0123456789abcdef && while :; do x=$x$x; done' & eater=$!; trap 'kill -KILL $eater 2>/dev/null || true' EXIT; `+
		untilGone(agent)+`grep -sh '^oom_kill ' memory.events ../memory.events memory.oom_control || true; `, agent, pod)
}

func TestOOMKilledAgentRecoversItsState(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		o, limited := underPressure(t, s)
		before, old := o.originals(), agentContainer(s)
		if len(before) == 0 {
			t.Fatal("the journal has no entry of a throttled pod")
		}
		seen, end := s.follow(limited)
		left, out, err := o.changesLeftBy(s.exhaustMemory(processOf(t, node, "agent")))
		if err != nil {
			t.Fatal(err)
		}
		if len(left) > 0 {
			t.Fatalf("the journal has no entry for %s", strings.Join(left, "; "))
		}
		byKernel := regexp.MustCompile(`(?m)^oom_kill [1-9]`).MatchString(out)
		o.inForceUntil(90*time.Second, "the agent is back", limited, func() error { return s.agentReady(old) })
		always(t, 4*time.Second, "the throttle is adopted", func() error { return o.inForce(limited) })
		o.waitAccounted(5 * time.Second)
		if now := o.originals(); !maps.Equal(before, now) {
			t.Errorf("the originals in the journal changed from %v to %v", before, now)
		}
		all := seen()
		end()
		for _, change := range all {
			if !change.is(limited.quota) {
				t.Errorf("the quota of %dm was not in force all the time: %v", limited.quota, all)
				break
			}
		}
		pod, err := kube.CoreV1().Pods(namespace).Get(background, agentPod(node), metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		last := pod.Status.ContainerStatuses[0].LastTerminationState.Terminated
		// The container's cgroup may be gone before the count is read.
		if last == nil || last.ExitCode != 137 || !byKernel && last.Reason != "OOMKilled" {
			t.Errorf("the agent was not killed for running out of memory: %+v", last)
		}
		s.set(cold)
		o.waitAllRestored(40 * time.Second)
	})
}

// pressedScene is a scene with everything in force, its baseline, and its pod with a limit.
type pressedScene struct {
	*scene
	*baseline
	*victim
}

// underPressureOnAllNodes puts everything in force on all nodes, without other scenes.
func underPressureOnAllNodes(t *testing.T) (all []pressedScene) {
	t.Helper()
	lockAllNodes(t)
	for _, node := range nodes {
		s := newScene(t, node)
		o, limited := underPressure(t, s)
		all = append(all, pressedScene{s, o, limited})
	}
	return all
}

// checkStaysInForce fails the test if any action is not in force on any node during this time.
func checkStaysInForce(t *testing.T, length time.Duration, all []pressedScene) {
	t.Helper()
	always(t, length, "all actions stay in force", func() error {
		for _, each := range all {
			if err := each.baseline.inForce(each.victim); err != nil {
				return fmt.Errorf("%s: %w", each.scene.node, err)
			}
		}
		return nil
	})
}

// generations are the generations of all NodeWatermarks under test.
func generations(t *testing.T) map[string]string {
	t.Helper()
	now := map[string]string{}
	for _, node := range nodes {
		now[node] = kubectl(t, "get", "nodewatermark", node, "-o", "jsonpath={.metadata.generation}")
	}
	return now
}

// checkNotRewritten fails the test if a NodeWatermark's spec was written since.
func checkNotRewritten(t *testing.T, before map[string]string) {
	t.Helper()
	for node, now := range generations(t) {
		if now != before[node] {
			t.Errorf("NodeWatermark %s was rewritten: generation %s, was %s", node, now, before[node])
		}
	}
}

func TestPoliciesStayEnforcedWithoutTheAPIServer(t *testing.T) {
	t.Parallel()
	all := underPressureOnAllNodes(t)
	outage := 15 * time.Second
	if *long {
		outage = 60 * time.Second
	}
	// One agent has to start during the outage, the others keep running: each node sees both cases.
	for _, restarted := range slices.Backward(nodes) {
		withoutAPIServer(t, all, restarted, outage)
		outage = 15 * time.Second
	}
	for _, each := range all {
		each.scene.set(cold)
	}
	for _, each := range all {
		each.baseline.waitAllRestored(60 * time.Second)
	}
}

// withoutAPIServer stops the API server for this long and kills an agent meanwhile.
func withoutAPIServer(t *testing.T, all []pressedScene, restarted string, outage time.Duration) {
	t.Helper()
	before := generations(t)
	old := processOf(t, restarted, "agent")
	since := map[string]*tally{}
	for _, node := range nodes {
		since[node] = count(t, node)
	}
	// This agent will be killed, and the next one counts from zero.
	since[restarted].reset()
	onNode(t, "v1", "pkill -STOP -x kube-apiserver")
	stopped := time.Now()
	resume := func() { tryOnNode("v1", "pkill -CONT -x kube-apiserver") }
	t.Cleanup(resume)
	onNode(t, restarted, "kill -KILL "+old)
	for time.Since(stopped) < outage {
		for _, each := range all {
			err := each.scene.checkQuota(each.victim, each.victim.quota)
			if err == nil {
				err = each.baseline.checkBystander()
			}
			if err != nil {
				t.Errorf("%s: %s after the API server was stopped: %v", each.scene.node, time.Since(stopped), err)
			}
		}
		time.Sleep(time.Second)
	}
	// Another writer resets a file to the pod's limit: the agent throttles again without the API server.
	for _, each := range all {
		file := "cpu.max"
		reset := "echo '10000 100000' > " + each.victim.directory + "/cpu.max"
		if each.scene.node == "v1" {
			file, reset = "cpu.cfs_quota_us", "for f in "+each.victim.directory+"/*/cpu.cfs_quota_us; do [ $(cat $f) -le 2000 ] || echo 10000 > $f; done" // skips the sandbox, which is at the smallest quota
		}
		onNode(t, each.scene.node, reset)
		eventually(t, 15*time.Second, file+" is written again without an API server", func() error {
			return each.scene.checkQuota(each.victim, each.victim.quota)
		})
	}
	resume()
	eventually(t, 30*time.Second, "the API server responds", func() error {
		_, err := tryKubectl("", "get", "--raw", "/readyz")
		return err
	})
	for _, each := range all {
		each.scene.waitTaint(20*time.Second, corev1.TaintEffectNoSchedule)
	}
	checkNotRewritten(t, before)
	// The agent catches up gradually: within a minute after an outage of a minute.
	checkStaysInForce(t, outage, all)
	for _, node := range nodes {
		// Nothing changed on the node except the file that was reset, so there is little to report.
		since[node].check(t, node, 0, 10)
		waitNodeReady(t, node)
	}
}

func TestPoliciesStayEnforcedWithoutTheController(t *testing.T) {
	t.Parallel()
	all := underPressureOnAllNodes(t)
	before := generations(t)
	scale := func(replicas int) {
		kubectl(t, "scale", "-n", namespace, "deployment/plimsoll-controller", fmt.Sprintf("--replicas=%d", replicas))
	}
	t.Cleanup(func() {
		scale(2)
		kubectl(t, "rollout", "status", "-n", namespace, "deployment/plimsoll-controller", "--timeout=180s")
	})
	scale(0)
	eventually(t, 30*time.Second, "the controller is gone", func() error {
		if pods := componentPods(t, "controller"); len(pods) > 0 {
			return fmt.Errorf("%v", podNames(pods))
		}
		return nil
	})
	checkStaysInForce(t, 5*time.Second, all)
	// The agents restart too: they have the rules.
	since := map[string]*tally{}
	for _, each := range all {
		node, old := each.scene.node, agentContainer(each.scene)
		since[node] = count(t, node)
		since[node].reset()
		onNode(t, node, "kill -KILL "+processOf(t, node, "agent"))
		waitAgent(each.scene, old)
	}
	checkStaysInForce(t, 5*time.Second, all)
	for _, each := range all {
		each.scene.set(cold)
	}
	for _, each := range all {
		each.baseline.waitAllRestored(30 * time.Second)
	}
	for _, each := range all {
		each.scene.set(hot)
	}
	for _, each := range all {
		each.victim.quota = each.scene.waitRatio(30*time.Second, each.victim, 50)
		each.scene.waitTaint(10*time.Second, corev1.TaintEffectNoSchedule)
	}

	// When the controller is back, it neither repeats nor reverts anything.
	scale(2)
	kubectl(t, "rollout", "status", "-n", namespace, "deployment/plimsoll-controller", "--timeout=180s")
	checkStaysInForce(t, 5*time.Second, all)
	checkNotRewritten(t, before)
	for _, each := range all {
		// Meanwhile the rule ended and was breached again: each time the agent wrote the taint, its condition, and about ten events of the node,
		// its NodeWatermark and the two pods.
		since[each.scene.node].check(t, each.scene.node, 40, 40)
		each.scene.set(cold)
	}
	for _, each := range all {
		each.baseline.waitAllRestored(30 * time.Second)
	}
}

func TestStandbyTakesOver(t *testing.T) {
	t.Parallel()
	lockAllNodes(t)
	old, pod := leader(t)
	// Killed, so that it does not release its Lease.
	onNode(t, pod.Spec.NodeName, "kill -KILL "+processOfPod(t, pod, "controller"))
	stopped := time.Now()
	eventually(t, 20*time.Second, "another replica leads", func() error {
		if now := holder(t); now == old {
			return fmt.Errorf("the lease is held by %s", now)
		}
		return nil
	})
	took := time.Since(stopped)
	t.Logf("the standby led after %.1f s", took.Seconds())
	if took > 10*time.Second {
		t.Errorf("the standby led only after %s", took)
	}
}

func TestStandbyTakesOverFromStoppedLeader(t *testing.T) {
	t.Parallel()
	lockAllNodes(t)
	old, pod := leader(t)
	restarts := pod.Status.ContainerStatuses[0].RestartCount
	onNode(t, pod.Spec.NodeName, "kill -STOP "+processOfPod(t, pod, "controller"))
	stopped := time.Now()
	eventually(t, 10*time.Second, "another replica leads", func() error {
		if now := holder(t); now == old || strings.HasPrefix(now, pod.Name) {
			return fmt.Errorf("the lease is held by %s", now)
		}
		return nil
	})
	t.Logf("the standby led after %.1f s", time.Since(stopped).Seconds())
	eventually(t, 3*time.Minute, "the stopped replica was killed for its liveness probe, and is ready again", func() error {
		now, err := kube.CoreV1().Pods(namespace).Get(background, pod.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		container := now.Status.ContainerStatuses[0]
		if last := container.LastTerminationState.Terminated; container.RestartCount != restarts+1 || last == nil || last.ExitCode != 137 || !plane.IsReady(now) {
			return fmt.Errorf("the container's status is %+v", container)
		}
		return nil
	})
}

// holder is the identity in the leader Lease.
func holder(t *testing.T) string {
	t.Helper()
	return kubectl(t, "get", "lease", "-n", namespace, "plimsoll-controller", "-o", "jsonpath={.spec.holderIdentity}")
}

// leader returns the identity of the leading replica and its pod. It waits while a replica that is being replaced still leads.
func leader(t *testing.T) (identity string, pod *corev1.Pod) {
	t.Helper()
	eventually(t, 30*time.Second, "a replica of the current rollout leads", func() error {
		identity = holder(t)
		for _, each := range componentPods(t, "controller") {
			if strings.HasPrefix(identity, each.Name+"_") {
				pod = &each
				return nil
			}
		}
		return fmt.Errorf("no controller pod matches the leader %q", identity)
	})
	return identity, pod
}

// inForceUntil waits for a condition while everything stays in force.
func (o *baseline) inForceUntil(limit time.Duration, what string, v *victim, condition func() error) {
	o.scene.Helper()
	eventually(o.scene, limit, what, func() error {
		if err := o.inForce(v); err != nil {
			o.scene.Fatal(err)
		}
		return condition()
	})
}

func TestRestartsOfAgentAndControllerLoseNothing(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := aloneWithSpareNode(t, node)
		o, limited := underPressure(t, s)
		controller := func() {
			kubectl(t, "rollout", "restart", "-n", namespace, "deployment/plimsoll-controller")
			o.inForceUntil(180*time.Second, "the controller is restarted", limited, func() error {
				_, err := tryKubectl("", "rollout", "status", "-n", namespace, "deployment/plimsoll-controller", "--timeout=1s")
				return err
			})
		}
		agent := func() {
			old := agentContainer(s)
			kubectl(t, "delete", "pod", "-n", namespace, agentPod(node), "--wait=false")
			o.inForceUntil(90*time.Second, "the agent is restarted", limited, func() error { return s.agentReady(old) })
		}
		// Both orders: the agent after the controller, and the controller after the agent.
		for i, restart := range []func(){controller, agent, controller} {
			restart()
			what := fmt.Sprintf("after restart %d all actions stay in force", i+1)
			always(t, 2*time.Second, what, func() error { return o.inForce(limited) })
			o.waitAccounted(5 * time.Second)
		}
		s.set(cold)
		o.waitAllRestored(30 * time.Second)
	})
}

func TestRebootedNodeStartsClean(t *testing.T) {
	onlyLong(t)
	t.Parallel()
	s := aloneWithSpareNode(t, "v2")
	o, limited := underPressure(t, s)
	boot := func() string {
		out, err := tryOnNode("v2", "cat /proc/sys/kernel/random/boot_id")
		if err != nil {
			return ""
		}
		return out
	}
	before, old := boot(), agentContainer(s)
	tryOnNode("v2", "systemctl reboot")
	eventually(t, 180*time.Second, "the node is back", func() error {
		if now := boot(); now == "" || now == before {
			return fmt.Errorf("boot id is %q, was %q", now, before)
		}
		return nil
	})
	waitNodeReady(t, "v2")
	waitAgent(s, old)
	s.waitRunning("limited")
	// The pods are back in new cgroups; the rule, still breached, throttles them again from their new original values.
	s.waitRatio(60*time.Second, limited, 50)
	// They are the same pods with the same original values, so the journal checks apply again.
	s.waitRestored(90*time.Second, o.bystander.directory, o.bystander.before)
	o.waitAccounted(30 * time.Second)
	s.set(cold)
	o.waitAllRestored(90 * time.Second)
	entries, err := journal("v2")
	if err != nil || len(entries) > 0 {
		t.Errorf("unexpected entries in the journal: %v (%v)", entries, err)
	}
	s.running(work{name: "like", args: []string{"pause"}, limits: "100m", requests: "10m"})
	s.waitRestored(10*time.Second, limited.directory, s.victim("like").before)
}

func TestManualNodeWatermarkChangeIsReverted(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		s.action(s.name, gently)
		s.rule(s.name, rule{action: s.name})
		s.waitRulesEnforced(s.name)
		editor := "kubectl-edit-of-" + s.name
		for _, manual := range []struct {
			what, reported string
			change         func() error
		}{
			{"edited", "WatermarkEdited: its NodeWatermark was edited by " + editor + " and is reverted", func() error {
				_, err := objects.Resource(nodeWatermarks).Patch(background, node, types.MergePatchType, []byte(`{"spec":{"rules":[]}}`), metav1.PatchOptions{FieldManager: editor})
				return err
			}},
			{"deleted", "WatermarkDeleted: its NodeWatermark was deleted", func() error {
				return objects.Resource(nodeWatermarks).Delete(background, node, metav1.DeleteOptions{})
			}},
		} {
			before := eventCounts(t, "Node", "", node)
			if err := manual.change(); err != nil {
				t.Fatal(err)
			}
			eventually(t, 20*time.Second, "a NodeWatermark that was "+manual.what+" is as before", func() error {
				now, err := watermarkOf(node)
				if err != nil {
					return err
				}
				for _, rule := range now.Spec.Rules {
					if rule.ID == s.name+"/hot" {
						return nil
					}
				}
				return fmt.Errorf("rules are %v", now.Spec.Rules)
			})
			s.waitRulesEnforced(s.name)
			eventually(t, 15*time.Second, "an event of the node names the change and its author", func() error {
				now := eventCounts(t, "Node", "", node)
				for event, count := range now {
					if strings.HasPrefix(event, manual.reported) && count > before[event] {
						return nil
					}
				}
				return fmt.Errorf("no new event starts with %q: %v", manual.reported, now)
			})
		}
		// Users read it there.
		if page := kubectl(t, "describe", "node", node); !strings.Contains(page, "edited by "+editor) {
			t.Errorf("kubectl describe node does not name %s:\n%s", editor, page)
		}
	})
}

// secondAgent starts a pod like the node's agent, changed by a function, and returns its name.
func (s *scene) secondAgent(change func(*corev1.PodSpec)) string {
	s.Helper()
	first, err := kube.CoreV1().Pods(namespace).Get(background, agentPod(s.node), metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: s.name, Namespace: namespace}, Spec: first.Spec}
	change(&pod.Spec)
	if _, err := kube.CoreV1().Pods(namespace).Create(background, pod, metav1.CreateOptions{}); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { kubectl(s, "delete", "pod", "-n", namespace, s.name, "--wait=false") })
	return s.name
}

// ownState gives an agent its own state directory.
func ownState(spec *corev1.PodSpec) {
	for i := range spec.Volumes {
		if spec.Volumes[i].Name == "state" {
			spec.Volumes[i].VolumeSource = corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
		}
	}
}

func TestSecondAgentOnNodeDoesNotAct(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		o, limited := underPressure(t, s)
		// Only the lock on the node shows that another agent runs.
		second := s.secondAgent(ownState)
		eventually(t, 60*time.Second, "the second agent reports that another one runs", func() error {
			log, err := tryKubectl("", "logs", "-n", namespace, second)
			if err == nil && !strings.Contains(log, "another agent") {
				err = fmt.Errorf("its log is %s", log)
			}
			return err
		})
		always(t, 4*time.Second, "all actions stay in force", func() error { return o.inForce(limited) })
		s.set(cold)
		o.waitAllRestored(30 * time.Second)
	})
}

func TestAgentReportsThatItsNodeDoesNotExist(t *testing.T) {
	t.Parallel()
	s := shared(t, nodes[0])
	second := s.secondAgent(func(spec *corev1.PodSpec) {
		ownState(spec)
		for i := range spec.Containers[0].Env {
			if env := &spec.Containers[0].Env[i]; env.Name == "NODE_NAME" {
				*env = corev1.EnvVar{Name: "NODE_NAME", Value: "nowhere"}
			}
		}
	})
	eventually(t, 60*time.Second, "the agent reports that its node does not exist", func() error {
		log, err := tryKubectl("", "logs", "-n", namespace, second)
		if err == nil && !strings.Contains(log, "node nowhere does not exist") {
			err = fmt.Errorf("its log is %s", log)
		}
		return err
	})
	pod, err := kube.CoreV1().Pods(namespace).Get(background, second, metav1.GetOptions{})
	if err != nil || plane.IsReady(pod) || pod.Status.ContainerStatuses[0].RestartCount > 0 {
		t.Errorf("the agent is ready or was restarted, instead of waiting: %+v (%v)", pod.Status.ContainerStatuses, err)
	}
}
