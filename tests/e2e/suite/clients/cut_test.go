//go:build e2e

package clients

import (
	"fmt"
	"testing"

	"plimsoll.dev/suite/plane"
)

// TestClientsStayRightWhenTheLeaderIsCutFromTheAPIServer: it stops leading before another begins. It can't see who leads, and refuses
// whoever API servers send to it: who asks again finds the other. It goes on answering what every replica knows.
func TestClientsStayRightWhenTheLeaderIsCutFromTheAPIServer(t *testing.T) {
	s := open(t)
	s.deletesNamespaces()
	all, leader, standby := s.leaderIsCut(func(leader *replica) { leader.server.cut() })
	if leader.leads() || !standby.leads() {
		t.Errorf("%s leads: %t, %s leads: %t", leader.name, leader.leads(), standby.name, standby.leads())
	}
	s.isEndpoint(leader, true)

	// The other ends: nobody has data, and no namespace waits for that.
	standby.Kill()
	s.namespace("while-cut")
	s.gone("while-cut", "the only replica is cut from the API server")
	s.apiResources()
	leader.server.mend()
	s.again(standby)
	s.knowSoon("mended: all clients", all)
}

// TestClientsStayRightWhenTheLeaderIsCutFromTheAgents: the agents then renew their Leases, of which the leader hears by the API server.
func TestClientsStayRightWhenTheLeaderIsCutFromTheAgents(t *testing.T) {
	s := openWith(t, setting{directly: true})
	s.edits()
	all := append(s.all(), s.asker("a client that asks again at once"))
	s.allKnow(soon, all)
	leader, _ := s.leader()
	s.reportsArrive(leader)
	leader.reports.cut()
	s.knowSoon(fmt.Sprintf("cut from agents that wait %s for the leader, and whose reports hold for %s: all clients", unheard, 3*interval), all)
	if !leader.leads() {
		t.Errorf("%s does not lead any more", leader.name)
	}
	leader.reports.mend()
	s.reportsArrive(leader)
	s.knowSoon("mended: all clients", all)
}

// TestClientsStayRightWhenTheLeaderIsCutFromAll: from the API server and from the agents. The other has all reports already.
func TestClientsStayRightWhenTheLeaderIsCutFromAll(t *testing.T) {
	s := openWith(t, setting{directly: true})
	for _, r := range s.replicas {
		s.reportsArrive(r)
	}
	all, leader, standby := s.leaderIsCut(func(leader *replica) {
		leader.server.cut()
		leader.reports.cut()
	})
	leader.server.mend()
	leader.reports.mend()
	s.allKnow(soon, all)
	if now, _ := s.leader(); now != standby {
		t.Errorf("%s leads again", now.name)
	}
}

// leaderIsCut waits until all clients have new data from the next leader: who asks again at once has some in time.
func (s *scene) leaderIsCut(cut func(leader *replica)) (all []*ledger, leader, standby *replica) {
	s.T.Helper()
	s.edits()
	asker := s.asker("a client that asks again at once")
	all = append(s.all(), asker)
	s.allKnow(soon, all)
	leader, standby = s.leader()
	cut(leader)
	s.knowInTime("cut: "+asker.name, []*ledger{asker})
	s.knowSoon("cut: then all clients", all)
	return all, leader, standby
}

// reportsArrive waits until a replica has taken more reports than now.
func (s *scene) reportsArrive(r *replica) {
	s.T.Helper()
	taken := func() (float64, error) {
		return plane.Metric(r.metrics, `plimsoll_controller_reports_total{result="stored"}`)
	}
	before, err := taken()
	if err != nil {
		s.T.Fatal(err)
	}
	s.Eventually(soon, r.name+" hears of the agents", func() error {
		now, err := taken()
		if err == nil && now <= before {
			err = fmt.Errorf("%.0f reports were taken, as before", now)
		}
		return err
	})
}
