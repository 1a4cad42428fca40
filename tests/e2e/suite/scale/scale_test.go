//go:build e2e

package scale

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func quantity(text string) resource.Quantity { return resource.MustParse(text) }

const closeAction = `{"apiVersion": "ensurance.crane.io/v1alpha1", "kind": "AvoidanceAction", "metadata": {"name": "close"}, "spec": {}}`

// policy is a NodeQOS that closes nodes above a threshold; pool is a label's value, or empty for all nodes.
func policy(name, pool string, threshold int, immediate bool) string {
	selector, annotations := "{}", "{}"
	if pool != "" {
		selector = fmt.Sprintf(`{"matchLabels": {"pool": %q}}`, pool)
	}
	if immediate {
		annotations = `{"plimsoll.dev/rollout": "immediate"}`
	}
	return fmt.Sprintf(`{"apiVersion": "ensurance.crane.io/v1alpha1", "kind": "NodeQOS", "metadata": {"name": %q, "annotations": %s}, "spec": {"selector": %s, "rules": [
		{"name": "cpu", "avoidanceThreshold": 1, "actionName": "close", "metricRule": {"name": "cpu_total_usage", "value": %d}}]}}`,
		name, annotations, selector, threshold)
}

// effects are the nodes by the effect of our taint, or Enabled.
func (p *plane) effects() map[string][]string {
	nodes, err := p.Kube.CoreV1().Nodes().List(background, metav1.ListOptions{})
	if err != nil {
		p.T.Fatal(err)
	}
	effects := map[string][]string{}
	for _, node := range nodes.Items {
		effect := effectOf(&node)
		effects[effect] = append(effects[effect], node.Name)
	}
	return effects
}

// thresholds counts the nodes by the threshold of their rule of policy all.
func (p *plane) thresholds() map[float64]int {
	list, err := p.Objects.Resource(watermarks).List(background, metav1.ListOptions{})
	if err != nil {
		p.T.Fatal(err)
	}
	thresholds := map[float64]int{}
	for _, object := range list.Items {
		rules, _, _ := unstructured.NestedSlice(object.Object, "spec", "rules")
		for _, rule := range rules {
			if rule := rule.(map[string]any); strings.HasPrefix(rule["id"].(string), "all/") {
				thresholds[number(rule["watermark"])]++
			}
		}
	}
	return thresholds
}

// waitAcknowledged waits until all agents have acknowledged their rules: only such nodes can be canaries.
func (p *plane) waitAcknowledged(limit time.Duration, nodes int) {
	p.T.Helper()
	p.Eventually(limit, "all agents enforce the current rules", func() error {
		list, err := p.Objects.Resource(watermarks).List(background, metav1.ListOptions{})
		if err != nil {
			return err
		}
		enforcing := 0
		for _, object := range list.Items {
			hash, _, _ := unstructured.NestedString(object.Object, "spec", "hash")
			observed, _, _ := unstructured.NestedString(object.Object, "status", "observedHash")
			if hash != "" && hash == observed {
				enforcing++
			}
		}
		if enforcing < nodes {
			return fmt.Errorf("only %d of %d do", enforcing, nodes)
		}
		return nil
	})
}

// waitThreshold waits until all nodes have this threshold, and returns how long it took.
func (p *plane) waitThreshold(limit time.Duration, threshold, nodes int) time.Duration {
	p.T.Helper()
	return p.Eventually(limit, fmt.Sprintf("all nodes have the threshold %d", threshold), func() error {
		if thresholds := p.thresholds(); thresholds[float64(threshold)] < nodes {
			return fmt.Errorf("nodes by threshold: %v", thresholds)
		}
		return nil
	})
}

// TestMaxUnschedulableIsNotExceeded: twenty nodes exceed their threshold at once; the six that exceed it most stay closed, and fourteen
// get PreferNoSchedule instead.
func TestMaxUnschedulableIsNotExceeded(t *testing.T) {
	p := start(t)
	nodes := p.nodes(20)
	agents := p.agents()
	p.Apply(closeAction, policy("all", "", 4000, true))
	p.waitThreshold(30*time.Second, 4000, 20)
	over := func(node string) float64 { return 4100 + 10*float64(slices.Index(nodes, node)) }
	agents.setValues(over, nodes...)
	started := time.Now()
	tooMany := time.Duration(0)
	settled := p.Eventually(time.Minute, "six are closed", func() error {
		effects := p.effects()
		if len(effects["NoSchedule"]) > 6 {
			tooMany = time.Since(started)
		}
		if len(effects["NoSchedule"]) != 6 || len(effects["PreferNoSchedule"]) != 14 {
			return fmt.Errorf("%v", effects)
		}
		return nil
	})
	// Real agents report within a second that they close their node.
	if tooMany > 3*time.Second {
		t.Errorf("more than six nodes were closed until %s after the breach", tooMany.Round(time.Millisecond))
	}
	t.Logf("all twenty above their threshold: six closed after %s; more than six until %s after the breach", settled.Round(time.Millisecond), tooMany.Round(time.Millisecond))
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		if effects := p.effects(); !slices.Equal(effects["NoSchedule"], nodes[14:]) || !slices.Equal(effects["PreferNoSchedule"], nodes[:14]) {
			t.Fatalf("the closed nodes are not the six that are furthest above their threshold: %v", effects)
		}
	}
	p.Eventually(10*time.Second, "an event reports a node with PreferNoSchedule, and the reason", func() error {
		events := p.Kubectl("get", "events", "-A", "--field-selector", "reason=SchedulingSoftened", "-o",
			"jsonpath={range .items[*]}{.involvedObject.name} {.message}{'\\n'}{end}")
		for line := range strings.Lines(events) {
			if strings.HasPrefix(line, nodes[0]+" ") && strings.Contains(line, "of 20 nodes want them unschedulable, and at most 6 may be") {
				return nil
			}
		}
		return fmt.Errorf("events:\n%s", events)
	})
	agents.setValues(func(string) float64 { return 1000 }, nodes...)
	p.Eventually(time.Minute, "all nodes are open again", func() error {
		if effects := p.effects(); len(effects["Enabled"]) != 20 {
			return fmt.Errorf("%v", effects)
		}
		return nil
	})
}

