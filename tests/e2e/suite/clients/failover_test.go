//go:build e2e

package clients

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

var nodeqoss = schema.GroupVersionResource{Group: "ensurance.crane.io", Version: "v1alpha1", Resource: "nodeqoss"}

// all are clients of every kind.
func (s *scene) all() []*ledger {
	return []*ledger{
		s.informer("client-go's informer that streams", true),
		s.informer("client-go's informer that lists", false),
		s.runtimeCache(),
		s.poller("a client that lists by pages", 2),
		s.poller("a client that lists", 0),
	}
}

// edits changes a policy of all nodes continuously, so that the leader always has something to write.
func (s *scene) edits() {
	s.Apply(`{"apiVersion":"ensurance.crane.io/v1alpha1","kind":"AvoidanceAction","metadata":{"name":"close"},"spec":{}}`,
		`{"apiVersion":"ensurance.crane.io/v1alpha1","kind":"NodeQOS","metadata":{"name":"all","annotations":{"plimsoll.dev/rollout":"immediate"}},
		"spec":{"selector":{},"rules":[{"name":"cpu","avoidanceThreshold":1,"actionName":"close","metricRule":{"name":"cpu_total_usage","value":7000}}]}}`)
	running := s.running()
	go func() {
		for threshold := int64(7000); running.Err() == nil; threshold++ {
			policy, err := s.Objects.Resource(nodeqoss).Get(running, "all", v1.GetOptions{})
			if err == nil {
				rules, _, _ := unstructured.NestedSlice(policy.Object, "spec", "rules")
				_ = unstructured.SetNestedField(rules[0].(map[string]any), threshold, "metricRule", "value")
				_ = unstructured.SetNestedSlice(policy.Object, rules, "spec", "rules")
				s.Objects.Resource(nodeqoss).Update(running, policy, v1.UpdateOptions{})
			}
			time.Sleep(time.Second)
		}
	}()
}

// TestClientsStayCorrectWhenLeaderIsKilled: each client has new data of all nodes soon after the leader is killed, twice.
func TestClientsStayCorrectWhenLeaderIsKilled(t *testing.T) {
	s := open(t)
	s.edits()
	all := s.all()
	s.waitUpToDate(waitTimeout, all)
	for range 2 {
		leader, _ := s.leader()
		leader.Kill()
		// As the kubelet does.
		leader.Start()
		s.checkFailoverTime("killed: all clients", all)
		s.waitReady(leader)
	}
}

// TestClientsStayCorrectWhenLeaderTerminates: as in a rolling update, one replica after the other. No request is refused.
func TestClientsStayCorrectWhenLeaderTerminates(t *testing.T) {
	s := open(t)
	s.edits()
	all := append(s.all(), s.strictClient())
	s.waitUpToDate(waitTimeout, all)
	for range 2 {
		leader, _ := s.leader()
		if err := s.end(leader); err != nil {
			t.Errorf("%s: %v", leader.name, err)
		}
		s.checkFailoverTime("terminated: all clients", all)
		s.restart(leader)
		s.join(leader)
		s.waitEndpoint(leader, true)
	}
}

// TestClientsStayCorrectWhenLeaderIsStopped: it is stopped for at least 30 s and continued. Polling clients get new data meanwhile:
// another replica leads, and the stopped one is removed from the endpoints. A watch that the stopped process serves shows
// nothing until the process continues, since only that process can close it, and is correct then. The process writes nothing when it continues.
func TestClientsStayCorrectWhenLeaderIsStopped(t *testing.T) {
	s := open(t)
	s.edits()
	all := append(s.all(), s.rawClient("a client that polls"))
	polling := all[len(all)-2:]
	s.waitUpToDate(waitTimeout, all)
	leader, standby := s.leader()
	leader.Signal(syscall.SIGSTOP)
	stopped := time.Now()
	s.checkFailoverTime("stopped: polling clients", polling)
	time.Sleep(time.Until(stopped.Add(30 * time.Second)))
	continued := time.Now()
	leader.Signal(syscall.SIGCONT)
	s.checkFailoverTime("continued: all clients", all)
	if now, _ := s.leader(); now != standby {
		t.Errorf("%s unexpectedly leads again", now.name)
	}
	s.checkNoWrites(leader, continued)
}

// TestClientsStayCorrectWhenAPIServerRestarts: all watches break, and neither replica can renew its Lease for a while.
func TestClientsStayCorrectWhenAPIServerRestarts(t *testing.T) {
	s := open(t)
	s.edits()
	all := s.all()
	s.waitUpToDate(waitTimeout, all)
	s.Server.Kill()
	time.Sleep(5 * time.Second)
	s.Server.Start()
	s.WaitReady()
	s.logUpToDate("the API server is back: all clients", all)
}

// TestHundredInformersRelistAtOnce: each failover makes all of them list, and all stay correct.
func TestHundredInformersRelistAtOnce(t *testing.T) {
	s := open(t)
	var all []*ledger
	for index := range 100 {
		all = append(all, s.informer(fmt.Sprintf("informer %d", index), index%2 == 0))
	}
	s.waitUpToDate(waitTimeout, all)
	leader, standby := s.leader()
	before := standby.Resident()
	leader.Kill()
	leader.Start()
	s.checkFailoverTime("a hundred informers", all)
	t.Logf("the new leader's memory went from %s kB to %s kB", before, standby.Resident())
	if log := standby.Log(); strings.Contains(log, "panicked") {
		t.Error(log)
	}
}
