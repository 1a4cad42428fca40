//go:build e2e

package suite

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"plimsoll.dev/suite/plane"
)

// owned starts pods, each in its own ReplicaSet so that it may be evicted, and returns the pods' names.
func (s *scene) owned(works ...work) (names []string) {
	s.Helper()
	for _, w := range works {
		set := &appsv1.ReplicaSet{
			ObjectMeta: metav1.ObjectMeta{Name: w.name},
			Spec: appsv1.ReplicaSetSpec{
				Replicas: ptr.To[int32](1),
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": w.name}},
				Template: s.template(w),
			},
		}
		if _, err := kube.AppsV1().ReplicaSets(s.name).Create(background, set, metav1.CreateOptions{}); err != nil {
			s.Fatal(err)
		}
	}
	for _, w := range works {
		names = append(names, s.podOf(w.name, ""))
	}
	return names
}

// podOf waits for a ready pod of an app, other than `not`, and returns its name.
func (s *scene) podOf(app, not string) (name string) {
	s.Helper()
	eventually(s, 90*time.Second, "a pod of "+app+" runs", func() error {
		list, err := kube.CoreV1().Pods(s.name).List(background, metav1.ListOptions{LabelSelector: "app=" + app})
		if err != nil {
			return err
		}
		for _, pod := range list.Items {
			if plane.IsReady(&pod) && pod.Name != not {
				name = pod.Name
				return nil
			}
		}
		return fmt.Errorf("%d pods, none of them ready", len(list.Items))
	})
	return name
}

// alive checks that a pod exists and is not terminating.
func (s *scene) alive(name string) error {
	pod, err := kube.CoreV1().Pods(s.name).Get(background, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if pod.DeletionTimestamp != nil {
		return fmt.Errorf("pod %s is terminating", name)
	}
	return nil
}

// waitTerminating waits until a pod is terminating or gone.
func (s *scene) waitTerminating(limit time.Duration, name string) {
	s.Helper()
	eventually(s, limit, "pod "+name+" is evicted", func() error {
		if s.alive(name) == nil {
			return fmt.Errorf("it still runs")
		}
		return nil
	})
}

// waitGone waits until a pod is gone.
func (s *scene) waitGone(limit time.Duration, name string) {
	s.Helper()
	eventually(s, limit, "pod "+name+" is gone", func() error {
		_, err := kube.CoreV1().Pods(s.name).Get(background, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it still exists (%v)", err)
	})
}

// lifetimeOf returns when a lingering pod was first and last seen.
func lifetimeOf(t *testing.T, who string) (first, last time.Time) {
	t.Helper()
	response, err := queryGauge("/notes", "", "")
	if err != nil {
		t.Fatal(err)
	}
	var notes map[string]struct{ First, Last time.Time }
	if err := json.Unmarshal(response, &notes); err != nil {
		t.Fatal(err)
	}
	return notes[who].First, notes[who].Last
}

func TestEvictionTakesOnePodPerRoundWithFullGracePeriod(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := aloneWithSpareNode(t, node)
		const grace = 4 * time.Second
		pods := map[string]bool{}
		lingers := func(name string) work {
			return work{name: name, args: []string{"linger", noteURL(s.name + "-" + name)}, grace: 30, requests: "10m", anywhere: true, intolerant: true}
		}
		open := s.closeOther()
		for _, name := range s.owned(lingers("one"), lingers("two")) {
			pods[name] = true
		}
		open()
		s.action(s.name, "{coolDownSeconds: 2, eviction: {terminationGracePeriodSeconds: 4}}")
		s.allow(s.name, "", "eviction")
		s.rule(s.name, rule{action: s.name})
		s.waitRulesEnforced(s.name)
		s.set(hot)

		// While the first pod terminates, no second one is evicted.
		terminating := func() (names []string) {
			for name := range pods {
				if s.alive(name) != nil {
					names = append(names, name)
				}
			}
			return names
		}
		eventually(t, 15*time.Second, "a pod is evicted", func() error {
			if len(terminating()) == 0 {
				return fmt.Errorf("both pods still run")
			}
			return nil
		})
		first := terminating()[0]
		s.waitTaint(5*time.Second, corev1.TaintEffectNoSchedule)
		always(t, grace-2*time.Second, "one pod per round", func() error {
			if now := terminating(); len(now) != 1 {
				return fmt.Errorf("terminating or gone: %v", now)
			}
			return nil
		})
		s.set(cold)
		s.waitGone(30*time.Second, first)
		app := strings.Split(first, "-")[0]
		begin, end := lifetimeOf(t, s.name+"-"+app)
		if lived := end.Sub(begin); lived < grace-time.Second || lived > grace+2*time.Second {
			t.Errorf("the pod was killed %s after SIGTERM, but its grace period is %s", lived, grace)
		}
		// The replacement runs on the other node.
		replacement := s.podOf(app, first)
		if on := s.pod(replacement).Spec.NodeName; on == node {
			t.Errorf("the replacement runs on %s again", on)
		}
		for name := range pods {
			if name != first && s.alive(name) != nil {
				t.Errorf("a second pod was evicted although the value is below its threshold")
			}
		}
		if reported := strings.Join(events(t, "Pod", s.name, first), "\n"); !strings.Contains(reported, s.name+"/hot") {
			t.Errorf("no event of the pod names the rule:\n%s", reported)
		}
		// The status is written at most every 10 s.
		eventually(t, 15*time.Second, "the status shows the eviction", func() error {
			now, err := watermarkOf(node)
			if err != nil {
				return err
			}
			if now.Status.Counts.EvictedLastHour < 1 || len(now.Status.Evictions) == 0 || now.Status.Evictions[0].Pod != first {
				return fmt.Errorf("the status shows %d evictions: %+v", now.Status.Counts.EvictedLastHour, now.Status.Evictions)
			}
			shown, err := row(node)
			if count, _ := strconv.Atoi(shown["EVICTED(1H)"]); err != nil || count < 1 {
				return fmt.Errorf("kubectl shows %v (%v)", shown, err)
			}
			return nil
		})
		s.waitNoTaint(20 * time.Second)
	})
}

