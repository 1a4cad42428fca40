//go:build e2e

package suite

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// The chart's default eviction budget for a node.
const (
	nodeBudget       = 2
	nodeBudgetWindow = time.Minute
)

// TestEvictionsStayWithinBudgetsDuringFaults uses the chart's default budgets and a node that is above its threshold for minutes. Two of its
// pods are evicted in a minute, one after the other; none while the previous one terminates, even if the agent is killed; and none while
// the metric is unknown or no controller is reachable. Other clients may still evict.
func TestEvictionsStayWithinBudgetsDuringFaults(t *testing.T) {
	needShell(t)
	t.Parallel()
	lockAllNodes(t) // the budgets are for the whole cluster
	t.Cleanup(func() { setBudgets(t, generousBudgets) })
	s := newScene(t, nodes[0])
	pause := []string{"pause"}
	// In eviction order: BestEffort, Burstable, Guaranteed. Their replacements stay pending until the taint is gone.
	pods := s.owned(
		work{name: "first", args: pause, intolerant: true},
		work{name: "second", args: pause, intolerant: true},
		work{name: "third", args: []string{"linger", noteURL(s.name)}, grace: 180, requests: "10m", intolerant: true},
		work{name: "fourth", args: pause, limits: "100m", intolerant: true},
		work{name: "fifth", args: pause, limits: "100m", intolerant: true},
	)
	first, second, third, fourth, fifth := pods[0], pods[1], pods[2], pods[3], pods[4]
	e := s.watchTerminations(pods)
	setBudgets(t, "")
	eventually(t, 3*time.Minute, "evictions of earlier scenes no longer count", checkNoRecordedEvictions)
	s.action(s.name, "{coolDownSeconds: 2, eviction: {maxPodsPerRound: 1}}") // each pod has its own grace period
	s.allow(s.name, "", "eviction")
	s.rule(s.name, rule{action: s.name})
	s.waitRulesEnforced(s.name)

	spent := fmt.Sprintf("the node's budget of evictions, %d in 1m, is spent", nodeBudget)
	s.set(hot)
	eventually(t, 45*time.Second, "the status reports that the budget is spent", func() error { return s.checkEvictionRefused(spent) })
	eventually(t, 10*time.Second, "an event of its NodeWatermark reports it", func() error {
		reported := eventCounts(t, "NodeWatermark", "", s.node)
		for event := range reported {
			if strings.HasPrefix(event, "EvictionRefused: "+s.name+"/") && strings.HasSuffix(event, ": no pod is evicted: "+spent) {
				return nil
			}
		}
		return fmt.Errorf("events: %v", reported)
	})
	always(t, 3*time.Second, "two pods in a minute", e.only(first, second))
	s.waitTerminating(90*time.Second, third)

	// The second eviction leaves the budget's window in a few seconds: from then on only the round delays the next one.
	for range 3 {
		old := agentContainer(s)
		onNode(t, s.node, "kill -KILL "+processOf(t, s.node, "agent"))
		waitAgent(s, old)
		always(t, 3*time.Second, "one pod terminates at a time, also with an agent that has just started", e.only(first, second, third))
	}
	if phase := s.pod(third).Status.Phase; phase != corev1.PodRunning {
		t.Errorf("the third pod should still run, but its phase is %s", phase)
	}

	// The round ends, too, but whether the node is above its threshold is unknown.
	s.set(0)
	eventually(t, 30*time.Second, "the status reports that the metric is unknown", s.unknown)
	onNode(t, s.node, "pkill -KILL -f '[l]inger .*"+s.name+"'") // the brackets keep pkill from matching its own shell
	s.waitGone(60*time.Second, third)
	always(t, 5*time.Second, "no pod is evicted while the metric is unknown", e.only(first, second, third))

	scale := func(replicas int) {
		kubectl(t, "scale", "-n", namespace, "deployment/plimsoll-controller", fmt.Sprintf("--replicas=%d", replicas))
	}
	t.Cleanup(func() { scale(2) })
	scale(0)
	eventually(t, time.Minute, "no controller is left that could evict", func() error {
		list, err := kube.CoreV1().Pods(namespace).List(background, metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=controller"})
		if err == nil && len(list.Items) > 0 {
			err = fmt.Errorf("%v", podNames(list.Items))
		}
		return err
	})
	s.set(hot)
	eventually(t, 45*time.Second, "the status reports that no controller is reachable", func() error { return s.checkEvictionRefused("the controller cannot be reached") })
	eviction := &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: fifth, Namespace: s.name}}
	if err := kube.PolicyV1().Evictions(s.name).Evict(background, eviction); err != nil {
		t.Errorf("an administrator cannot evict: %v", err)
	}
	s.waitGone(60*time.Second, fifth)
	always(t, 6*time.Second, "no pod is evicted on an agent's request", e.only(first, second, third, fifth))
	scale(2)
	s.waitTerminating(2*time.Minute, fourth)
	s.set(cold)
	e.checkBudget(fifth)
}

