//go:build e2e

package suite

import (
	"encoding/json"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"plimsoll.dev/suite/plane"
)

const (
	loadLabel = "plimsoll.dev/load"
	// unlabelled is the load of a node without the label.
	unlabelled = -1
	// fullLoad is the load from which no pod should be placed on a node as long as others have room.
	fullLoad = 95
	// countsAsIdle is the load up to which all nodes are alike for schedulers.
	countsAsIdle = 60
	// defaultLine is the load line of CPU without rules, as a share of the node.
	defaultLine = 0.9
	// A pod is expected to use usualShare of the CPU that it requests, or usualCPU millicores if it requests none.
	usualShare, usualCPU = 0.85, 250
)

// labelOf is the load in a node's label.
func labelOf(object *corev1.Node) int {
	if load, err := strconv.Atoi(object.Labels[loadLabel]); err == nil {
		return load
	}
	return unlabelled
}

// timeline has the loads of the scene's node and the bindings of its pods, as watches showed them, with the time of each.
type timeline struct {
	*scene
	lock  sync.Mutex
	loads []seenLoad
	bound map[string]binding
}

type seenLoad struct {
	at   time.Time
	load int
}

func (l seenLoad) String() string {
	return fmt.Sprintf("%d at %s", l.load, l.at.UTC().Format("15:04:05.00"))
}

type binding struct {
	at   time.Time
	node string
}

// timeline records until the test ends.
func (s *scene) timeline() *timeline {
	s.Helper()
	lasting := rest.CopyConfig(access)
	lasting.Timeout = 0 // it would end watches
	client, err := kubernetes.NewForConfig(lasting)
	if err != nil {
		s.Fatal(err)
	}
	l := &timeline{scene: s, bound: map[string]binding{}}
	ofNode := metav1.ListOptions{FieldSelector: "metadata.name=" + s.node}
	s.Cleanup(func() {
		if s.Failed() {
			l.logLoad()
		}
	})
	l.record(func() (watch.Interface, error) { return client.CoreV1().Nodes().Watch(s.Context(), ofNode) })
	l.record(func() (watch.Interface, error) {
		return client.CoreV1().Pods(s.name).Watch(s.Context(), metav1.ListOptions{})
	})
	eventually(s, 10*time.Second, "the watch shows the node", func() error {
		if _, seen := l.last(); !seen {
			return fmt.Errorf("it was not shown yet")
		}
		return nil
	})
	return l
}

func (l *timeline) record(start func() (watch.Interface, error)) {
	l.Helper()
	watching, err := start()
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(watching.Stop)
	go func() {
		for event := range watching.ResultChan() {
			l.add(time.Now(), event)
		}
	}()
}

func (l *timeline) add(now time.Time, event watch.Event) {
	l.lock.Lock()
	defer l.lock.Unlock()
	switch object := event.Object.(type) {
	case *corev1.Node:
		if load := labelOf(object); len(l.loads) == 0 || l.loads[len(l.loads)-1].load != load {
			l.loads = append(l.loads, seenLoad{now, load})
		}
	case *corev1.Pod:
		if _, known := l.bound[object.Name]; !known && object.Spec.NodeName != "" {
			l.bound[object.Name] = binding{now, object.Spec.NodeName}
		}
	}
}

// last is the load that was shown last.
func (l *timeline) last() (load int, seen bool) {
	l.lock.Lock()
	defer l.lock.Unlock()
	if len(l.loads) == 0 {
		return unlabelled, false
	}
	return l.loads[len(l.loads)-1].load, true
}

// since are the loads that were shown from a time on.
func (l *timeline) since(from time.Time) (loads []seenLoad) {
	l.lock.Lock()
	defer l.lock.Unlock()
	for _, each := range l.loads {
		if !each.at.Before(from) {
			loads = append(loads, each)
		}
	}
	return loads
}

// waitLoad waits for a load that is wanted, and returns when it was shown.
func (l *timeline) waitLoad(limit time.Duration, from time.Time, what string, wanted func(load int) bool) (at time.Time) {
	l.Helper()
	eventually(l, limit, what, func() error {
		loads := l.since(from)
		index := slices.IndexFunc(loads, func(each seenLoad) bool { return wanted(each.load) })
		if index < 0 {
			load, _ := l.last()
			return fmt.Errorf("the label is %d, and since then was %v", load, loads)
		}
		at = loads[index].at
		return nil
	})
	return at
}

