//go:build e2e

package placement

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	loadLabel = "plimsoll.dev/load"
	busyTaint = "plimsoll.dev/busy"
	// busyFrom is the load from which an agent sets the taint.
	busyFrom = 95
	// none is a node without the label.
	none = "none"
	// image is the image of all pods.
	image = "it.example/it:1"
)

// A way is how the load of nodes reaches the scheduling of pods.
type way struct {
	name, namespace, scheduler string
	// labelled and tainted are what agents write.
	labelled, tainted bool
}

var (
	bare     = way{name: "bare scheduler", namespace: "bare", scheduler: corev1.DefaultSchedulerName}
	byLabel  = way{name: "second scheduler", namespace: "second", scheduler: "plimsoll", labelled: true}
	byPolicy = way{name: "admission policy", namespace: "policy", scheduler: corev1.DefaultSchedulerName, labelled: true}
	byTaint  = way{name: "soft taint", namespace: "taint", scheduler: corev1.DefaultSchedulerName, tainted: true}
	ways     = []way{bare, byLabel, byPolicy, byTaint}
)

// A node has 4 CPUs, 8 GiB and room for 110 pods.
type node struct {
	name string
	// load is the text of the label, or none.
	load string
	// cpu and memory are the percentages of the node that its pods request.
	cpu, memory int64
	// image is an image of 4 GB that the node has.
	image string
}

// some are nodes with the same properties.
func some(count int, of node) (nodes []node) {
	for i := range count {
		each := of
		each.name = fmt.Sprintf("%s-%d", of.name, i)
		nodes = append(nodes, each)
	}
	return nodes
}

// A scene has nodes of its own, which its pods select.
type scene struct {
	*cluster
	way
	id    string
	nodes []node
	// pods is the number of pods so far, placing is the number that the scheduler has to bind.
	pods, placing int
	// reported are the bindings that agents report, counted at reportedAt.
	reported     placed
	reportedAt   time.Time
	reportedLock sync.Mutex
}

var scenes = 0

// scene creates nodes with their load signs, runs the test, and deletes its nodes and pods.
func (c *cluster) scene(as way, test func(*scene), nodes ...[]node) {
	c.T.Helper()
	scenes++
	s := &scene{cluster: c, way: as, id: fmt.Sprintf("s%d", scenes)}
	for _, each := range nodes {
		s.nodes = append(s.nodes, each...)
	}
	for _, each := range s.nodes {
		s.create(each)
	}
	s.untilSeen()
	if c.reportTo != nil {
		defer c.reportTo.agents(s)()
	}
	test(s)
	now := int64(0)
	of := metav1.ListOptions{LabelSelector: "scene=" + s.id}
	if err := c.Kube.CoreV1().Pods(as.namespace).DeleteCollection(background, metav1.DeleteOptions{GracePeriodSeconds: &now}, of); err != nil {
		c.T.Fatal(err)
	}
	if err := c.Kube.CoreV1().Nodes().DeleteCollection(background, metav1.DeleteOptions{}, of); err != nil {
		c.T.Fatal(err)
	}
}

func quantities(cpu, memory int64) corev1.ResourceList {
	return corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewMilliQuantity(cpu, resource.DecimalSI),
		corev1.ResourceMemory: *resource.NewQuantity(memory<<20, resource.BinarySI),
	}
}

func (s *scene) create(of node) {
	s.T.Helper()
	capacity := quantities(4000, 8192)
	capacity[corev1.ResourcePods] = resource.MustParse("110")
	object := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: s.nodeName(of.name), Labels: map[string]string{
			corev1.LabelHostname: of.name, "scene": s.id, "node": of.name,
		}},
		Status: corev1.NodeStatus{
			Capacity: capacity, Allocatable: capacity, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}
	if of.image != "" {
		object.Status.Images = []corev1.ContainerImage{{Names: []string{of.image}, SizeBytes: 4 << 30}}
	}
	s.setLoadSigns(object, of.load)
	if _, err := s.Kube.CoreV1().Nodes().Create(background, object, metav1.CreateOptions{}); err != nil {
		s.T.Fatal(err)
	}
	if of.cpu+of.memory > 0 {
		filler := newPod(s.way, s.id+"-filler-"+of.name, map[string]string{"scene": s.id})
		filler.Spec.NodeName = object.Name
		filler.Spec.Containers[0].Resources.Requests = quantities(40*of.cpu, 8192*of.memory/100)
		s.createPod(filler)
	}
}

// untilSeen waits until the scheduler knows all nodes and pods of the scene: it sees changes in order, so it binds a pod that is created later
// only after them.
func (s *scene) untilSeen() {
	s.T.Helper()
	probe := newPod(s.way, s.id+"-probe", map[string]string{"scene": s.id})
	probe.Spec.NodeSelector = map[string]string{"scene": s.id, "node": s.nodes[len(s.nodes)-1].name}
	s.createPod(probe)
	pods := s.Kube.CoreV1().Pods(s.namespace)
	s.Eventually(waitTimeout, "the scheduler binds a pod of "+s.name, func() error {
		found, err := pods.Get(background, probe.Name, metav1.GetOptions{})
		if err == nil && found.Spec.NodeName == "" {
			err = fmt.Errorf("it is not bound: %v", found.Status.Conditions)
		}
		return err
	})
	now := int64(0)
	if err := pods.Delete(background, probe.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		s.T.Fatal(err)
	}
}

func (s *scene) nodeName(short string) string { return s.id + "-" + short }