// closeOther cordons the other node, so that pods without a node selector start on the scene's node; the returned function uncordons it.
func (s *scene) closeOther() (open func()) {
	s.Helper()
	kubectl(s, "cordon", other(s.node))
	open = func() { tryKubectl("", "uncordon", other(s.node)) }
	s.Cleanup(open)
	return open
}

func TestDisruptionBudgetIsRespectedAndNextCandidateEvicted(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		budget := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: "keep"}, Spec: policyv1.PodDisruptionBudgetSpec{
			MaxUnavailable: ptr.To(intstr.FromInt32(0)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "guarded"}}}}
		if _, err := kube.PolicyV1().PodDisruptionBudgets(s.name).Create(background, budget, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		// The guarded pod is BestEffort and therefore first in order.
		names := s.owned(work{name: "guarded", args: []string{"burn", "80"}}, work{name: "next", args: []string{"burn", "40"}, requests: "10m"})
		guarded, next := names[0], names[1]
		s.action(s.name, "{coolDownSeconds: 1, eviction: {terminationGracePeriodSeconds: 1}}")
		s.allow(s.name, "", s.name)
		s.rule(s.name, rule{action: s.name})
		s.waitRulesEnforced(s.name)
		crossed := time.Now()
		s.set(hot)
		s.waitTerminating(30*time.Second, next)
		// The status is written at most every 10 s.
		eventually(t, 30*time.Second, "table and status show the refused and the evicted pod", func() error {
			if err := s.checkRefused("evict", guarded, s.name, "keep"); err != nil {
				return err
			}
			if err := s.checkBreached(s.name, crossed); err != nil {
				return err
			}
			return checkRow(node, "NoSchedule", map[string]int{"BREACHED": 1, "EVICTED(1H)": 1})
		})
		s.set(cold)
		if err := s.alive(guarded); err != nil {
			t.Error(err)
		}
		reported := strings.Join(events(t, "Pod", s.name, guarded), "\n")
		if !strings.Contains(reported, "keep") {
			t.Errorf("no event of the pod names the budget:\n%s", reported)
		}
	})
}

