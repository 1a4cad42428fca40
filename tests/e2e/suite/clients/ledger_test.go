//go:build e2e

package clients

import (
	"fmt"
	"maps"
	"strconv"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// A ledger records the NodeMetrics that one client got, and any inconsistency.
type ledger struct {
	name   string
	agents *agents
	lock   sync.Mutex
	// By node: the last resource version and heartbeat.
	versions map[string]uint64
	beats    map[string]int64
	wrong    []string
	// refusals counts failed requests by message.
	refusals map[string]int
}

func (s *scene) ledger(name string) *ledger {
	l := &ledger{name: name, agents: s.agents, versions: map[string]uint64{}, beats: map[string]int64{}}
	s.ledgers = append(s.ledgers, l)
	return l
}

func (l *ledger) addInconsistency(format string, args ...any) {
	l.wrong = append(l.wrong, time.Now().Format("15:04:05.000 ")+fmt.Sprintf(format, args...))
}

// observe records an object that the client got.
func (l *ledger) observe(object *unstructured.Unstructured) {
	l.lock.Lock()
	defer l.lock.Unlock()
	name := object.GetName()
	version, err := strconv.ParseUint(object.GetResourceVersion(), 10, 64)
	if before := l.versions[name]; err != nil || version < before {
		l.addInconsistency("%s: version %q after %d", name, object.GetResourceVersion(), before)
	}
	l.versions[name] = version
	beat, err := l.agents.verify(object)
	if err != nil {
		l.addInconsistency("%s at %d: %v", name, version, err)
		return
	}
	if before := l.beats[name]; beat < before {
		l.addInconsistency("%s: heartbeat %d after %d", name, beat, before)
	}
	l.beats[name] = beat
}

// refused records a failed request where failures are allowed.
func (l *ledger) refused(why error) {
	l.lock.Lock()
	defer l.lock.Unlock()
	if l.refusals == nil {
		l.refusals = map[string]int{}
	}
	l.refusals[why.Error()]++
}

// unexpected records a failed request where none may fail.
func (l *ledger) unexpected(err error) {
	l.lock.Lock()
	defer l.lock.Unlock()
	l.addInconsistency("failed: %v", err)
}

// gone records that a node was reported as deleted, which is always wrong.
func (l *ledger) gone(name string) {
	l.lock.Lock()
	defer l.lock.Unlock()
	l.addInconsistency("%s is shown as absent", name)
}

// listed records a complete list.
func (l *ledger) listed(items []unstructured.Unstructured) {
	present := map[string]bool{}
	for index := range items {
		present[items[index].GetName()] = true
		l.observe(&items[index])
	}
	for _, node := range l.agents.nodes {
		if !present[node] {
			l.gone(node)
		}
	}
}

// behind returns an error if the client does not have this heartbeat of each node yet.
func (l *ledger) behind(beat int64) error {
	l.lock.Lock()
	defer l.lock.Unlock()
	for _, node := range l.agents.nodes {
		if l.beats[node] < beat {
			return fmt.Errorf("%s: has heartbeats %v, not yet %d", l.name, maps.Clone(l.beats), beat)
		}
	}
	return nil
}

// inconsistencies returns the inconsistencies so far.
func (l *ledger) inconsistencies() []string {
	l.lock.Lock()
	defer l.lock.Unlock()
	return l.wrong
}