// setBudgets sets the release's eviction budgets, or the chart's defaults if empty, and waits until a replica with them leads.
func setBudgets(t *testing.T, budgets string) {
	t.Helper()
	if err := installWith(budgets); err != nil {
		t.Fatal(err)
	}
	kubectl(t, "rollout", "status", "-n", namespace, "deployment/plimsoll-controller", "--timeout=180s")
	leader(t)
}

// checkNoRecordedEvictions checks that no eviction counts towards any budget.
func checkNoRecordedEvictions() error {
	object, err := kube.CoreV1().ConfigMaps(namespace).Get(background, "plimsoll-evictions", metav1.GetOptions{})
	if err != nil {
		return err
	}
	text := object.Data["evictions.json"]
	var record struct {
		Shut      bool
		Evictions []json.RawMessage
	}
	if err := json.Unmarshal([]byte(text), &record); err != nil || record.Shut || len(record.Evictions) > 0 {
		return fmt.Errorf("the record is %q (%v)", text, err)
	}
	return nil
}

// checkEvictionRefused checks that the status gives this reason why the scene's rule can't evict any pod.
func (s *scene) checkEvictionRefused(words string) error {
	return s.checkRefused("evict", "", s.name, words)
}

// unknown checks that the status shows the scene's rule as Breached with an unknown value.
func (s *scene) unknown() error {
	now, err := watermarkOf(s.node)
	if err != nil {
		return err
	}
	for _, rule := range now.Status.Rules {
		if rule.ID == s.name+"/hot" && rule.State == "Breached" && rule.Unknown != "" {
			return nil
		}
	}
	return fmt.Errorf("rules are %+v", now.Status.Rules)
}

// terminations records when pods of a scene started to terminate.
type terminations struct {
	scene *scene
	pods  []string
	lock  sync.Mutex
	// started is truncated to seconds, as the API server's timestamps are.
	started map[string]time.Time
	// concurrent are pods that were terminating and still running at the same time.
	concurrent []string
}

// watchTerminations polls pods several times a second until the test ends.
func (s *scene) watchTerminations(pods []string) *terminations {
	e := &terminations{scene: s, pods: pods, started: map[string]time.Time{}}
	repeatedly(s, func() { _ = e.poll() }) // a failed poll is covered by the next one
	return e
}

// poll records the pods that have started to terminate, and whether more than one of them is still running.
func (e *terminations) poll() error {
	list, err := kube.CoreV1().Pods(e.scene.name).List(background, metav1.ListOptions{})
	if err != nil {
		return err
	}
	existing := map[string]corev1.Pod{}
	for _, pod := range list.Items {
		existing[pod.Name] = pod
	}
	e.lock.Lock()
	defer e.lock.Unlock()
	var running []string
	for _, name := range e.pods {
		pod, exists := existing[name]
		if exists && pod.DeletionTimestamp == nil {
			continue
		}
		started := time.Now()
		if exists {
			// The deletion timestamp includes the grace period.
			started = pod.DeletionTimestamp.Add(-time.Duration(ptr.Deref(pod.DeletionGracePeriodSeconds, 0)) * time.Second)
		}
		if _, known := e.started[name]; !known {
			e.started[name] = started
		}
		if exists && pod.Status.Phase == corev1.PodRunning {
			running = append(running, name)
		}
	}
	if len(running) > 1 {
		e.concurrent = running
	}
	return nil
}

// only checks that exactly these pods are terminating or gone.
func (e *terminations) only(pods ...string) func() error {
	return func() error {
		if err := e.poll(); err != nil {
			return err
		}
		e.lock.Lock()
		defer e.lock.Unlock()
		if now := slices.Sorted(maps.Keys(e.started)); !slices.Equal(now, slices.Sorted(slices.Values(pods))) {
			return fmt.Errorf("terminating or gone: %v", now)
		}
		return nil
	}
}

// checkBudget fails the test if more pods started to terminate within the budget's window than it allows, or two terminated at the same time.
// Pods in others were evicted by other clients.
func (e *terminations) checkBudget(others ...string) {
	e.scene.Helper()
	e.lock.Lock()
	defer e.lock.Unlock()
	if len(e.concurrent) > 0 {
		e.scene.Errorf("%v were terminating at the same time", e.concurrent)
	}
	var started []time.Time
	for pod, at := range e.started {
		e.scene.Logf("%s started to terminate at %s", pod, at.Format(time.TimeOnly))
		if !slices.Contains(others, pod) {
			started = append(started, at)
		}
	}
	slices.SortFunc(started, time.Time.Compare)
	for i := range max(0, len(started)-nodeBudget) {
		// An upper bound, because both times are truncated to seconds.
		if within := started[i+nodeBudget].Sub(started[i]) + time.Second; within <= nodeBudgetWindow {
			e.scene.Errorf("evictions %d to %d began within %s, but only %d are allowed in %s", i+1, i+1+nodeBudget, within, nodeBudget, nodeBudgetWindow)
		}
	}
}
