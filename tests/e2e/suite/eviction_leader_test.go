//go:build e2e

package suite

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"plimsoll.dev/suite/plane"
)

// lingers is a pod that ignores SIGTERM for its whole grace period. Its replacement stays pending until the taint is gone.
func (s *scene) lingers(name string, grace int64) work {
	return work{name: name, args: []string{"linger", noteURL(s.name + "-" + name)}, grace: grace, intolerant: true}
}

// evictOnePodPerRound applies policies that evict the scene's pods, one per round, each with its own grace period.
func (s *scene) evictOnePodPerRound() {
	s.Helper()
	s.action(s.name, "{coolDownSeconds: 2, eviction: {maxPodsPerRound: 1}}")
	s.allow(s.name, "", "eviction")
	s.rule(s.name, rule{action: s.name})
	s.waitRulesEnforced(s.name)
}

// TestPodIsEvictedThroughTheAPIServerIfControllerPortIsBlocked: a packet filter drops what the agent sends to port 8444.
func TestPodIsEvictedThroughTheAPIServerIfControllerPortIsBlocked(t *testing.T) {
	t.Parallel()
	lockAllNodes(t) // others may not restart the agent
	node := nodes[0]
	tables := packetFilter(t)
	if out, err := tryOnNode(node, "command -v nsenter "+tables); err != nil {
		t.Skipf("%s lacks a program that the test needs: %s", node, out)
	}
	s := newScene(t, node)
	pods := s.owned(s.lingers("first", 30), work{name: "second", args: []string{"pause"}, requests: "10m", intolerant: true})
	e := s.watchTerminations(pods)
	s.evictOnePodPerRound()
	inside := fmt.Sprintf("nsenter --target %s --net ", processOf(t, node, "agent"))
	const drop = "OUTPUT --protocol tcp --dport 8444 --jump DROP"
	onNode(t, node, inside+tables+" --append "+drop)
	t.Cleanup(func() { tryOnNode(node, inside+tables+" --delete "+drop) })
	cut := time.Now()
	s.set(hot)
	// The agent first waits 8 s for a response on the port.
	s.waitTerminating(45*time.Second, pods[0])
	t.Logf("the pod was evicted after %s", time.Since(cut).Round(time.Second))
	always(t, 5*time.Second, "only one pod is evicted", e.only(pods[0]))
	s.set(cold)
	if given == "" && !evictionRequestedThroughAPIServer(t, node, cut) {
		t.Error("the agent did not request the eviction through the API server")
	}
	onNode(t, node, inside+tables+" --delete "+drop)
	eventually(t, 3*time.Minute, "the agent reports directly again", func() error { return reported(node) })
}

// evictionRequestedThroughAPIServer reports whether an agent has successfully requested an eviction on a node through the API server since then.
func evictionRequestedThroughAPIServer(t *testing.T, node string, since time.Time) bool {
	t.Helper()
	all, err := plane.AuditLog(absolute("target/e2e/logs/audit.log"))
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(all, func(event plane.AuditEvent) bool {
		of := event.ObjectRef
		return of.Resource == "nodemetrics" && of.Subresource == "evictions" && of.Name == node &&
			event.StageTimestamp.After(since) && event.ResponseStatus.Code == 200 && strings.HasSuffix(event.User.Username, ":plimsoll-agent")
	})
}

// TestKilledLeaderNeitherLosesNorRepeatsEvictions kills the leader twice for each pod: at a random time around the
// decision, the record and the Eviction, and again right after the pod started to terminate.
func TestKilledLeaderNeitherLosesNorRepeatsEvictions(t *testing.T) {
	onlyLong(t)
	needShell(t)
	t.Parallel()
	lockAllNodes(t) // no other test may need a leader
	s := newScene(t, nodes[0])
	const grace = 12
	var works []work
	for _, name := range []string{"first", "second", "third", "fourth", "fifth"} {
		works = append(works, s.lingers(name, grace))
	}
	pods := s.owned(works...)
	e := s.watchTerminations(pods)
	s.evictOnePodPerRound()
	s.set(hot)
	settled := time.Now() // since then no pod is terminating
	for round := range pods {
		// An agent notices within seconds that an eviction is still needed.
		time.Sleep(time.Duration(rand.IntN(4000)) * time.Millisecond)
		killLeader(t)
		eventually(t, time.Minute, "another pod is evicted", func() error { return e.count(round + 1) })
		took := time.Since(settled)
		t.Logf("round %d: a pod was evicted after %s", round+1, took.Round(time.Second))
		// A lost request times out after 30 s, and the agent retries within seconds.
		if took > 40*time.Second {
			t.Errorf("round %d: a pod was evicted only after %s", round+1, took)
		}
		killLeader(t)
		eventually(t, time.Minute, "the evicted pod is gone", e.allGone)
		settled = time.Now()
	}
	s.set(cold)
	e.onePerRound()
	leader(t)
}

