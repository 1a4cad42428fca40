//go:build e2e

package clients

import (
	"fmt"
	"testing"
	"time"

	"plimsoll.dev/suite/plane"
)

// TestClientsStayCorrectWhenLeaderLosesTheAPIServer: it stops leading before the other replica starts. It does not know who leads then, and
// refuses requests, so that retries reach the other replica. It still serves discovery.
func TestClientsStayCorrectWhenLeaderLosesTheAPIServer(t *testing.T) {
	s := open(t)
	s.deleteNamespaces()
	all, leader, standby := s.cutLeader(func(leader *replica) { leader.server.cut() })
	if leader.leads() || !standby.leads() {
		t.Errorf("%s leads: %t, %s leads: %t", leader.name, leader.leads(), standby.name, standby.leads())
	}
	s.waitEndpoint(leader, true)

	// Stop the other replica: there is no data, but namespaces can still be deleted.
	standby.Kill()
	s.namespace("while-cut")
	s.gone("while-cut", "the only replica is cut from the API server")
	s.apiResources()
	leader.server.restore()
	s.restart(standby)
	s.logUpToDate("restored: all clients", all)
}

// TestClientsStayCorrectWhenLeaderLosesTheAgents: the other replica relays their reports.
func TestClientsStayCorrectWhenLeaderLosesTheAgents(t *testing.T) {
	s := openWith(t, setting{directly: true})
	s.edits()
	all := append(s.all(), s.rawClient("a client that retries at once"))
	s.waitUpToDate(waitTimeout, all)
	leader, _ := s.leader()
	s.reportsArrive(leader, "stored")
	leader.reports.cut()
	s.checkFailoverTime("cut: all clients", all)
	if !leader.leads() {
		t.Errorf("%s does not lead any more", leader.name)
	}
	leader.reports.restore()
	s.reportsArrive(leader, "stored")
	s.logUpToDate("restored: all clients", all)
}

// TestReportsStayFreshWhileLeaderLosesTheAgents: also at the normal pace, at which agents renew no Lease for 25 s.
func TestReportsStayFreshWhileLeaderLosesTheAgents(t *testing.T) {
	s := openWith(t, setting{directly: true, pace: normalPace})
	all := append(s.all(), s.rawClient("a client that retries at once"))
	leader, standby := s.leader()
	s.reportsArrive(leader, "stored")
	leader.reports.cut()
	s.checkHeartbeats(4, "cut", all)
	s.reportsArrive(leader, "relayed")
	leader.reports.restore()
	s.reportsArrive(leader, "stored")
	// The same if the next leader did not receive the reports itself.
	standby.reports.cut()
	leader.Kill()
	s.Eventually(waitTimeout, standby.name+" leads", func() error {
		if !standby.leads() {
			return fmt.Errorf("it does not lead yet")
		}
		return nil
	})
	s.restart(leader)
	s.checkHeartbeats(3, "the next leader is cut off, too", all)
	if !standby.leads() {
		t.Errorf("%s does not lead", standby.name)
	}
}

// checkHeartbeats waits for this many heartbeats, and fails the test if a client gets one later than a failover may take.
func (s *scene) checkHeartbeats(count int, what string, which []*ledger) {
	s.T.Helper()
	for range count {
		next := s.agents.last() + 1
		s.Eventually(waitTimeout, "the agents send a heartbeat", func() error {
			if s.agents.last() < next {
				return fmt.Errorf("heartbeat %d has not been sent yet", next)
			}
			return nil
		})
		started := time.Now()
		for _, l := range which {
			s.Eventually(waitTimeout, "the heartbeat is shown", func() error { return l.behind(next) })
		}
		took := time.Since(started)
		s.T.Logf("%s: heartbeat %d was shown after %s", what, next, took.Round(100*time.Millisecond))
		if took > failover {
			s.T.Errorf("the failover took longer than %s", failover)
		}
	}
}

// TestClientsStayCorrectWhenLeaderIsDisconnected: from the API server and from the agents. The other replica has all reports already.
func TestClientsStayCorrectWhenLeaderIsDisconnected(t *testing.T) {
	s := openWith(t, setting{directly: true})
	for _, r := range s.replicas {
		s.reportsArrive(r, "stored")
	}
	all, leader, standby := s.cutLeader(func(leader *replica) {
		leader.server.cut()
		leader.reports.cut()
	})
	leader.server.restore()
	leader.reports.restore()
	s.waitUpToDate(waitTimeout, all)
	if now, _ := s.leader(); now != standby {
		t.Errorf("%s leads again", now.name)
	}
}

// cutLeader disconnects the leader, and waits until all clients have new data from the next one. Clients that retry at once must get it within
// the time that a failover may take.
func (s *scene) cutLeader(cut func(leader *replica)) (all []*ledger, leader, standby *replica) {
	s.T.Helper()
	s.edits()
	rawClient := s.rawClient("a client that retries at once")
	all = append(s.all(), rawClient)
	s.waitUpToDate(waitTimeout, all)
	leader, standby = s.leader()
	cut(leader)
	s.checkFailoverTime("cut: "+rawClient.name, []*ledger{rawClient})
	s.logUpToDate("cut: then all clients", all)
	return all, leader, standby
}

// reportsArrive waits until a replica has accepted more reports: from agents (stored) or from the other replica
// (relayed).
func (s *scene) reportsArrive(r *replica, how string) {
	s.T.Helper()
	accepted := func() (float64, error) {
		return plane.Metric(r.metrics, fmt.Sprintf("plimsoll_controller_reports_total{result=%q}", how))
	}
	before, err := accepted()
	if err != nil {
		s.T.Fatal(err)
	}
	s.Eventually(waitTimeout, r.name+" receives reports of the agents", func() error {
		now, err := accepted()
		if err == nil && now <= before {
			err = fmt.Errorf("still only %.0f reports were accepted", now)
		}
		return err
	})
}
