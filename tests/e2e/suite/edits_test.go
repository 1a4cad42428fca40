//go:build e2e

package suite

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

func TestEndOfOneRuleKeepsActionsOfAnother(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		s.running(work{name: "limited", args: []string{"burn"}, limits: "100m", requests: "10m"})
		limited := s.victim("limited")
		mild, hard := s.name+"-mild", s.name+"-hard"
		second := s.metric() + "_hard"
		s.setMetric(second, cold)
		t.Cleanup(func() { s.setMetric(second, 0) })
		s.action(mild, "{coolDownSeconds: 1, throttle: {cpuThrottle: {stepCPURatio: 20, minCPURatio: 80}}}")
		s.action(hard, "{coolDownSeconds: 1, disableScheduling: {}, throttle: {cpuThrottle: {stepCPURatio: 20, minCPURatio: 40}}}")
		s.allow(s.name, "", "throttle")
		s.rule(mild, rule{action: mild})
		s.rule(hard, rule{action: hard, metric: second})
		s.waitRulesEnforced(mild)
		s.waitRulesEnforced(hard)

		// The stricter rule ends: the quota rises to that of the milder rule, and the taint, which only the stricter rule needs, is removed.
		s.set(hot)
		s.setMetric(second, hot)
		s.waitRatio(30*time.Second, limited, 40)
		s.waitTaint(5*time.Second, corev1.TaintEffectNoSchedule)
		s.setMetric(second, cold)
		quota := s.waitRatio(30*time.Second, limited, 80)
		s.waitNoTaint(10 * time.Second)
		always(t, 3*time.Second, "only the actions of the milder rule stay in force", func() error {
			if found, err := taint(node); err != nil || found != nil {
				return fmt.Errorf("taint is %v (%v)", found, err)
			}
			return s.checkQuota(limited, quota)
		})
		// The milder rule ends, which changes nothing for the stricter one.
		s.setMetric(second, hot)
		limited.quota = s.waitRatio(30*time.Second, limited, 40)
		s.waitTaint(5*time.Second, corev1.TaintEffectNoSchedule)
		s.set(cold)
		eventually(t, 30*time.Second, "the milder rule is over", func() error {
			now, err := watermarkOf(node)
			if err != nil {
				return err
			}
			for _, rule := range now.Status.Rules {
				if rule.ID == mild+"/hot" && rule.State == "Normal" {
					return nil
				}
			}
			return fmt.Errorf("rules are %+v", now.Status.Rules)
		})
		always(t, 3*time.Second, "the actions of the stricter rule stay in force", func() error { return s.inForce(limited) })
		s.setMetric(second, cold)
		s.waitRestored(20*time.Second, limited.directory, limited.before)
		s.waitNoTaint(20 * time.Second)
	})
}

// throttledScene adds a pod to a scene and throttles it to 50 %.
func throttledScene(t *testing.T, s *scene) *victim {
	t.Helper()
	s.running(work{name: "limited", args: []string{"burn"}, limits: "100m", requests: "10m"})
	limited := s.victim("limited")
	s.action(s.name, gently)
	s.allow(s.name, "", s.name)
	s.rule(s.name, rule{action: s.name})
	s.waitRulesEnforced(s.name)
	s.set(hot)
	s.waitRatio(30*time.Second, limited, 50)
	return limited
}

func TestEditTakesEffectWhileActionIsInForce(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := shared(t, node)
		limited := throttledScene(t, s)
		// A lower floor.
		s.action(s.name, "{coolDownSeconds: 2, throttle: {cpuThrottle: {stepCPURatio: 25, minCPURatio: 25}}}")
		s.waitRatio(30*time.Second, limited, 25)
		// A higher threshold: the value is below it now.
		s.rule(s.name, rule{action: s.name, threshold: 1000})
		s.waitRestored(20*time.Second, limited.directory, limited.before)
	})
}

// label is the key of the scene's own label for nodes.
func (s *scene) label() string { return "e2e.plimsoll.dev/" + s.name }

