//go:build e2e

package scale

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
)

const taintKey = "interference.crane.io"

var (
	background = context.Background()
	watermarks = schema.GroupVersionResource{Group: "plimsoll.dev", Version: "v1alpha1", Resource: "nodewatermarks"}
	nodeqoss   = schema.GroupVersionResource{Group: "ensurance.crane.io", Version: "v1alpha1", Resource: "nodeqoss"}
)

// agents simulate the agents of all nodes: each measures a value that the test sets, and enforces the rules of its NodeWatermark.
type agents struct {
	*plane
	lock    sync.Mutex
	values  map[string]float64
	written map[string]string
}

// agents starts the agents of all nodes.
func (p *plane) agents() *agents {
	a := &agents{plane: p, values: map[string]float64{}, written: map[string]string{}}
	running, end := context.WithCancel(background)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for running.Err() == nil {
			a.evaluateAll()
			select {
			case <-running.Done():
			case <-time.After(300 * time.Millisecond):
			}
		}
	}()
	p.T.Cleanup(func() { end(); <-ended })
	return a
}

// setValues sets the values that the agents of these nodes measure.
func (a *agents) setValues(value func(node string) float64, nodes ...string) {
	a.lock.Lock()
	defer a.lock.Unlock()
	for _, node := range nodes {
		a.values[node] = value(node)
	}
}

// evaluateAll has every agent evaluate its rules once.
func (a *agents) evaluateAll() {
	list, err := a.Objects.Resource(watermarks).List(background, metav1.ListOptions{})
	if err != nil {
		return
	}
	var all sync.WaitGroup
	slots := make(chan struct{}, 20)
	for index := range list.Items {
		all.Add(1)
		slots <- struct{}{}
		go func() {
			defer func() { <-slots; all.Done() }()
			a.evaluate(&list.Items[index])
		}()
	}
	all.Wait()
}

// evaluate does what an agent does: it writes first the taint, then the status, each only if it changed.
func (a *agents) evaluate(object *unstructured.Unstructured) {
	node := object.GetName()
	a.lock.Lock()
	value, measured := a.values[node]
	written := a.written[node]
	a.lock.Unlock()
	if !measured {
		return
	}
	rules, _, _ := unstructured.NestedSlice(object.Object, "spec", "rules")
	soft, _, _ := unstructured.NestedBool(object.Object, "spec", "softenScheduling")
	hash, _, _ := unstructured.NestedString(object.Object, "spec", "hash")
	effect, states := "Enabled", []map[string]any{}
	for _, rule := range rules {
		rule := rule.(map[string]any)
		threshold, state := number(rule["watermark"]), "Normal"
		if value > threshold {
			state, effect = "Breached", "NoSchedule"
			if soft {
				effect = "PreferNoSchedule"
			}
		}
		states = append(states, map[string]any{"id": rule["id"], "strategy": rule["strategy"], "state": state, "value": value, "mark": threshold})
	}
	status, _ := json.Marshal(map[string]any{"status": map[string]any{
		"observedHash": hash, "rules": states, "scheduling": map[string]any{"state": effect},
	}})
	if string(status) == written || a.taint(node, effect) != nil {
		return
	}
	_, err := a.Objects.Resource(watermarks).Patch(background, node, types.MergePatchType, status, metav1.PatchOptions{}, "status")
	if err == nil {
		a.lock.Lock()
		a.written[node] = string(status)
		a.lock.Unlock()
	}
}

func number(value any) float64 {
	switch value := value.(type) {
	case int64:
		return float64(value)
	case float64:
		return value
	}
	return 0
}

// taint sets our taint with this effect, or removes it.
func (a *agents) taint(name, effect string) error {
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		node, err := a.Kube.CoreV1().Nodes().Get(background, name, metav1.GetOptions{})
		if err != nil || effectOf(node) == effect {
			return err
		}
		var taints []corev1.Taint
		for _, taint := range node.Spec.Taints {
			if taint.Key != taintKey {
				taints = append(taints, taint)
			}
		}
		if effect != "Enabled" {
			taints = append(taints, corev1.Taint{Key: taintKey, Effect: corev1.TaintEffect(effect)})
		}
		node.Spec.Taints = taints
		_, err = a.Kube.CoreV1().Nodes().Update(background, node, metav1.UpdateOptions{})
		return err
	})
}

// effectOf is the effect of our taint on a node, or Enabled.
func effectOf(node *corev1.Node) string {
	for _, taint := range node.Spec.Taints {
		if taint.Key == taintKey {
			return string(taint.Effect)
		}
	}
	return "Enabled"
}

// nodes creates kwok nodes, and a pod on the first of them, and waits until kwok reports that the nodes are Ready and the pod runs.
func (p *plane) nodes(count int) []string {
	names := make([]string, count)
	var all sync.WaitGroup
	slots := make(chan struct{}, 20)
	for index := range names {
		names[index] = fmt.Sprintf("node%04d", index)
		all.Add(1)
		slots <- struct{}{}
		go func() {
			defer func() { <-slots; all.Done() }()
			size := corev1.ResourceList{"cpu": quantity("8"), "memory": quantity("16Gi"), "pods": quantity("110")}
			node := &corev1.Node{
				ObjectMeta: metav1.ObjectMeta{Name: names[index], Labels: map[string]string{"pool": fmt.Sprintf("pool%d", index%50)}},
				Status:     corev1.NodeStatus{Capacity: size, Allocatable: size},
			}
			if _, err := p.Kube.CoreV1().Nodes().Create(background, node, metav1.CreateOptions{}); err != nil {
				p.T.Error(err)
			}
		}()
	}
	all.Wait()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "simulated"}, Spec: corev1.PodSpec{
		NodeName: names[0], Containers: []corev1.Container{{Name: "it", Image: "none"}},
	}}
	if _, err := p.Kube.CoreV1().Pods("default").Create(background, pod, metav1.CreateOptions{}); err != nil {
		p.T.Fatal(err)
	}
	p.Eventually(2*time.Minute, "kwok runs the nodes and the pod", func() error {
		pod, err := p.Kube.CoreV1().Pods("default").Get(background, "simulated", metav1.GetOptions{})
		if err != nil || pod.Status.Phase != corev1.PodRunning {
			return fmt.Errorf("the pod is %q: %v", pod.Status.Phase, err)
		}
		list, err := p.Kube.CoreV1().Nodes().List(background, metav1.ListOptions{})
		if err != nil {
			return err
		}
		ready := 0
		for _, node := range list.Items {
			for _, condition := range node.Status.Conditions {
				if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue {
					ready++
				}
			}
		}
		if ready < count {
			return fmt.Errorf("%d of %d nodes are Ready", ready, count)
		}
		return nil
	})
	return names
}
