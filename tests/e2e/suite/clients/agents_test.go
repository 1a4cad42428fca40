//go:build e2e

package clients

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"plimsoll.dev/suite/plane"
)

const (
	leases  = "plimsoll-node-lease"
	summary = "plimsoll.dev/summary"
	cpus    = 8
)

// A pace is how often agents send heartbeats.
type pace struct {
	every time.Duration
	// interval is the one that they announce in direct reports.
	interval time.Duration
	// ackTimeout is the time without an acknowledgement from the leader after which they renew their Leases with each heartbeat.
	ackTimeout time.Duration
}

var (
	// Faster than real agents, so that new data shows up soon.
	fastPace = pace{every: 500 * time.Millisecond, interval: 2 * time.Second, ackTimeout: 5 * time.Second}
	// Like real agents.
	normalPace = pace{every: 10 * time.Second, interval: 10 * time.Second, ackTimeout: 25 * time.Second}
)

var (
	background  = context.Background()
	watermarks  = schema.GroupVersionResource{Group: "plimsoll.dev", Version: "v1alpha1", Resource: "nodewatermarks"}
	nodemetrics = schema.GroupVersionResource{Group: "metrics.plimsoll.dev", Version: "v1alpha1", Resource: "nodemetrics"}
)

// agents simulate the agents of all nodes: they renew their Leases and send reports. The values of a heartbeat are derived
// from its number, so that a client can verify what it gets.
type agents struct {
	*plane.Plane
	pace
	nodes []string
	lock  sync.Mutex
	beat  int64
	// Connections for direct reports, by node and replica, and the leader's last acknowledgements; both are empty without direct reports.
	connections  [][]*agentConnection
	acknowledged []atomic.Int64
}

// cpu is the CPU usage of a node's heartbeat in percent, never 0.
func cpu(node int, beat int64) int64 { return 10 + (7*beat+11*int64(node))%80 }

// startAgents creates nodes and their agents, which send heartbeats until the test ends.
func startAgents(p *plane.Plane, count int, at pace) *agents {
	a := &agents{Plane: p, pace: at}
	a.must(p.Kube.CoreV1().Namespaces().Create(background, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: leases}}, metav1.CreateOptions{}))
	for index := range count {
		a.nodes = append(a.nodes, fmt.Sprintf("node%02d", index))
		size := corev1.ResourceList{"cpu": resource.MustParse(fmt.Sprint(cpus)), "memory": resource.MustParse("16Gi")}
		ready := []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"}}
		a.must(p.Kube.CoreV1().Nodes().Create(background, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: a.nodes[index], Labels: map[string]string{"pool": "a"}},
			Status:     corev1.NodeStatus{Capacity: size, Conditions: ready},
		}, metav1.CreateOptions{}))
		a.must(p.Kube.CoordinationV1().Leases(leases).Create(background, &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: a.nodes[index], Annotations: map[string]string{summary: a.summaryOf(index, 0)}},
			Spec: coordinationv1.LeaseSpec{
				HolderIdentity: &a.nodes[index], LeaseDurationSeconds: ptr.To[int32](40), RenewTime: ptr.To(metav1.NowMicro()),
			},
		}, metav1.CreateOptions{}))
	}
	running, end := context.WithCancel(background)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-running.Done():
				return
			case <-time.After(a.every):
				a.renew(running)
			}
		}
	}()
	p.T.Cleanup(func() { end(); <-ended })
	return a
}

func (a *agents) must(_ any, err error) {
	a.T.Helper()
	if err != nil {
		a.T.Fatal(err)
	}
}

// summaryOf is the summary in the Lease of a node's heartbeat.
func (a *agents) summaryOf(node int, beat int64) string {
	return fmt.Sprintf("seq=%d cpu=%d.0 mem=25.0", beat+1, cpu(node, beat))
}

// renew sends one more heartbeat of all agents. Those whose direct reports the leader acknowledges need no API server.
func (a *agents) renew(running context.Context) {
	next := a.last() + 1
	for index, node := range a.nodes {
		if a.reports(running, index, next) {
			continue
		}
		patch, _ := json.Marshal(map[string]any{
			"metadata": map[string]any{"annotations": map[string]string{summary: a.summaryOf(index, next)}},
			"spec":     map[string]any{"renewTime": metav1.NowMicro()},
		})
		within, end := context.WithTimeout(running, 2*time.Second)
		_, err := a.Kube.CoordinationV1().Leases(leases).Patch(within, node, types.MergePatchType, patch, metav1.PatchOptions{})
		end()
		if err != nil {
			return
		}
	}
	a.lock.Lock()
	defer a.lock.Unlock()
	a.beat = next
}

// last is the number of the last heartbeat that all agents sent.
func (a *agents) last() int64 {
	a.lock.Lock()
	defer a.lock.Unlock()
	return a.beat
}

// report writes the status of all agents: their identity, and one of two rules Breached.
func (a *agents) report() {
	status, _ := json.Marshal(map[string]any{"status": map[string]any{
		"agent": map[string]any{"version": "0.1.0", "bootID": "b", "readsQuantities": true},
		"rules": []any{map[string]any{"id": "all/cpu", "state": "Breached", "mark": 80.0}, map[string]any{"id": "all/memory", "state": "Normal", "mark": 80.0}},
	}})
	for _, node := range a.nodes {
		a.Eventually(time.Minute, node+" has a NodeWatermark", func() error {
			_, err := a.Objects.Resource(watermarks).Patch(background, node, types.MergePatchType, status, metav1.PatchOptions{}, "status")
			return err
		})
	}
}

// verify returns the number of the object's heartbeat, and an error if its values are wrong.
func (a *agents) verify(object *unstructured.Unstructured) (int64, error) {
	node := -1
	for index, name := range a.nodes {
		if name == object.GetName() {
			node = index
		}
	}
	sequence, known, _ := unstructured.NestedInt64(object.Object, "status", "agent", "sequence")
	if node < 0 || !known {
		return 0, fmt.Errorf("it has no sequence number, or its node is unknown: %v", object.Object["status"])
	}
	beat := sequence - 1
	used, _, _ := unstructured.NestedString(object.Object, "status", "usage", "node", "cpu")
	if expected := fmt.Sprintf("%dm", cpus*10*cpu(node, beat)); used != expected {
		return 0, fmt.Errorf("heartbeat %d: CPU %q, not %q", beat, used, expected)
	}
	breached, _, _ := unstructured.NestedInt64(object.Object, "status", "rules", "breached")
	total, _, _ := unstructured.NestedInt64(object.Object, "status", "rules", "total")
	if total != 2 || breached != 1 {
		return 0, fmt.Errorf("heartbeat %d: %d of %d rules Breached", beat, breached, total)
	}
	conditions, _, _ := unstructured.NestedSlice(object.Object, "status", "conditions")
	for _, condition := range conditions {
		if condition := condition.(map[string]any); condition["type"] == "Healthy" && condition["status"] != "True" {
			return 0, fmt.Errorf("heartbeat %d: Healthy is %v (%v)", beat, condition["status"], condition["reason"])
		}
	}
	return beat, nil
}
