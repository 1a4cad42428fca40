//go:build e2e

package placement

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"sync"
	"time"

	"golang.org/x/time/rate"
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

// rounded is the number of the label for a load: rounded up to 5, at most 100.
func rounded(load int) int { return min(100, (load+4)/5*5) }

// An agent writes the label of one node: of three writes at a time the last is for a node that becomes full, and then one in 5 s.
type agent struct {
	written int
	// since is when the label began to differ from the load; zero if it does not.
	since  time.Time
	writes *rate.Limiter
}

// isDue reports whether the agent writes the label for this load now: at once when the load has risen by 10 or the node becomes full; else after 10 s.
// If every step of 5 were written at once, nodes that hardly differ would get different scores, and the last node of a step would get all pods of a
// second.
func (a *agent) isDue(now time.Time, load int) bool {
	if max(60, load) == max(60, a.written) {
		a.since = time.Time{}
		return false
	}
	if a.since.IsZero() {
		a.since = now
	}
	becomesFull := load >= busyFrom && a.written < busyFrom
	// Up to 60 all loads count alike. That a load falls is not part of these scenes.
	urgent := load >= max(60, a.written)+10
	if !becomesFull && !urgent && now.Sub(a.since) < 10*time.Second {
		return false
	}
	if !becomesFull && a.writes.TokensAt(now) < 2 || !a.writes.AllowN(now, 1) {
		return false
	}
	a.written, a.since = load, time.Time{}
	return true
}

// writer starts a writer, which works until stop.
func (s *scene) writer(delay time.Duration) *writer {
	running, end := context.WithCancel(background)
	w := &writer{scene: s, end: end}
	w.ended.Go(func() {
		agents := map[string]*agent{}
		for _, each := range s.nodes {
			load, _ := strconv.Atoi(each.load)
			agents[each.name] = &agent{written: load, writes: rate.NewLimiter(rate.Every(5*time.Second), 3)}
		}
		for running.Err() == nil {
			found, err := s.bindings()
			if err != nil {
				continue
			}
			for name, load := range s.loads(found) {
				if load = rounded(load); agents[name].isDue(time.Now(), load) {
					w.ended.Go(func() {
						time.Sleep(delay)
						s.setLoad(name, strconv.Itoa(load))
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
	pods  int
	// rate is pods per second; 0: at once.
	rate  int
	delay time.Duration
}

func (s stream) String() string {
	rate := "at once"
	if s.rate > 0 {
		rate = fmt.Sprintf("%d/s", s.rate)
	}
	return fmt.Sprintf("%s, %d pods %s, label %s late", s.what, s.pods, rate, s.delay)
}

// run creates the pods, and returns how many are on each node.
func (s stream) run(in *scene) placed {
	writer := in.writer(s.delay)
	defer writer.stop()
	if s.rate == 0 {
		return in.burst(s.pods, small)
	}
	started := time.Now()
	for i := range s.pods {
		time.Sleep(time.Until(started.Add(time.Duration(i) * time.Second / time.Duration(s.rate))))
		in.createPod(in.pod(small))
	}
	return in.untilBound()
}

// streamsFollowTheLabel: the best node gets at most its fair share, and the pods that are created before its label changes. All nodes up to 60
// have the same score, so an idle node among them gets as many pods as the others: of a burst at most half more, also without the label.
func streamsFollowTheLabel(c *cluster, as way) {
	if as.tainted {
		return
	}
	idle := append(some(19, node{name: "other", load: "60"}), node{name: "best", load: "0"})
	cool := append(some(19, node{name: "other", load: "80"}), node{name: "best", load: "60"})
	hundred := append(some(99, node{name: "other", load: "60"}), node{name: "best", load: "0"})
	for _, each := range []stream{
		{"one node at 0, 19 at 60", idle, 100, 0, time.Second},
		{"one node at 0, 19 at 60", idle, 100, 20, time.Second},
		{"one node at 0, 99 at 60", hundred, 500, 0, time.Second},
		{"one node at 0, 99 at 60", hundred, 500, 20, time.Second},
		{"one node at 60, 19 at 80", cool, 100, 0, time.Second},
		{"one node at 60, 19 at 80", cool, 100, 10, time.Second},
		{"one node at 60, 19 at 80", cool, 100, 20, time.Second},
		{"one node at 60, 19 at 80", cool, 100, 20, 200 * time.Millisecond},
	} {
		if as != byLabel && each.rate > 0 {
			continue // the policy and the second scheduler give the same results
		}
		c.scene(as, func(s *scene) {
			found := each.run(s)
			loads, highest := s.loads(found), 0
			for _, load := range loads {
				highest = max(highest, load)
			}
			planned, share := plan(each.nodes, each.pods)
			s.T.Logf("%s: %d on the best node (load %d), highest load %d, planned %d", each, found["best"], loads["best"], highest, planned)
			if even := each.pods / len(each.nodes); each.rate == 0 && each.nodes[0].load == "60" && found["best"]*2 > even*3 {
				s.T.Errorf("the idle node gets %d of the burst, more than 1.5 x an even share of %d", found["best"], even)
			}
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