// setLoadSigns sets label and taint as an agent would.
func (s *scene) setLoadSigns(object *corev1.Node, load string) {
	if s.labelled && load != none {
		object.Labels[loadLabel] = load
	}
	if number, err := strconv.Atoi(load); s.tainted && err == nil && number >= busyFrom {
		object.Spec.Taints = []corev1.Taint{{Key: busyTaint, Effect: corev1.TaintEffectPreferNoSchedule}}
	}
}

// setLoad changes the load of a node, as its agent would.
func (s *scene) setLoad(short, load string) {
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{}}}
	s.setLoadSigns(object, load)
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": object.Labels}, "spec": map[string]any{"taints": object.Spec.Taints}})
	if err == nil {
		_, err = s.Kube.CoreV1().Nodes().Patch(background, s.nodeName(short), types.MergePatchType, patch, metav1.PatchOptions{})
	}
	if err != nil {
		s.T.Error(err)
	}
}

// newPod is a pod without requests.
func newPod(as way, name string, labels map[string]string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: as.namespace, Labels: labels},
		Spec:       corev1.PodSpec{SchedulerName: as.scheduler, Containers: []corev1.Container{{Name: "it", Image: image}}},
	}
}

func (s *scene) createPod(pod *corev1.Pod) {
	if _, err := s.Kube.CoreV1().Pods(pod.Namespace).Create(background, pod, metav1.CreateOptions{}); err != nil {
		s.T.Error(err)
	}
}

// A shape changes a pod of a scene.
type shape func(*corev1.Pod)

// requests sets the requests of a pod in millicores and MiB.
func requests(cpu, memory int64) shape {
	return func(pod *corev1.Pod) { pod.Spec.Containers[0].Resources.Requests = quantities(cpu, memory) }
}

// small are the requests of the pods of most scenes: 2.5 % of a node.
var small = requests(100, 204)

// prefers adds a preference for a node of the scene.
func prefers(weight int32, short string) shape {
	return func(pod *corev1.Pod) {
		pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{
			Weight: weight,
			Preference: corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{
				{Key: "node", Operator: corev1.NodeSelectorOpIn, Values: []string{short}},
			}},
		}}}}
	}
}

// labelled adds a label to a pod.
func labelled(key, value string) shape { return func(pod *corev1.Pod) { pod.Labels[key] = value } }

// pod is the next pod of the scene.
func (s *scene) pod(shapes ...shape) *corev1.Pod {
	s.pods++
	s.placing++
	pod := newPod(s.way, fmt.Sprintf("%s-%d", s.id, s.pods), map[string]string{"scene": s.id, "placed": s.id})
	pod.Spec.NodeSelector = map[string]string{"scene": s.id}
	for _, each := range shapes {
		each(pod)
	}
	return pod
}

// placed is the number of pods by node.
type placed map[string]int

// on is the number of pods on nodes whose names have this prefix.
func (p placed) on(prefix string) (sum int) {
	for short, count := range p {
		if strings.HasPrefix(short, prefix) {
			sum += count
		}
	}
	return sum
}

// highest is the largest number of pods on one node whose name has this prefix.
func (p placed) highest(prefix string) (highest int) {
	for short, count := range p {
		if strings.HasPrefix(short, prefix) {
			highest = max(highest, count)
		}
	}
	return highest
}

// burst creates pods at once, waits until all are bound, and returns the number of the scene's pods on each node.
func (s *scene) burst(count int, shapes ...shape) placed {
	s.T.Helper()
	s.createPods(count, shapes...)
	return s.untilBound()
}

// createPods creates pods at once.
func (s *scene) createPods(count int, shapes ...shape) {
	var all sync.WaitGroup
	queue := make(chan *corev1.Pod)
	for range 16 {
		all.Go(func() {
			for pod := range queue {
				s.createPod(pod)
			}
		})
	}
	for range count {
		queue <- s.pod(shapes...)
	}
	close(queue)
	all.Wait()
}

// bindings is the number of the scene's pods that the scheduler has bound to each node.
func (s *scene) bindings() (placed, error) {
	pods, err := s.Kube.CoreV1().Pods(s.namespace).List(background, metav1.ListOptions{LabelSelector: "placed=" + s.id, ResourceVersion: "0"})
	if err != nil {
		return nil, err
	}
	found := placed{}
	for _, pod := range pods.Items {
		if pod.Spec.NodeName != "" {
			found[strings.TrimPrefix(pod.Spec.NodeName, s.id+"-")]++
		}
	}
	return found, nil
}

// untilBound waits until all pods of the scene are bound, and returns their number on each node.
func (s *scene) untilBound() placed {
	s.T.Helper()
	started := time.Now()
	for {
		found, err := s.bindings()
		if err != nil {
			s.T.Fatal(err)
		}
		if found.on("") == s.placing {
			return found
		}
		if time.Since(started) > waitTimeout {
			s.T.Fatalf("%s: only %d of %d pods are bound: %v", s.name, found.on(""), s.placing, found)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// service creates a Service for the pods with this label, so that schedulers spread them.
func (s *scene) service(app string) {
	s.T.Helper()
	s.Apply(fmt.Sprintf("{apiVersion: v1, kind: Service, metadata: {name: %s-%s, namespace: %s}, spec: {selector: {app: %[2]s, scene: %[1]s}, ports: [{port: 80}]}}",
		s.id, app, s.namespace))
}

// bound creates a pod that is already bound to a node.
func (s *scene) bound(short string, shapes ...shape) {
	s.T.Helper()
	pod := s.pod(shapes...)
	s.placing--
	pod.Name += "-on-" + short
	delete(pod.Labels, "placed")
	pod.Spec.NodeName = s.nodeName(short)
	s.createPod(pod)
}
