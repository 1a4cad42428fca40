//go:build e2e

package compare

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"plimsoll.dev/suite/stamp"
)

// A view is a resource that a client polls, and its measurements.
type view struct {
	path string
	// The expected number of objects.
	expected int
	// The memory of a node, and the window over which its CPU is averaged; nil if the objects are not nodes.
	node func(item) (string, string)
	took, ages,
	windows []float64 // latencies in milliseconds; windows of each node in seconds
	size       int // of the last response, in bytes
	incomplete int // responses without all objects
}

// An item is a node or a pod, as either API shows it.
type item struct {
	Window string
	Usage  struct{ Memory string }
	Status struct {
		Window string
		Usage  struct{ Node struct{ Memory string } }
	}
}

const (
	theirNodes = "/apis/metrics.k8s.io/v1beta1/nodes"
	theirPods  = "/apis/metrics.k8s.io/v1beta1/pods"
	ourNodes   = "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics"
)

// views are a client's views without measurements.
func (s *scene) views() map[string]*view {
	theirs := func(i item) (string, string) { return i.Usage.Memory, i.Window }
	ours := func(i item) (string, string) { return i.Status.Usage.Node.Memory, i.Status.Window }
	all := map[string]*view{
		theirNodes: {expected: s.nodes, node: theirs},
		ourNodes:   {expected: s.nodes, node: ours},
		theirPods:  {expected: s.nodes * podsEach},
	}
	for path, v := range all {
		v.path = path
	}
	return all
}

// poll polls once through the API server, as kubectl does, and records the age of the data.
func (s *scene) poll(v *view) error {
	started := time.Now()
	content, err := s.Kube.Discovery().RESTClient().Get().AbsPath(v.path).DoRaw(background)
	now := time.Now()
	if err != nil {
		return err
	}
	v.took = append(v.took, float64(now.Sub(started).Microseconds())/1000)
	v.size = len(content)
	var list struct{ Items []item }
	if err := json.Unmarshal(content, &list); err != nil {
		return err
	}
	known, problem := 0, error(nil)
	for _, item := range list.Items {
		if err := v.note(item, now); err != nil {
			problem = err
			continue
		}
		known++
	}
	if known != v.expected {
		v.incomplete++
		return fmt.Errorf("the list has %d of %d objects: %v", known, v.expected, problem)
	}
	return nil
}

// note records the age of a node's data and its averaging window.
func (v *view) note(i item, now time.Time) error {
	if v.node == nil {
		return nil
	}
	memory, window := v.node(i)
	amount, err := resource.ParseQuantity(memory)
	if err != nil {
		return fmt.Errorf("memory %q: %w", memory, err)
	}
	age, err := stamp.Age(amount.Value(), now)
	if err != nil {
		return err
	}
	over, err := time.ParseDuration(window)
	if err != nil {
		return fmt.Errorf("window %q: %w", window, err)
	}
	v.ages, v.windows = append(v.ages, age.Seconds()), append(v.windows, over.Seconds())
	return nil
}

// read polls all views about once a second, at random times independent of all intervals.
func (s *scene) read(until time.Time) map[string]*view {
	views := s.views()
	for time.Now().Before(until) {
		for _, v := range views {
			if err := s.poll(v); err != nil {
				s.T.Logf("%s: %v", v.path, err)
			}
		}
		time.Sleep(time.Duration(500+rand.IntN(1000)) * time.Millisecond)
	}
	return views
}