// waitBound waits until a pod is bound, and returns when and where.
func (l *timeline) waitBound(limit time.Duration, pod string) (seen binding) {
	l.Helper()
	eventually(l, limit, "pod "+pod+" is bound", func() (err error) {
		l.lock.Lock()
		defer l.lock.Unlock()
		var bound bool
		if seen, bound = l.bound[pod]; !bound {
			err = fmt.Errorf("it is not bound")
		}
		return err
	})
	return seen
}

func isFull(load int) bool  { return load >= fullLoad }
func hasRoom(load int) bool { return load != unlabelled && load < fullLoad }

// waitRoom waits until the node has room for the scene, which is a load of at most `highest`, and until its agent may write this many labels in a row: it has written none for as
// many intervals. Other work on this machine counts as usage of its node, so there may be no room.
func (l *timeline) waitRoom(writes, highest int) {
	l.Helper()
	for begin := time.Now(); ; time.Sleep(time.Second) {
		object, err := kube.CoreV1().Nodes().Get(background, l.node, metav1.GetOptions{})
		if err != nil {
			l.Fatal(err)
		}
		load := labelOf(object)
		full := load > highest
		if waited := time.Since(begin); full && waited > 3*time.Minute {
			l.Skipf("the label of %s stays at %d without the scene's pods: the machine is too busy", l.node, load)
		} else if waited > 8*time.Minute {
			l.Fatalf("the label of %s does not settle: %d, written at %s", l.node, load, labelWritten(object))
		}
		if load != unlabelled && !full && time.Since(labelWritten(object)) > time.Duration(writes)*labelInterval {
			return
		}
	}
}

// labelWritten is when the load label of a node changed last.
func labelWritten(object *corev1.Node) (last time.Time) {
	for _, entry := range object.ManagedFields {
		if entry.FieldsV1 != nil && strings.Contains(string(entry.FieldsV1.Raw), loadLabel) && entry.Time.After(last) {
			last = entry.Time.Time
		}
	}
	return last
}

// logLoad logs the labels that were shown, and what the agent reports now.
func (l *timeline) logLoad() {
	l.Helper()
	for _, each := range l.since(time.Time{}) {
		l.Logf("%s: label %s", l.node, each)
	}
	text, err := tryKubectl("", "get", "nodemetric", l.node, "-o", "jsonpath={.status.timestamp} {.status.load}")
	l.Logf("%s %v", text, err)
}

