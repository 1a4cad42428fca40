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

// A ledger is what one client has been shown of the NodeMetrics. Whatever can't be right is noted as it is seen.
type ledger struct {
	name   string
	agents *agents
	lock   sync.Mutex
	// By node: the version and the heartbeat that were shown last.
	versions map[string]uint64
	beats    map[string]int64
	wrong    []string
	// refusals counts what the client was refused, by why.
	refusals map[string]int
}

func (s *scene) ledger(name string) *ledger {
	l := &ledger{name: name, agents: s.agents, versions: map[string]uint64{}, beats: map[string]int64{}}
	s.ledgers = append(s.ledgers, l)
	return l
}

func (l *ledger) complain(format string, args ...any) {
	l.wrong = append(l.wrong, time.Now().Format("15:04:05.000 ")+fmt.Sprintf(format, args...))
}

// saw notes an object as it was shown.
func (l *ledger) saw(object *unstructured.Unstructured) {
	l.lock.Lock()
	defer l.lock.Unlock()
	name := object.GetName()
	version, err := strconv.ParseUint(object.GetResourceVersion(), 10, 64)
	if before := l.versions[name]; err != nil || version < before {
		l.complain("%s: version %q after %d", name, object.GetResourceVersion(), before)
	}
	l.versions[name] = version
	beat, err := l.agents.verify(object)
	if err != nil {
		l.complain("%s at %d: %v", name, version, err)
		return
	}
	if before := l.beats[name]; beat < before {
		l.complain("%s: heartbeat %d after %d", name, beat, before)
	}
	l.beats[name] = beat
}

// refused notes that the client was: that may be, for a while.
func (l *ledger) refused(why error) {
	l.lock.Lock()
	defer l.lock.Unlock()
	if l.refusals == nil {
		l.refusals = map[string]int{}
	}
	l.refusals[why.Error()]++
}

// mayNotBe notes that the client was refused where it may not be.
func (l *ledger) mayNotBe(refused error) {
	l.lock.Lock()
	defer l.lock.Unlock()
	l.complain("refused: %v", refused)
}

// gone notes that a node was shown as absent: none is.
func (l *ledger) gone(name string) {
	l.lock.Lock()
	defer l.lock.Unlock()
	l.complain("%s is shown as absent", name)
}

// listed notes a list as it was shown, all pages of it.
func (l *ledger) listed(items []unstructured.Unstructured) {
	here := map[string]bool{}
	for index := range items {
		here[items[index].GetName()] = true
		l.saw(&items[index])
	}
	for _, node := range l.agents.nodes {
		if !here[node] {
			l.gone(node)
		}
	}
}

// behind says which node this client has not been shown a heartbeat of that is as new as this.
func (l *ledger) behind(beat int64) error {
	l.lock.Lock()
	defer l.lock.Unlock()
	for _, node := range l.agents.nodes {
		if l.beats[node] < beat {
			return fmt.Errorf("%s: knows %v, not yet %d", l.name, maps.Clone(l.beats), beat)
		}
	}
	return nil
}

// verdict is what was wrong so far.
func (l *ledger) verdict() []string {
	l.lock.Lock()
	defer l.lock.Unlock()
	return l.wrong
}
