//go:build e2e

package suite

import (
	"strings"
	"testing"
	"time"
)

// tally has an agent's counts of API requests and events at a point in time.
type tally struct {
	requests, events float64
	at               time.Time
}

// count reads a tally from the agent's metrics.
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

// reset zeroes the counts, for an agent that is about to start.
func (c *tally) reset() { c.requests, c.events = 0, 0 }

// check fails the test if the agent has sent more requests since then than its retry intervals allow, plus forChanges for
// changes on the node meanwhile, or has written more events than maxEvents.
//
// During an outage Lease, status, taint and the current event are each retried at most every ten seconds,
// and each of five watches (Node, NodeWatermark, pods, emergency stop, replicas of the controller) every fifteen: the timeout of
// a request. That is 4/10 + 5/15 < 3/4 a second. To start or to catch up, an agent needs a list and a watch of each, a read
// and a write of the Lease, the status, and two writes for the taint: less than 20.
func (c *tally) check(t *testing.T, node string, forChanges, maxEvents float64) {
	t.Helper()
	now := count(t, node)
	took := now.at.Sub(c.at)
	requests, events := now.requests-c.requests, now.events-c.events
	t.Logf("%s: %.0f requests and %.0f events in %.0f s", node, requests, events, took.Seconds())
	// The Lease is renewed every minute; a negative difference means that the agent was restarted.
	plausible := requests > 0 || requests == 0 && took <= time.Minute
	if maxRequests := took.Seconds()*3/4 + 20 + forChanges; requests > maxRequests || !plausible {
		t.Errorf("the agent of %s has sent %.0f requests in %s: at most %.0f are expected", node, requests, took, maxRequests)
	}
	if events > maxEvents {
		t.Errorf("the agent of %s has written %.0f events in %s: at most %.0f are expected", node, events, took, maxEvents)
	}
}