// cpu is the CPU of the scene's node, and how much of it no pod requests, in millicores.
func (s *scene) cpu() (all, left int64) {
	s.Helper()
	object, err := kube.CoreV1().Nodes().Get(background, s.node, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	list, err := kube.CoreV1().Pods("").List(background, metav1.ListOptions{FieldSelector: "spec.nodeName=" + s.node})
	if err != nil {
		s.Fatal(err)
	}
	left = object.Status.Allocatable.Cpu().MilliValue()
	for _, pod := range list.Items {
		for _, container := range pod.Spec.Containers {
			left -= container.Resources.Requests.Cpu().MilliValue()
		}
	}
	return object.Status.Capacity.Cpu().MilliValue(), left
}

// filling are pods whose expected usage is above the node's load line: one that requests this many of all millicores, and others
// without a request, each of which is expected to use usualCPU.
func filling(all, requested int64) (pods []work) {
	missing := 1.02 * defaultLine * float64(all)
	if requested > 0 {
		pods = append(pods, work{name: "big", args: []string{"pause"}, requests: fmt.Sprintf("%dm", requested)})
		missing -= usualShare * float64(requested)
	}
	for i := range int(math.Ceil(missing / usualCPU)) {
		pods = append(pods, work{name: fmt.Sprintf("usual-%d", i), args: []string{"pause"}})
	}
	return pods
}

// deleteNow deletes pods without a grace period.
func (s *scene) deleteNow(pods ...work) {
	s.Helper()
	for _, w := range pods {
		if err := kube.CoreV1().Pods(s.name).Delete(background, w.name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
			s.Fatal(err)
		}
	}
}

const (
	// Agents write a label in this time, for long.
	labelInterval = 5 * time.Second
	// Schedulers must see at the latest after this time that pods started or ended, if nothing else uses the CPUs.
	maxLabelDelay = 1500 * time.Millisecond
	// The same on a busy or emulated machine.
	maxBusyLabelDelay = 5 * time.Second
)

// labelDelays starts and ends pods that fill the node, and returns how long after that its label shows it.
func (s *scene) labelDelays(l *timeline) (started, ended time.Duration) {
	s.Helper()
	l.waitRoom(3, 90)
	before, _ := l.last()
	l.lock.Lock()
	clear(l.bound)
	l.lock.Unlock()
	pods := filling(s.cpu())
	begin := time.Now()
	s.start(pods...)
	var bound time.Time
	for _, w := range pods {
		if at := l.waitBound(20*time.Second, w.name).at; at.After(bound) {
			bound = at
		}
	}
	full := l.waitLoad(20*time.Second, begin, "the label shows the pods that start", isFull)
	deleted := time.Now()
	s.deleteNow(pods...)
	empty := l.waitLoad(20*time.Second, deleted, "the label shows that they ended", hasRoom)
	s.Logf("%s: %d pods, label before %d, then %v", s.node, len(pods), before, l.since(begin))
	return full.Sub(bound), empty.Sub(deleted)
}

func TestLoadLabelFollowsPodsThatStartAndEnd(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		l := s.timeline()
		// Scenes on the other node may use the CPUs.
		for attempt := 1; ; attempt++ {
			started, ended := s.labelDelays(l)
			t.Logf("%s: the label is at 95 or more %.2f s after pods were bound, and below %.2f s after they were deleted", node, started.Seconds(), ended.Seconds())
			delay := max(started, ended)
			if delay <= maxLabelDelay || node == "v2" && delay <= maxBusyLabelDelay {
				return
			}
			if delay > maxBusyLabelDelay || attempt == 3 {
				t.Fatalf("%s: the label is %s late in attempt %d", node, delay, attempt)
			}
		}
	})
}

// TestEmptiedNodeIsChosenAgain at the latest 10 s after its pods were deleted, rather than a node of which more is requested.
func TestEmptiedNodeIsChosenAgain(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		l := s.timeline()
		s.schedulerByLoad()
		cool := s.standIn("cool", "60", 90)
		l.waitRoom(3, countsAsIdle)
		chosen := func(name string) string {
			s.startChanged(work{name: name, args: []string{"pause"}, requests: "1m"}, s.placedByLoad(node, cool))
			return l.waitBound(10*time.Second, name).node
		}
		pods := filling(s.cpu())
		begin := time.Now()
		s.start(pods...)
		l.waitLoad(20*time.Second, begin, "the label shows the pods that start", isFull)
		if on := chosen("full"); on != cool {
			t.Errorf("a pod was placed on %s while %s is full", on, node)
		}
		deleted := time.Now()
		s.deleteNow(pods...)
		for i := 0; ; i++ {
			on := chosen(fmt.Sprintf("emptied-%d", i))
			took := time.Since(deleted)
			if took > 10*time.Second {
				t.Fatalf("%s: pods are still placed elsewhere %s after its own were deleted; labels since then: %v", node, took, l.since(deleted))
			}
			if on == node {
				t.Logf("%s: chosen again %.2f s after its pods were deleted", node, took.Seconds())
				return
			}
			time.Sleep(500 * time.Millisecond)
		}
	})
}

// standIn creates a Node without a kubelet: pods are bound to it, but never run. Its load label and how much of its CPU is requested, in percent,
// are all that schedulers know of it.
func (s *scene) standIn(suffix, load string, requested int64) (name string) {
	s.Helper()
	name = s.name + "-" + suffix
	capacity := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2"), corev1.ResourceMemory: resource.MustParse("4Gi"), corev1.ResourcePods: resource.MustParse("110")}
	object := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name, loadLabel: load}},
		Status:     corev1.NodeStatus{Capacity: capacity, Allocatable: capacity},
	}
	if _, err := kube.CoreV1().Nodes().Create(background, object, metav1.CreateOptions{}); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { s.removeStandIn(name) })
	stop := s.keepReady(name)
	s.Cleanup(stop)
	if requested > 0 {
		s.startChanged(work{name: "filler-" + suffix, args: []string{"pause"}, requests: fmt.Sprintf("%dm", 20*requested)}, func(spec *corev1.PodSpec) {
			spec.NodeSelector, spec.NodeName = nil, name
		})
	}
	eventually(s, 20*time.Second, name+" is schedulable", func() error {
		object, err := kube.CoreV1().Nodes().Get(background, name, metav1.GetOptions{})
		if err == nil && len(object.Spec.Taints) > 0 {
			err = fmt.Errorf("taints are %v", object.Spec.Taints)
		}
		return err
	})
	return name
}

