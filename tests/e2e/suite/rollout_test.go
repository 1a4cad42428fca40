//go:build e2e

package suite

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// edits is a NodeQOS for two nodes whose edits go to a canary first.
type edits struct {
	*testing.T
	name  string
	nodes []*scene
}

// twoNodes locks both nodes: edits of other policies would restart the observation of the canary.
func twoNodes(t *testing.T) *edits {
	t.Helper()
	if len(nodes) < 2 {
		t.Skip("needs a second node")
	}
	lockAllNodes(t)
	e := &edits{T: t}
	for _, node := range nodes {
		e.nodes = append(e.nodes, newScene(t, node))
	}
	first := e.nodes[0]
	e.name = first.name
	label := append([]string{"label", "node"}, nodes...)
	t.Cleanup(func() {
		first.noPolicies()
		tryKubectl("", append(slices.Clone(label), first.label()+"-")...)
	})
	kubectl(t, append(slices.Clone(label), first.label()+"=staged")...)
	return e
}

// edit changes the rule's threshold; both nodes share the metric.
func (e *edits) edit(threshold int, annotations string) {
	e.Helper()
	s := e.nodes[0]
	apply(e, fmt.Sprintf(`apiVersion: ensurance.crane.io/v1alpha1
kind: NodeQOS
metadata: {name: %[1]s, labels: {e2e: %[1]s}, annotations: {%[2]s}}
spec:
  selector: {matchLabels: {%[3]s: staged}}
  nodeQualityProbe: {timeoutSeconds: 2, httpGet: {scheme: HTTP, host: %[4]s, port: 80, path: /metrics}}
  rules: [{name: hot, avoidanceThreshold: 2, restoreThreshold: 2, actionName: %[1]s, strategy: Enforce, metricRule: {name: %[5]s, value: %[6]d}}]
`, e.name, annotations, s.label(), gaugeAddress, s.metric(), threshold))
}

// with returns the nodes whose NodeWatermark has this threshold.
func (e *edits) with(threshold int) (found []string) {
	e.Helper()
	for _, s := range e.nodes {
		now, err := watermarkOf(s.node)
		if err != nil {
			e.Fatal(err)
		}
		for _, rule := range now.Spec.Rules {
			if rule.ID == e.name+"/hot" && rule.Watermark == float64(threshold) {
				found = append(found, s.node)
			}
		}
	}
	return found
}

func (e *edits) waitAllWith(limit time.Duration, threshold int) {
	e.Helper()
	eventually(e, limit, fmt.Sprintf("both nodes have the threshold %d", threshold), func() error {
		if changed := e.with(threshold); len(changed) != len(e.nodes) {
			return fmt.Errorf("only these nodes have it: %v", changed)
		}
		return nil
	})
}

// status reads the status of the NodeQOS.
func (e *edits) status(path string) string {
	e.Helper()
	return kubectl(e, "get", "nodeqos", e.name, "-o", "jsonpath={.status"+path+"}")
}

// rolledOut is a field of the condition RolledOut, empty while no edit is being rolled out.
func (e *edits) rolledOut(field string) string {
	e.Helper()
	return e.status(`.conditions[?(@.type=="RolledOut")].` + field)
}

func (e *edits) waitRolledOut(limit time.Duration, reason string) {
	e.Helper()
	eventually(e, limit, fmt.Sprintf("RolledOut has the reason %q", reason), func() error {
		if now := e.rolledOut("reason"); now != reason {
			return fmt.Errorf("the reason is %q", now)
		}
		return nil
	})
}

// waitEvent waits for an event about the NodeQOS with this reason.
func (e *edits) waitEvent(reason string) {
	e.Helper()
	eventually(e, 20*time.Second, reason+" is reported", func() error {
		all := events(e, "NodeQOS", "", e.name)
		if !slices.ContainsFunc(all, func(event string) bool { return strings.HasPrefix(event, reason+": ") }) {
			return fmt.Errorf("its events are:\n%s", strings.Join(all, "\n"))
		}
		return nil
	})
}