func TestProtectedPodsMustNotBeEvicted(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		burn := []string{"burn", "30"}
		keep := []string{"unowned", "static-" + node}
		s.start(work{name: "unowned", args: burn})
		s.static("static")
		s.daemon("daemon")
		unselected := s.unselected()
		if len(nodes) > 1 {
			there := &scene{s.T, other(node), s.name, s.settleTimeout}
			keep = append(keep, there.owned(work{name: "elsewhere", args: burn})...)
		}
		names := s.owned(
			work{name: "victim", args: burn, requests: "10m"},
			work{name: "protected", args: burn, annotations: map[string]string{"plimsoll.dev/protected": "true"}},
			work{name: "unsafe", args: burn, annotations: map[string]string{"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}},
			work{name: "undisturbed", args: burn, annotations: map[string]string{"karpenter.sh/do-not-disrupt": "true"}},
			work{name: "critical", args: burn, priority: "system-node-critical"},
		)
		victim := names[0]
		keep = append(append(keep, names[1:]...), s.podOf("daemon", ""))
		for _, name := range []string{"unowned", "static-" + node} {
			s.waitRunning(name)
		}

		s.action(s.name, "{coolDownSeconds: 1, eviction: {terminationGracePeriodSeconds: 1, maxPodsPerRound: 10}}")
		s.allow(s.name, "", s.name) // by name: a pod of the scene is on another node, where other scenes evict
		s.rule(s.name, rule{action: s.name})
		s.waitRulesEnforced(s.name)
		s.set(hot)
		s.waitTerminating(30*time.Second, victim)
		noOtherPod := func() error {
			for _, name := range keep {
				if err := s.alive(name); err != nil {
					return err
				}
			}
			_, err := kube.CoreV1().Pods("default").Get(background, unselected, metav1.GetOptions{})
			return err
		}
		// Several more rounds: only the victim's replacements are evicted.
		always(t, 6*time.Second, "no other pod is evicted", noOtherPod)
		// Pods before the victim in order are skipped in each round.
		reasons := map[string]string{
			"unowned": "it has no controller", names[1]: "it is protected", names[2]: "annotated to stay", names[3]: "annotated to stay",
		}
		eventually(t, 30*time.Second, "the status gives the reasons", func() error {
			for pod, words := range reasons {
				if err := s.checkRefused("act", pod, s.name, words); err != nil {
					return err
				}
			}
			return nil
		})

		// Without the victim each round reaches the last pod in order.
		kubectl(t, "delete", "replicaset", "-n", s.name, "victim")
		s.waitNone(60*time.Second, "victim")
		eventually(t, 30*time.Second, "the status gives the reason for the last pod", func() error {
			return s.checkRefused("act", names[4], s.name, "system-critical")
		})
		always(t, 8*time.Second, "no pod is evicted", noOtherPod)
		s.set(cold)
	})
}

// waitNone waits until no pod of an app is left.
func (s *scene) waitNone(limit time.Duration, app string) {
	s.Helper()
	eventually(s, limit, "no pod of "+app+" is left", func() error {
		list, err := kube.CoreV1().Pods(s.name).List(background, metav1.ListOptions{LabelSelector: "app=" + app})
		if err == nil && len(list.Items) > 0 {
			err = fmt.Errorf("%v", podNames(list.Items))
		}
		return err
	})
}

// daemon starts a DaemonSet.
func (s *scene) daemon(name string) {
	s.Helper()
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: appsv1.DaemonSetSpec{
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}, Template: s.template(work{name: name, args: []string{"burn", "30"}})}}
	if _, err := kube.AppsV1().DaemonSets(s.name).Create(background, set, metav1.CreateOptions{}); err != nil {
		s.Fatal(err)
	}
}

// unselected starts a pod in a namespace that no PodQOS of the scene names.
func (s *scene) unselected() string {
	s.Helper()
	template := s.template(work{name: s.name, args: []string{"burn", "30"}})
	template.Name = s.name
	if _, err := kube.CoreV1().Pods("default").Create(background, &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}, metav1.CreateOptions{}); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { kubectl(s, "delete", "pod", "-n", "default", s.name, "--wait=false") })
	return s.name
}

// static has the kubelet itself run a static pod, which the API server shows as a mirror pod.
func (s *scene) static(name string) {
	s.Helper()
	const directory = "/run/kubernetes/manifests"
	manifest := fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: %s, labels: {app: %s}}
spec: {terminationGracePeriodSeconds: 1, containers: [{name: work, image: "%s", imagePullPolicy: IfNotPresent, args: [burn, "30"]}]}`, name, s.name, name, toolsImage)
	file := directory + "/" + s.name + ".yaml"
	onNode(s, s.node, "mkdir -p "+directory+" && cat > "+file+" <<'END'\n"+manifest+"\nEND")
	s.Cleanup(func() { onNode(s, s.node, "rm "+file) })
}

func TestRescheduledPodAvoidsHotNode(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := aloneWithSpareNode(t, node)
		open := s.closeOther()
		template := s.template(work{name: "web", args: []string{"burn", "30"}, requests: "10m", anywhere: true, intolerant: true})
		deployment := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: appsv1.DeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}, Template: template}}
		if _, err := kube.AppsV1().Deployments(s.name).Create(background, deployment, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		first := s.podOf("web", "")
		open()
		s.action(s.name, "{coolDownSeconds: 3, eviction: {terminationGracePeriodSeconds: 1}}")
		s.allow(s.name, "", "evict")
		s.rule(s.name, rule{action: s.name})
		s.waitRulesEnforced(s.name)
		s.set(hot)
		s.waitTerminating(15*time.Second, first)
		second := s.podOf("web", first)
		s.set(cold)
		if on := s.pod(second).Spec.NodeName; on != other(node) {
			t.Errorf("the replacement is on %s", on)
		}
		s.waitNoTaint(20 * time.Second)
	})
}
