//go:build e2e

package suite

import (
	"strings"
	"testing"
	"time"
)

// tally is what an agent has asked of the API server, and told, up to a moment.
type tally struct {
	requests, events float64
	at               time.Time
}

// count reads it from the agent's own metrics.
func count(t *testing.T, node string) *tally {
	t.Helper()
	now := &tally{at: time.Now()}
	for name, value := range agentMetrics(t, node) {
		switch {
		case strings.HasPrefix(name, "api_requests_total{"):
			now.requests += value
		case strings.HasPrefix(name, "events_total{"):
			now.events += value
		}
	}
	return now
}

// reset makes it that of an agent that is only about to start.
func (c *tally) reset() { c.requests, c.events = 0, 0 }

// check checks whether the agent has asked for no more since then than one does that waits as it should, and this much for what
// happened on the node meanwhile.
//
// However long the API server or the controller is away: Lease, status, taint and the event at hand are each tried every ten seconds at
// most, and each of five watches (Node, NodeWatermark, pods, emergency stop, replicas of the controller) every fifteen: the time that
// a call may take. That is 4/10 + 5/15 < 3/4 a second. To begin with, or to catch up: a list and a watch of each, the Lease read
// and written, the status, the taint's two writes: less than 20.
func (c *tally) check(t *testing.T, node string, forChanges, mostEvents float64) {
	t.Helper()
	now := count(t, node)
	took := now.at.Sub(c.at)
	requests, events := now.requests-c.requests, now.events-c.events
	t.Logf("%s: %.0f requests and %.0f events in %.0f s", node, requests, events, took.Seconds())
	// Its Lease is renewed every minute; below zero it is another agent that counts.
	counts := requests > 0 || requests == 0 && took <= time.Minute
	if most := took.Seconds()*3/4 + 20 + forChanges; requests > most || !counts {
		t.Errorf("the agent of %s has asked for %.0f things in %s: at most %.0f are to be expected", node, requests, took, most)
	}
	if events > mostEvents {
		t.Errorf("the agent of %s has told of %.0f things in %s: at most %.0f are to be expected", node, events, took, mostEvents)
	}
}
