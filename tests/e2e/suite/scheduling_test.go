//go:build e2e

package suite

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestBusyNodeIsUnschedulableUntilCoolDownEnds(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := aloneWithSpareNode(t, node)
		s.action(s.name, "{coolDownSeconds: 4}")
		s.rule(s.name, rule{action: s.name})
		s.waitRulesEnforced(s.name)

		crossed := time.Now()
		s.set(hot)
		s.waitTaint(10*time.Second, corev1.TaintEffectNoSchedule)
		took := time.Since(crossed)
		t.Logf("from above its threshold to tainted, as kubectl get node shows it: %.1f s", took.Seconds())
		if took > 3500*time.Millisecond { // (threshold + 1) x period + 0.5 s
			t.Errorf("the taint took %s", took)
		}
		eventually(t, 15*time.Second, "it is reported", func() error {
			if err := checkRow(node, "NoSchedule", map[string]int{"RULES": 1, "BREACHED": 1}); err != nil {
				return err
			}
			if err := s.checkBreached(s.name, crossed); err != nil {
				return err
			}
			if condition := nodeCondition(t, node); condition == nil || condition.Status != corev1.ConditionTrue {
				return fmt.Errorf("condition InterferenceIdentified is %v", condition)
			}
			if reported := strings.Join(events(t, "Node", "", node), "\n"); !strings.Contains(reported, s.name+"/hot") {
				return fmt.Errorf("no event of the node names the rule:\n%s", reported)
			}
			return nil
		})

		s.start(work{name: "here", args: []string{"pause"}, intolerant: true},
			work{name: "wherever", args: []string{"pause"}, anywhere: true, intolerant: true})
		eventually(t, 20*time.Second, "the scheduler does not place a new pod on the node", func() error {
			if reported := strings.Join(events(t, "Pod", s.name, "here"), "\n"); !strings.Contains(reported, "FailedScheduling") {
				return fmt.Errorf("events: %s", reported)
			}
			return nil
		})
		s.waitRunning("wherever")
		if on := s.pod("wherever").Spec.NodeName; on != other(node) {
			t.Errorf("a pod for any node went to %s", on)
		}
		if now := s.pod("here"); now.Status.Phase != corev1.PodPending || now.Spec.NodeName != "" {
			t.Errorf("pod here should be pending, but is %s on %q", now.Status.Phase, now.Spec.NodeName)
		}

		fell := time.Now()
		s.set(cold)
		s.waitNoTaint(20 * time.Second)
		if lasted := time.Since(fell); lasted < 3*time.Second {
			t.Errorf("the taint was removed after %s, but the cool-down is 4 s", lasted)
		}
		s.waitRunning("here")
		eventually(t, 15*time.Second, "the condition is false", func() error {
			if condition := nodeCondition(t, node); condition != nil && condition.Status == corev1.ConditionTrue {
				return fmt.Errorf("condition InterferenceIdentified is %v", condition)
			}
			return checkRow(node, "Enabled", nil)
		})
	})
}

// exporterPort is the port of an exporter on a node, as 9100 is node_exporter's.
const exporterPort = 19464

// TestNodeExporterIsProbedWithoutHost runs an exporter on the host network, and a probe without a host: the agent, which has a network
// namespace of its own, probes the node's address.
func TestNodeExporterIsProbedWithoutHost(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		exporter := work{name: "exporter", args: []string{"gauge", fmt.Sprintf(":%d", exporterPort)}}
		s.startChanged(exporter, func(spec *corev1.PodSpec) { spec.HostNetwork = true })
		s.waitRunning("exporter")
		expose := func(value int) {
			t.Helper()
			eventually(t, 20*time.Second, "the exporter accepts its value", func() error {
				_, err := queryGaugeOf(s.name, fmt.Sprintf("exporter:%d", exporterPort), "/set", "room_celsius", fmt.Sprint(value))
				return err
			})
		}
		expose(cold)
		s.action(s.name, "{coolDownSeconds: 2, disableScheduling: {effect: PreferNoSchedule}}")
		s.policy("NodeQOS", s.name, fmt.Sprintf(`{selector: {matchLabels: {kubernetes.io/hostname: %s}},
  nodeQualityProbe: {timeoutSeconds: 2, httpGet: {port: %d, path: /metrics}},
  rules: [{name: hot, avoidanceThreshold: 2, restoreThreshold: 2, actionName: %s, metricRule: {name: room_celsius, value: %d}}]}`,
			node, exporterPort, s.name, threshold))
		s.waitRulesEnforced(s.name)
		state := func(state string, value float64) error {
			now, err := watermarkOf(node)
			if err != nil {
				return err
			}
			for _, rule := range now.Status.Rules {
				if rule.ID == s.name+"/hot" && rule.State == state && rule.Value != nil && *rule.Value == value {
					return nil
				}
			}
			return fmt.Errorf("no rule is %s at %v: %+v", state, value, now.Status.Rules)
		}
		eventually(t, 40*time.Second, "the exporter's value is in the status", func() error { return state("Normal", cold) })
		if found, err := taint(node); err != nil || found != nil {
			t.Fatalf("the node is already tainted at a low value: %v (%v)", found, err)
		}
		expose(hot)
		s.waitTaint(20*time.Second, corev1.TaintEffectPreferNoSchedule)
		eventually(t, 20*time.Second, "the status reports it", func() error { return state("Breached", hot) })
		expose(cold)
		s.waitNoTaint(30 * time.Second)
	})
}