// TestTighteningEditStopsAtCanaryThatActs: the canary starts to act, and the other nineteen nodes never get the edit.
func TestTighteningEditStopsAtCanaryThatActs(t *testing.T) {
	p := start(t)
	nodes := p.nodes(20)
	agents := p.agents()
	p.Apply(closeAction, policy("all", "", 4000, true))
	agents.setValues(func(string) float64 { return 3000 }, nodes...)
	p.waitThreshold(30*time.Second, 4000, 20)
	p.waitAcknowledged(30*time.Second, 20)
	p.Apply(policy("all", "", 2000, false))
	p.Eventually(time.Minute, "the edit stops", func() error {
		reason := p.Kubectl("get", "nodeqos", "all", "-o", `jsonpath={.status.conditions[?(@.type=="RolledOut")].reason}`)
		if reason != "CanariesAct" {
			return fmt.Errorf("RolledOut is %q", reason)
		}
		return nil
	})
	p.Eventually(10*time.Second, "an event reports it", func() error {
		if events := p.Kubectl("get", "events", "-A", "--field-selector", "reason=RolloutStopped"); !strings.Contains(events, "nodeqos/all") {
			return fmt.Errorf("events: %s", events)
		}
		return nil
	})
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(time.Second) {
		thresholds, effects := p.thresholds(), p.effects()
		if thresholds[2000] != 1 || thresholds[4000] != 19 || len(effects["NoSchedule"]) != 1 {
			t.Fatalf("unexpected nodes by threshold: %v, by effect: %v", thresholds, effects)
		}
	}
}

// versions are the resource versions of the objects that the controller writes.
func (p *plane) versions() map[string]string {
	versions := map[string]string{}
	for _, kind := range []string{"nodewatermarks", "nodeqoss", "podqoss", "avoidanceactions"} {
		out := p.Kubectl("get", kind, "-o", `jsonpath={range .items[*]}{.metadata.name} {.metadata.resourceVersion}{"\n"}{end}`)
		for line := range strings.Lines(out) {
			name, version, _ := strings.Cut(strings.TrimSpace(line), " ")
			versions[kind+"/"+name] = version
		}
	}
	return versions
}

// TestThousandNodesAndFiftyPolicies: a tightening edit reaches all nodes in the time of its rollout (a minute with ten
// canaries, then a hundred nodes a second). After that nothing is written.
func TestThousandNodesAndFiftyPolicies(t *testing.T) {
	p := start(t)
	const count = 1000
	nodes := p.nodes(count)
	manifests := []string{closeAction, policy("all", "", 7000, true)}
	for index := range 49 {
		manifests = append(manifests, policy(fmt.Sprintf("pool%02d", index), fmt.Sprintf("pool%d", index), 7500, true))
	}
	p.Apply(manifests...)
	first := p.waitThreshold(3*time.Minute, 7000, count)
	agents := p.agents()
	agents.setValues(func(string) float64 { return 1000 }, nodes...)
	p.Eventually(2*time.Minute, "all nodes are matched", func() error {
		if matched := p.Kubectl("get", "nodeqos", "all", "-o", "jsonpath={.status.matchedNodes}"); matched != "1000" {
			return fmt.Errorf("matched: %s", matched)
		}
		return nil
	})
	p.waitAcknowledged(2*time.Minute, count)
	p.Apply(policy("all", "", 6000, false))
	edit := p.waitThreshold(2*time.Minute, 6000, count)
	// Scale by the time that the first writes took on this machine.
	limit := time.Minute + max(10*time.Second, first) + 15*time.Second
	if edit < time.Minute || edit > limit {
		t.Errorf("the edit took %s, expected one minute for the canaries and at most %s in all", edit, limit)
	}
	t.Logf("%d nodes and 50 policies written in %s; a tightening edit reached all nodes in %s", count, first.Round(time.Second), edit.Round(time.Second))
	before := p.versions()
	p.Eventually(2*time.Minute, "nothing is written any more", func() error {
		last := before
		time.Sleep(5 * time.Second)
		if before = p.versions(); !maps.Equal(last, before) {
			return fmt.Errorf("objects are still being written")
		}
		return nil
	})
	requests := p.metric("plimsoll_controller_api_requests_total")
	time.Sleep(time.Minute)
	if after := p.versions(); !maps.Equal(before, after) {
		t.Error("objects were written although nothing changed")
	}
	rate := (p.metric("plimsoll_controller_api_requests_total") - requests) / 60
	t.Logf("in a steady state: %.2f requests a second, all of them the Lease and watches; %s kB resident", rate, p.controller.Resident())
	if rate > 3 {
		t.Errorf("%.2f requests per second while nothing changes", rate)
	}
}