// TestStagedEditStopsAtActingCanaryOrReachesBothNodes edits a threshold as users do, without the annotation of other scenes for immediate rollout.
func TestStagedEditStopsAtActingCanaryOrReachesBothNodes(t *testing.T) {
	onlyLong(t)
	needShell(t)
	t.Parallel()
	e := twoNodes(t)
	const lax, bad, good = 1000, 10, 500 // the value is hot
	victims := map[string]*victim{}
	for _, s := range e.nodes {
		s.running(work{name: "limited", args: []string{"burn"}, limits: "100m", requests: "10m"})
		victims[s.node] = s.victim("limited")
		s.allow(s.name, "limited", e.name)
	}
	e.nodes[0].action(e.name, gently)
	e.nodes[0].set(hot)
	e.edit(lax, "plimsoll.dev/rollout: immediate")
	for _, s := range e.nodes {
		s.waitRulesEnforced(e.name)
	}

	e.edit(bad, "")
	canary := e.waitStopped(bad)
	at := slices.IndexFunc(e.nodes, func(s *scene) bool { return s.node == canary })
	acting, idle := e.nodes[at], e.nodes[1-at]
	acting.waitRatio(30*time.Second, victims[canary], 50)
	eventually(t, 30*time.Second, "the NodeQOS counts its nodes", func() error {
		if counts := e.status(".matchedNodes") + " " + e.status(".breachedNodes"); counts != "2 1" {
			return fmt.Errorf("matched and breached: %s", counts)
		}
		return nil
	})
	always(t, 15*time.Second, "the edit reaches no other node", func() error {
		if changed, others := e.with(bad), e.with(lax); !slices.Equal(changed, []string{canary}) || !slices.Equal(others, []string{idle.node}) {
			return fmt.Errorf("nodes with the edit: %v; nodes with the previous version: %v", changed, others)
		}
		other := victims[idle.node]
		return checkRestored(other.before, idle.settings(other.directory))
	})

	// The revert reaches all nodes at once.
	e.edit(lax, "")
	e.waitAllWith(20*time.Second, lax)
	e.waitRolledOut(20*time.Second, "")
	acting.waitRestored(30*time.Second, victims[canary].directory, victims[canary].before)

	e.edit(good, "")
	e.waitOne(good)
	started := time.Now()
	e.waitRolledOut(20*time.Second, "Canaries")
	e.waitAllWith(4*time.Minute, good)
	took := time.Since(started)
	t.Logf("from the canary to both nodes: %.1f s", took.Seconds())
	if took < 55*time.Second { // a minute, less the time until the test saw it on the canary
		t.Errorf("the canary was watched for only %s", took)
	}
	e.waitEvent("RolledOut")
	e.waitRolledOut(20*time.Second, "")
	for _, s := range e.nodes {
		if err := checkRestored(victims[s.node].before, s.settings(victims[s.node].directory)); err != nil {
			t.Errorf("%s: %v", s.node, err)
		}
	}
}

// waitStopped waits until an edit has stopped at its only canary, and returns that node.
func (e *edits) waitStopped(threshold int) (canary string) {
	e.Helper()
	eventually(e, 90*time.Second, "the edit stops", func() error {
		changed := e.with(threshold)
		if len(changed) > 1 {
			e.Fatalf("the edit is on more than one node: %v", changed)
		}
		if now := e.rolledOut("reason"); len(changed) == 0 || now != "CanariesAct" {
			return fmt.Errorf("the edit is on %v, and RolledOut has the reason %q", changed, now)
		}
		canary = changed[0]
		return nil
	})
	if reported := e.rolledOut("status") + ": " + e.rolledOut("message"); !strings.HasPrefix(reported, "False: the edit stopped at 1 of 2 nodes ("+canary+")") {
		e.Errorf("RolledOut is %s", reported)
	}
	e.waitEvent("RolloutStopped")
	return canary
}

// waitOne waits until an edit has reached its canary.
func (e *edits) waitOne(threshold int) {
	e.Helper()
	eventually(e, 20*time.Second, fmt.Sprintf("one node has the threshold %d", threshold), func() error {
		changed := e.with(threshold)
		if len(changed) > 1 {
			e.Fatalf("the edit is on more than one node: %v", changed)
		}
		if len(changed) == 0 {
			return fmt.Errorf("no node has the edit")
		}
		return nil
	})
}