// killLeader kills the leading replica and deletes its pod, so that the kubelet's restart back-off does not grow.
func killLeader(t *testing.T) {
	t.Helper()
	_, pod := leader(t)
	pids := strings.Join(processesOfPod(t, pod, "controller"), " ")
	onNode(t, pod.Spec.NodeName, "kill -KILL "+pids)
	if err := kube.CoreV1().Pods(namespace).Delete(background, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}); err != nil {
		t.Error(err)
	}
	eventually(t, 30*time.Second, "the replica is gone", func() error {
		for _, each := range componentPods(t, "controller") {
			if each.UID == pod.UID {
				return fmt.Errorf("it still exists")
			}
		}
		return nil
	})
}

// count returns an error unless at least this many pods are terminating or gone.
func (e *terminations) count(wanted int) error {
	if err := e.poll(); err != nil {
		return err
	}
	e.lock.Lock()
	defer e.lock.Unlock()
	if len(e.started) < wanted {
		return fmt.Errorf("only %d pods are terminating", len(e.started))
	}
	return nil
}

// allGone returns an error while any pod is terminating.
func (e *terminations) allGone() error {
	list, err := kube.CoreV1().Pods(e.scene.name).List(background, metav1.ListOptions{})
	if err != nil {
		return err
	}
	if slices.ContainsFunc(list.Items, func(pod corev1.Pod) bool { return pod.DeletionTimestamp != nil }) {
		return fmt.Errorf("a pod is terminating")
	}
	return nil
}

// onePerRound fails the test if two pods terminated at the same time.
func (e *terminations) onePerRound() {
	e.scene.Helper()
	e.lock.Lock()
	defer e.lock.Unlock()
	if len(e.concurrent) > 0 {
		e.scene.Errorf("%v were terminating at the same time", e.concurrent)
	}
	for pod, at := range e.started {
		e.scene.Logf("%s started to terminate at %s", pod, at.Format(time.TimeOnly))
	}
}

// TestRuleChangesDuringEvictionEvictOnce: each edit changes the node's rules, so the agent may send a hash that
// the leader has replaced. The request is refused and the agent retries.
func TestRuleChangesDuringEvictionEvictOnce(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		pods := s.owned(s.lingers("first", 30), work{name: "second", args: []string{"pause"}, requests: "10m", intolerant: true})
		e := s.watchTerminations(pods)
		s.evictOnePodPerRound()
		edits := 0
		edit := func() {
			edits++
			// This rule never acts; editing it leaves the breach counter of the scene's own rule as it is.
			s.rule(s.name+"-other", rule{action: s.name, strategy: "Preview", threshold: 1000 + edits})
		}
		edit()
		s.waitRulesEnforced(s.name + "-other")
		before, err := watermarkOf(node)
		if err != nil {
			t.Fatal(err)
		}
		s.set(hot)
		for started := time.Now(); time.Since(started) < 10*time.Second; time.Sleep(200 * time.Millisecond) {
			edit()
		}
		t.Logf("%d edits; evicted meanwhile: %t", edits, s.alive(pods[0]) != nil)
		s.waitTerminating(45*time.Second, pods[0])
		always(t, 5*time.Second, "only one pod is evicted", e.only(pods[0]))
		s.set(cold)
		now, err := watermarkOf(node)
		if err != nil || now.Spec.Hash == before.Spec.Hash {
			t.Errorf("the rules of %s still have the hash %s (%v)", node, now.Spec.Hash, err)
		}
		if err := cmp.Or(s.checkEvictedOnce(pods[0]), e.count(1)); err != nil {
			t.Error(err)
		}
	})
}

// checkEvictedOnce returns an error if the agent's events show that a pod was evicted more than once.
func (s *scene) checkEvictedOnce(pod string) error {
	published := 0
	for event, times := range eventCounts(s, "Pod", s.name, pod) {
		if strings.HasPrefix(event, "PodEvicted: ") {
			published += times
		}
	}
	if published > 1 {
		return fmt.Errorf("%d events report that %s was evicted", published, pod)
	}
	return nil
}