func nodeCondition(t *testing.T, node string) *corev1.NodeCondition {
	t.Helper()
	object, err := kube.CoreV1().Nodes().Get(background, node, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, condition := range object.Status.Conditions {
		if condition.Type == "InterferenceIdentified" {
			return &condition
		}
	}
	return nil
}

func TestTaintsOfOtherWritersAreKept(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		taints := func() (keys []string) {
			object, err := kube.CoreV1().Nodes().Get(background, node, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, taint := range object.Spec.Taints {
				keys = append(keys, taint.Key)
			}
			return keys
		}
		kubectl(t, "taint", "node", node, "example.com/kept=yes:PreferNoSchedule")
		t.Cleanup(func() { tryKubectl("", "taint", "node", node, "example.com/kept-", "example.com/busy-") })
		s.action(s.name, "{coolDownSeconds: 1}")
		s.rule(s.name, rule{action: s.name})
		s.waitRulesEnforced(s.name)

		// Another client writes taints all the time.
		stop, ended := make(chan struct{}), make(chan int)
		go func() {
			writes := 0
			defer func() { ended <- writes }()
			for {
				for _, change := range []string{"example.com/busy=yes:PreferNoSchedule", "example.com/busy-"} {
					if _, err := tryKubectl("", "taint", "node", node, change); err == nil {
						writes++
					}
					select {
					case <-stop:
						return
					default:
					}
				}
			}
		}()
		for range 3 {
			s.set(hot)
			s.waitTaint(15*time.Second, corev1.TaintEffectNoSchedule)
			if now := taints(); !slices.Contains(now, "example.com/kept") {
				t.Errorf("the other client's taint is lost: %v", now)
			}
			s.set(cold)
			s.waitNoTaint(15 * time.Second)
			if now := taints(); !slices.Contains(now, "example.com/kept") {
				t.Errorf("the other client's taint is lost: %v", now)
			}
		}
		close(stop)
		if writes := <-ended; writes < 4 {
			t.Fatalf("the other client made only %d writes meanwhile", writes)
		}
	})
}

func TestTaintLeftByDeadAgentIsRemoved(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		s.action(s.name, "{coolDownSeconds: 1}")
		s.rule(s.name, rule{action: s.name})
		s.waitRulesEnforced(s.name)
		s.set(hot)
		s.waitTaint(10*time.Second, corev1.TaintEffectNoSchedule)
		// The agent dies, and the policy is deleted before the next agent starts.
		agent := processOf(t, node, "agent")
		onNode(t, node, "kill -STOP "+agent)
		s.noPolicies()
		onNode(t, node, "kill -KILL "+agent)
		s.waitNoTaint(60 * time.Second)
	})
}

func TestPreferNoScheduleEffectOfActionIsUsed(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		s.action(s.name, "{coolDownSeconds: 1, disableScheduling: {effect: PreferNoSchedule}}")
		s.rule(s.name, rule{action: s.name})
		s.waitRulesEnforced(s.name)
		s.set(hot)
		s.waitTaint(10*time.Second, corev1.TaintEffectPreferNoSchedule)
		eventually(t, 25*time.Second, "kubectl shows it", func() error { return checkRow(node, "PreferNoSchedule", map[string]int{"BREACHED": 1}) })
		// An edit to the stronger effect takes effect while the action is in force.
		s.action(s.name, "{coolDownSeconds: 1, disableScheduling: {effect: NoSchedule}}")
		s.waitTaint(10*time.Second, corev1.TaintEffectNoSchedule)
		s.set(cold)
		s.waitNoTaint(15 * time.Second)
	})
}

