//go:build e2e

package placement

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"sync"
	"time"
)

// podLoad is what each pod adds to the load of its node.
const podLoad = 3

// A writer updates the load signs of the scene's nodes as pods are bound, with a delay, as agents would.
type writer struct {
	*scene
	end   context.CancelFunc
	ended sync.WaitGroup
}

// loads are the true loads of the nodes.
func (s *scene) loads(found placed) map[string]int {
	loads := map[string]int{}
	for _, each := range s.nodes {
		load, _ := strconv.Atoi(each.load)
		loads[each.name] = load + podLoad*found[each.name]
	}
	return loads
}

// label is the text of the label for a load: rounded up to 5, at most 100.
func label(load int) string { return strconv.Itoa(min(100, (load+4)/5*5)) }

// isDue reports whether an agent writes a change of its label at once: when the load has risen by 10, and when the soft taint is added or
// removed. If every step of 5 were written at once, nodes that hardly differ would get different scores, and the last node of a step would get all pods
// of a second.
func isDue(written, text string) bool {
	before, _ := strconv.Atoi(written)
	now, _ := strconv.Atoi(text)
	return now >= before+10 || (now >= busyFrom) != (before >= busyFrom)
}

// writer starts a writer, which works until stop.
func (s *scene) writer(delay time.Duration) *writer {
	running, end := context.WithCancel(background)
	w := &writer{scene: s, end: end}
	w.ended.Go(func() {
		written := map[string]string{}
		for _, each := range s.nodes {
			written[each.name] = each.load
		}
		for running.Err() == nil {
			found, err := s.bindings()
			if err != nil {
				continue
			}
			for name, load := range s.loads(found) {
				if text := label(load); isDue(written[name], text) {
					written[name] = text
					w.ended.Go(func() {
						time.Sleep(delay)
						s.setLoad(name, text)
					})
				}
			}
			time.Sleep(20 * time.Millisecond)
		}
	})
	return w
}

func (w *writer) stop() {
	w.end()
	w.ended.Wait()
}

// plan places pods one after the other on the least loaded node. It returns the highest load of a node afterwards, and the number of pods on
// the best one.
func plan(nodes []node, pods int) (highest, onBest int) {
	s := scene{nodes: nodes}
	found := placed{}
	for range pods {
		lowest, name := math.MaxInt, ""
		for each, load := range s.loads(found) {
			if load < lowest {
				lowest, name = load, each
			}
		}
		found[name]++
	}
	for _, load := range s.loads(found) {
		highest = max(highest, load)
	}
	return highest, found["best"]
}

// A stream is pods that are created at a rate, while the nodes' load signs are written with a delay.
type stream struct {
	what  string
	nodes []node
	// rate is pods per second; 0: at once.
	rate  int
	delay time.Duration
}

func (s stream) String() string {
	rate := "at once"
	if s.rate > 0 {
		rate = fmt.Sprintf("%d/s", s.rate)
	}
	return fmt.Sprintf("%s, pods %s, label %s late", s.what, rate, s.delay)
}

// run creates the pods, and returns how many are on each node.
func (s stream) run(in *scene, pods int) placed {
	writer := in.writer(s.delay)
	defer writer.stop()
	if s.rate == 0 {
		return in.burst(pods, small)
	}
	started := time.Now()
	for i := range pods {
		time.Sleep(time.Until(started.Add(time.Duration(i) * time.Second / time.Duration(s.rate))))
		in.createPod(in.pod(small))
	}
	return in.untilBound()
}

// streamsFollowTheLabel: the best node gets at most its fair share, and the pods that are created before its label changes. All nodes up to 60
// have the same score, so an idle node among them gets only its fair share.
func streamsFollowTheLabel(c *cluster, as way) {
	if as.tainted {
		return
	}
	idle := append(some(19, node{name: "other", load: "60"}), node{name: "best", load: "0"})
	cool := append(some(19, node{name: "other", load: "80"}), node{name: "best", load: "60"})
	for _, each := range []stream{
		{"one node at 0, 19 at 60", idle, 0, time.Second},
		{"one node at 0, 19 at 60", idle, 20, time.Second},
		{"one node at 60, 19 at 80", cool, 0, time.Second},
		{"one node at 60, 19 at 80", cool, 10, time.Second},
		{"one node at 60, 19 at 80", cool, 20, time.Second},
		{"one node at 60, 19 at 80", cool, 20, 200 * time.Millisecond},
	} {
		if as != byLabel && each.rate > 0 {
			continue // the policy and the second scheduler give the same results
		}
		c.scene(as, func(s *scene) {
			const pods = 100
			found := each.run(s, pods)
			loads, highest := s.loads(found), 0
			for _, load := range loads {
				highest = max(highest, load)
			}
			planned, share := plan(each.nodes, pods)
			s.T.Logf("%s: %d of %d pods on the best node (load %d), highest load %d, planned %d", each, found["best"], pods, loads["best"], highest, planned)
			if each.nodes[0].load == "60" && highest > planned+8 {
				s.T.Errorf("the load of a node is %d above the plan", highest-planned)
			}
			// The writer needs some milliseconds for each node, too.
			created := float64(each.rate) * (each.delay.Seconds() + 0.3)
			if each.rate > 0 && found["best"] > share+int(created) {
				s.T.Errorf("the best node has %d pods, more than its share of %d and %.0f created before the label changes", found["best"], share, created)
			}
		}, each.nodes)
	}
}