// removeStandIn deletes the Node, and its pods, which no kubelet would delete.
func (s *scene) removeStandIn(name string) {
	s.Helper()
	now := metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}
	if err := kube.CoreV1().Pods(s.name).DeleteCollection(background, now, metav1.ListOptions{FieldSelector: "spec.nodeName=" + name}); err != nil {
		s.Error(err)
	}
	if err := kube.CoreV1().Nodes().Delete(background, name, metav1.DeleteOptions{}); err != nil {
		s.Error(err)
	}
}

// keepReady posts the status of a Node as its kubelet would, until stop is called.
func (s *scene) keepReady(name string) (stop func()) {
	var posted time.Time
	return repeatedly(s, func() {
		if time.Since(posted) < 5*time.Second {
			return
		}
		posted = time.Now()
		ready := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "StandIn", LastHeartbeatTime: metav1.Now()}
		patch, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []corev1.NodeCondition{ready}}})
		if err == nil {
			_, err = kube.CoreV1().Nodes().Patch(background, name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
		}
		if err != nil {
			s.Errorf("the status of %s: %v", name, err)
		}
	})
}

// schedulerByLoad runs a kube-scheduler with the chart's configuration for a second scheduler, under the scene's name.
func (s *scene) schedulerByLoad() {
	s.Helper()
	needShell(s)
	rendered, err := helm("", "template", "plimsoll", absolute("charts/plimsoll"), "--namespace", namespace, "--show-only", "templates/scheduler-config.yaml",
		"--set", "image.repository=plimsoll.dev/e2e/plimsoll,placement.scheduler.enabled=true")
	if err != nil {
		s.Fatal(err)
	}
	found, err := plane.Objects(rendered)
	if err != nil || len(found) != 1 {
		s.Fatalf("%d objects: %v", len(found), err)
	}
	text, _, _ := unstructured.NestedString(found[0].Object, "data", "scheduler.yaml")
	var config map[string]any
	if err := yaml.Unmarshal([]byte(text), &config); err != nil {
		s.Fatal(err)
	}
	kubeconfig := absolute("target/e2e/kubeconfig")
	config["clientConnection"] = map[string]any{"kubeconfig": kubeconfig}
	config["leaderElection"] = map[string]any{"leaderElect": false}
	config["profiles"].([]any)[0].(map[string]any)["schedulerName"] = s.name
	changed, err := yaml.Marshal(config)
	if err != nil {
		s.Fatal(err)
	}
	file := plane.WriteFile(s.T, filepath.Join(s.TempDir(), "scheduler.yaml"), string(changed))
	(&plane.Plane{T: s.T}).Run("kube-scheduler", "--config="+file, "--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", plane.FreePort(s.T)),
		"--authentication-kubeconfig="+kubeconfig, "--authorization-kubeconfig="+kubeconfig)
}

// placedByLoad has the scene's scheduler choose among nodes.
func (s *scene) placedByLoad(nodes ...string) func(*corev1.PodSpec) {
	return func(spec *corev1.PodSpec) {
		spec.SchedulerName = s.name
		spec.NodeSelector = nil
		spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
			NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
				{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: nodes}}}}}}}
	}
}