func TestRemovedTaintIsRestored(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		s.action(s.name, "{coolDownSeconds: 1}")
		s.rule(s.name, rule{action: s.name})
		s.waitRulesEnforced(s.name)
		s.set(hot)
		s.waitTaint(10*time.Second, corev1.TaintEffectNoSchedule)
		if _, err := kube.CoreV1().Nodes().Patch(background, node, types.MergePatchType, []byte(`{"spec":{"taints":null}}`), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		s.waitTaint(10*time.Second, corev1.TaintEffectNoSchedule)
		s.set(cold)
		s.waitNoTaint(15 * time.Second)
	})
}

func TestOneOfTwoBusyNodesStaysSchedulableWithACapOfHalf(t *testing.T) {
	t.Parallel()
	if len(nodes) < 2 {
		t.Skip("needs a second node")
	}
	lockAllNodes(t)
	setMaxUnschedulable(t, "50%")
	var both []*scene
	for _, node := range nodes {
		s := newScene(t, node)
		s.action(s.name, "{coolDownSeconds: 1}")
		s.rule(s.name, rule{action: s.name})
		both = append(both, s)
	}
	for _, s := range both {
		s.waitRulesEnforced(s.name)
	}
	for _, s := range both {
		s.set(hot)
	}
	effects := func() map[corev1.TaintEffect]string {
		on := map[corev1.TaintEffect]string{}
		for _, s := range both {
			found, err := taint(s.node)
			if err != nil {
				t.Fatal(err)
			}
			if found != nil {
				on[found.Effect] += s.node
			}
		}
		return on
	}
	var fallback string
	eventually(t, 30*time.Second, "one node is closed, and the other gets PreferNoSchedule", func() error {
		on := effects()
		fallback = on[corev1.TaintEffectPreferNoSchedule]
		if !slices.Contains(nodes, fallback) || !slices.Contains(nodes, on[corev1.TaintEffectNoSchedule]) {
			return fmt.Errorf("%v", on)
		}
		return nil
	})
	eventually(t, 25*time.Second, "it is reported", func() error {
		if reported := strings.Join(events(t, "Node", "", fallback), "\n"); !strings.Contains(reported, "SchedulingSoftened") {
			return fmt.Errorf("events of node %s:\n%s", fallback, reported)
		}
		return checkRow(fallback, "PreferNoSchedule", map[string]int{"BREACHED": 1})
	})
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if on := effects(); on[corev1.TaintEffectPreferNoSchedule] != fallback {
			t.Fatalf("the node with PreferNoSchedule changed: %v", on)
		}
	}
	for _, s := range both {
		s.set(cold)
	}
	for _, s := range both {
		s.waitNoTaint(20 * time.Second)
	}
}

// setMaxUnschedulable gives the controllers another `--max-unschedulable` until the test ends.
func setMaxUnschedulable(t *testing.T, limit string) {
	t.Helper()
	const flag = "--max-unschedulable="
	setControllerArgs(t, func(args []string) []string {
		return append(slices.DeleteFunc(args, func(arg string) bool { return strings.HasPrefix(arg, flag) }), flag+limit)
	})
}

// setControllerArgs changes the controllers' arguments until the test ends.
func setControllerArgs(t *testing.T, change func([]string) []string) {
	t.Helper()
	set := func(change func([]string) []string) (before []string) {
		t.Helper()
		eventually(t, time.Minute, "the controllers have other arguments", func() error {
			deployment, err := kube.AppsV1().Deployments(namespace).Get(background, "plimsoll-controller", metav1.GetOptions{})
			if err != nil {
				return err
			}
			args := &deployment.Spec.Template.Spec.Containers[0].Args
			before = *args
			*args = change(slices.Clone(before))
			_, err = kube.AppsV1().Deployments(namespace).Update(background, deployment, metav1.UpdateOptions{})
			return err
		})
		kubectl(t, "rollout", "status", "-n", namespace, "deployment/plimsoll-controller", "--timeout=180s")
		return before
	}
	before := set(change)
	t.Cleanup(func() { set(func([]string) []string { return before }) })
}