func TestActionsThatNoPolicyAsksForAreRestored(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		s.running(work{name: "limited", args: []string{"burn"}, limits: "100m", requests: "10m"})
		limited := s.victim("limited")
		t.Cleanup(func() { tryKubectl("", "label", "node", node, s.label()+"-") })
		for _, change := range []struct {
			what  string
			opens bool // whether the taint is removed, too: a PodQOS does not affect it
			make  func()
		}{
			{"the NodeQOS is deleted", true, func() { kubectl(t, "delete", "nodeqos", s.name) }},
			{"the PodQOS is deleted", false, func() { kubectl(t, "delete", "podqos", s.name) }},
			{"the AvoidanceAction is deleted", true, func() { kubectl(t, "delete", "avoidanceaction", s.name) }},
			{"the NodeQOS no longer selects the node", true, func() { kubectl(t, "label", "node", node, s.label()+"-") }},
			{"the NodeQOS is edited to select other nodes", true, func() { s.rule(s.name, rule{action: s.name, labels: s.label() + ": other"}) }},
			{"the PodQOS no longer selects the pod", false, func() { kubectl(t, "label", "pod", "-n", s.name, "limited", "app=other", "--overwrite") }},
			{"the pod is protected", false, func() { kubectl(t, "annotate", "pod", "-n", s.name, "limited", "plimsoll.dev/protected=true") }},
		} {
			s.applyPolicies()
			eventually(t, 30*time.Second, "the pod is throttled", func() error {
				if now := s.settings(limited.directory).millicores(); now < 0 || now > 55 {
					return fmt.Errorf("its quota is %dm", now)
				}
				return nil
			})
			s.waitTaint(15*time.Second, corev1.TaintEffectNoSchedule) // again, after the first case
			change.make()
			eventually(t, 30*time.Second, "the quota is restored, because "+change.what, func() error {
				return checkRestored(limited.before, s.settings(limited.directory))
			})
			if change.opens {
				s.waitNoTaint(30 * time.Second)
			} else {
				always(t, 2*time.Second, "the node stays closed, although "+change.what, s.closed)
			}
		}
		s.set(cold)
		s.waitNoTaint(20 * time.Second)
	})
}

// applyPolicies applies, also after changes, the policies that throttle pod limited and close the node.
func (s *scene) applyPolicies() {
	s.Helper()
	kubectl(s, "label", "node", s.node, s.label()+"=batch", "--overwrite")
	kubectl(s, "label", "pod", "-n", s.name, "limited", "app=limited", "--overwrite")
	s.action(s.name, "{coolDownSeconds: 2, disableScheduling: {}, throttle: {cpuThrottle: {stepCPURatio: 25, minCPURatio: 50}}}")
	s.allow(s.name, "limited", s.name)
	s.rule(s.name, rule{action: s.name, labels: s.label() + ": batch"})
	s.set(hot)
}

// closed checks that the node has the NoSchedule taint.
func (s *scene) closed() error {
	if found, err := taint(s.node); err != nil || found == nil || found.Effect != corev1.TaintEffectNoSchedule {
		return fmt.Errorf("taint is %v (%v)", found, err)
	}
	return nil
}

func TestRuleWithMissingActionReportsAndActsOnceItExists(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := shared(t, node)
		s.running(work{name: "limited", args: []string{"burn"}, limits: "100m", requests: "10m"})
		limited := s.victim("limited")
		s.allow(s.name, "", s.name)
		s.rule(s.name, rule{action: s.name})
		s.set(hot)
		kubectl(t, "wait", "nodeqos/"+s.name, "--for=condition=ActionsResolved=False", "--timeout=20s")
		if message := kubectl(t, "get", "nodeqos", s.name, "-o", `jsonpath={.status.conditions[?(@.type=="ActionsResolved")].message}`); message == "" {
			t.Error("the condition does not name the action")
		}
		always(t, 4*time.Second, "nothing is done", func() error { return checkRestored(limited.before, s.settings(limited.directory)) })
		s.action(s.name, gently)
		s.waitRatio(30*time.Second, limited, 50)
		s.set(cold)
		s.waitRestored(20*time.Second, limited.directory, limited.before)
	})
}