func TestDeadAgentLeavesNoLoadLabel(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		l := s.timeline()
		begin := time.Time{}
		l.waitLoad(time.Minute, begin, "the node is labelled", func(load int) bool { return load != unlabelled })
		leave, back := s.stopAgent()
		t.Cleanup(back)
		// A stopped agent cannot clean up when its pod is terminated: the kubelet kills it after the grace period.
		onNode(t, node, "kill -STOP "+processOf(t, node, "agent"))
		died := time.Now()
		last, _ := l.last()
		leave()
		removed := l.waitLoad(7*time.Minute, died, "the controller removes the label", func(load int) bool { return load == unlabelled })
		t.Logf("%s: the label %d was removed %.0f s after the agent died", node, last, removed.Sub(died).Seconds())
		if seen := l.since(died); len(seen) != 1 {
			t.Errorf("the label of a dead agent changed: %v", seen)
		}
		started := time.Now()
		back()
		again := l.waitLoad(time.Minute, started, "the next agent labels the node", func(load int) bool { return load != unlabelled })
		t.Logf("%s: labelled again after %.1f s", node, again.Sub(started).Seconds())
	})
}

// evicted starts a pod on the scene's node, has a rule evict it, and returns the node that its replacement is bound to. The pod tolerates our
// taint, so that only the label keeps it away from its node.
func (s *scene) evicted(l *timeline, app string, candidates ...string) (replacement binding) {
	s.Helper()
	elsewhere := slices.DeleteFunc(slices.Clone(candidates), func(name string) bool { return name == s.node })
	for _, name := range elsewhere {
		kubectl(s, "cordon", name)
		s.Cleanup(func() { tryKubectl("", "uncordon", name) })
	}
	template := s.template(work{name: app, args: []string{"burn", "10"}, requests: "10m"})
	s.placedByLoad(candidates...)(&template.Spec)
	set := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Name: app}, Spec: appsv1.ReplicaSetSpec{
		Replicas: ptr.To[int32](1), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}, Template: template}}
	if _, err := kube.AppsV1().ReplicaSets(s.name).Create(background, set, metav1.CreateOptions{}); err != nil {
		s.Fatal(err)
	}
	first := s.podOf(app, "")
	for _, name := range elsewhere {
		kubectl(s, "uncordon", name)
	}
	s.set(hot)
	s.waitTerminating(30*time.Second, first)
	eventually(s, 30*time.Second, "the replacement is bound", func() error {
		l.lock.Lock()
		defer l.lock.Unlock()
		for name, each := range l.bound {
			if strings.HasPrefix(name, app+"-") && name != first {
				replacement = each
				return nil
			}
		}
		return fmt.Errorf("pods are bound: %v", l.bound)
	})
	load, _ := l.last()
	s.Logf("%s: a pod was evicted at a label of %d; its replacement is bound to %s", s.node, load, replacement.node)
	s.set(cold)
	return replacement
}

// evictAbove applies a rule that evicts the scene's pods while the metric is above the threshold.
func (s *scene) evictAbove() {
	s.Helper()
	s.action(s.name, "{coolDownSeconds: 1, eviction: {terminationGracePeriodSeconds: 1}}")
	s.allow(s.name, "", s.name)
	s.rule(s.name, rule{action: s.name})
	s.waitRulesEnforced(s.name)
}

// TestEvictedPodGoesToNodeUnderItsLoadLine although more of that node is requested: neither back, nor to another node above its threshold.
func TestEvictedPodGoesToNodeUnderItsLoadLine(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		l := s.timeline()
		s.schedulerByLoad()
		cool, hotNode := s.standIn("cool", "60", 90), s.standIn("hot", "100", 0)
		s.evictAbove()
		if on := s.evicted(l, "web", node, cool, hotNode).node; on != cool {
			t.Errorf("the evicted pod was replaced on %s", on)
		}
	})
}

// TestEvictedPodGoesToTheOtherRealNode although nothing is requested of a third node, which is above its threshold.
func TestEvictedPodGoesToTheOtherRealNode(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := aloneWithSpareNode(t, node)
		l := s.timeline()
		s.schedulerByLoad()
		hotNode := s.standIn("hot", "100", 0)
		s.evictAbove()
		object, err := kube.CoreV1().Nodes().Get(background, other(node), metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if load := labelOf(object); load > 90 {
			t.Skipf("the label of %s is %d without the scene's pods: the machine is too busy", other(node), load)
		}
		if on := s.evicted(l, "web", node, other(node), hotNode).node; on != other(node) {
			t.Errorf("the evicted pod was replaced on %s", on)
		}
	})
}
