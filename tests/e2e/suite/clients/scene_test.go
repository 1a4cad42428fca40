//go:build e2e

// Package clients tests the API metrics.plimsoll.dev with third-party clients: client-go's informers, controller-runtime's
// cache, kubectl. The API server and two replicas of the controller are real; the test simulates nodes and agents.
package clients

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"plimsoll.dev/suite/plane"
)

const (
	service     = "plimsoll-metrics"
	lease       = "plimsoll-controller"
	waitTimeout = 2 * time.Minute
	// The longest time until a client has new data after the leader was lost.
	failover = 10 * time.Second
)

// A scene is a control plane with two replicas, the agents of some nodes, and the ledgers of clients.
type scene struct {
	*plane.Plane
	pki       string
	authority *plane.Authority
	// controller is the chart's container, host the address of all endpoints.
	controller corev1.Container
	host       string
	replicas   []*replica
	agents     *agents
	ledgers    []*ledger
}

// A replica is a controller; its name is also its API user.
type replica struct {
	*plane.Process
	name                 string
	api, metrics, report int
	// The replica's connection to the API server, and the agents' connections to the replica. Both can be cut.
	server, reports *proxy
	leave           func()
}

// A setting has a scene's deviations from the default.
type setting struct {
	// directly: agents send reports, not only Lease renewals.
	directly bool
	// issued: cert-manager issues the replicas' certificate instead of the replicas.
	issued bool
	// ahead is how far the first replica's wall clock is ahead.
	ahead time.Duration
	// pace is how often agents send heartbeats; by default the fast one.
	pace pace
	// flags are additional flags of both replicas.
	flags []string
}

// open sets up a scene in which the load of all nodes is served.
func open(t *testing.T) *scene { return openWith(t, setting{}) }

// openWith does the same with a setting.
func openWith(t *testing.T, with setting) *scene {
	s := &scene{pki: t.TempDir(), host: plane.Host(t)}
	if with.pace == (pace{}) {
		with.pace = fastPace
	}
	s.Plane = plane.Start(t, s.flags(t), "first", "second")
	s.controller = s.container()
	s.agents = startAgents(s.Plane, 6, with.pace)
	if with.issued {
		s.install()
	} else {
		s.Aggregate("metrics.plimsoll.dev", "v1alpha1", service)
	}
	s.startReplica("first", with)
	with.ahead = 0
	s.startReplica("second", with)
	if with.directly {
		s.agents.startReports(s.replicas)
	}
	s.agents.report()
	s.Eventually(waitTimeout, "the load of all nodes is served", func() error {
		l := s.uncheckedLedger("before")
		list, err := s.list(0)
		if err != nil {
			return err
		}
		l.listed(list)
		if wrong := l.inconsistencies(); len(wrong) > 0 {
			return fmt.Errorf("%s", strings.Join(wrong, "; "))
		}
		return nil
	})
	// Discovery follows shortly after.
	s.Eventually(waitTimeout, "clients discover the API", func() error {
		_, err := s.TryKubectl("", "get", "nodemetrics", "--cache-dir="+t.TempDir())
		return err
	})
	t.Cleanup(s.checkLedgers)
	return s
}

// checkLedgers fails the test if a client saw an inconsistency.
func (s *scene) checkLedgers() {
	for _, l := range s.ledgers {
		for why, times := range l.refusals {
			s.T.Logf("%s was refused %d times: %s", l.name, times, why)
		}
		if wrong := l.inconsistencies(); len(wrong) > 0 {
			s.T.Errorf("%s got inconsistent data %d times:\n%s", l.name, len(wrong), strings.Join(wrong[:min(len(wrong), 5)], "\n"))
		}
	}
	s.checkSingleWriter()
}

// secret replaces one of the API server's files for the aggregation layer.
func (s *scene) secret(name, content string) {
	s.T.Helper()
	plane.WriteFile(s.T, filepath.Join(s.pki, name), content)
}

// flags are the API server's flags for the aggregation layer and for auditing writes.
func (s *scene) flags(t *testing.T) []string {
	s.authority = plane.NewAuthority(t, "front-proxy-ca")
	return append(plane.AggregationFlags(t, s.pki, s.authority),
		"--audit-log-path="+filepath.Join(s.pki, "audit.log"),
		"--audit-policy-file="+plane.WriteFile(t, filepath.Join(s.pki, "audit.json"), `{"apiVersion":"audit.k8s.io/v1","kind":"Policy","omitStages":["RequestReceived"],"rules":[
			{"level":"Metadata","users":["first","second"],"verbs":["create","update","patch","delete"]},{"level":"None"}]}`))
}

// startReplica starts a replica.
func (s *scene) startReplica(name string, with setting) {
	r := &replica{name: name, api: plane.FreePort(s.T), metrics: plane.FreePort(s.T)}
	r.server = newProxy(s.T, strings.TrimPrefix(s.Address, "https://"))
	flags := append([]string{"--listen", fmt.Sprintf("127.0.0.1:%d", r.metrics),
		"--metrics-api-listen", fmt.Sprintf("0.0.0.0:%d", r.api), "--pod-ip", "127.0.0.1"}, with.flags...)
	if with.directly {
		r.report = plane.FreePort(s.T)
		r.reports = newProxy(s.T, fmt.Sprintf("127.0.0.1:%d", r.report))
		flags = append(flags, "--report-listen", fmt.Sprintf("0.0.0.0:%d", r.report))
	}
	if with.issued {
		m := s.mountSecret(secret, lag*time.Duration(len(s.replicas)))
		flags = append(flags, "--tls-cert-file", m.file("tls.crt"),
			"--tls-private-key-file", m.file("tls.key"), "--tls-ca-file", m.file("ca.crt"))
	}
	r.Process = s.ControllerWith(s.KubeconfigAt(name, "https://"+r.server.address), with.ahead, flags...)
	s.replicas = append(s.replicas, r)
	s.join(r)
}

func (r *replica) leads() bool {
	leads, err := plane.Metric(r.metrics, "plimsoll_controller_leader")
	return err == nil && leads > 0
}

// leader returns the leading replica and the standby.
func (s *scene) leader() (*replica, *replica) {
	s.T.Helper()
	var leader *replica
	s.Eventually(waitTimeout, "one replica leads", func() error {
		a, b := s.replicas[0].leads(), s.replicas[1].leads()
		if a == b {
			return fmt.Errorf("the first leads: %t, the second: %t", a, b)
		}
		leader = s.replicas[1]
		if a {
			leader = s.replicas[0]
		}
		return nil
	})
	if leader == s.replicas[0] {
		return leader, s.replicas[1]
	}
	return leader, s.replicas[0]
}

// restart restarts a replica, and waits until it is ready.
func (s *scene) restart(r *replica) {
	s.T.Helper()
	r.Start()
	s.waitReady(r)
}

// waitReady waits until a replica is ready.
func (s *scene) waitReady(r *replica) {
	s.T.Helper()
	s.Eventually(waitTimeout, r.name+" is ready", func() error { return get(plane.Local("http", r.metrics) + "/readyz") })
}

// waitUpToDate waits until every client has new data of all nodes, and returns how long that took and which was the last.
func (s *scene) waitUpToDate(limit time.Duration, which []*ledger) (time.Duration, *ledger) {
	s.T.Helper()
	// The next heartbeat may have been sent already.
	started, beat := time.Now(), s.agents.last()+2
	var last *ledger
	for {
		var late error
		for _, l := range which {
			if err := l.behind(beat); err != nil {
				late, last = err, l
			}
		}
		if late == nil {
			return time.Since(started), last
		}
		if time.Since(started) > limit {
			s.T.Fatalf("clients were not up to date within %s: %v", limit, late)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// checkFailoverTime waits until every client is up to date, and fails the test if that takes longer than a failover may take.
func (s *scene) checkFailoverTime(what string, which []*ledger) {
	s.T.Helper()
	if took := s.logUpToDate(what, which); took > failover {
		s.T.Errorf("%s: that is more than %s", what, failover)
	}
}

// logUpToDate waits until every client is up to date, and logs how long it took.
func (s *scene) logUpToDate(what string, which []*ledger) time.Duration {
	s.T.Helper()
	took, last := s.waitUpToDate(waitTimeout, which)
	s.T.Logf("%s: new data after %s, %s last", what, took.Round(100*time.Millisecond), last.name)
	return took
}

// written are the successful writes of the replicas, according to the audit log.
func (s *scene) written() []plane.AuditEvent {
	all, err := plane.AuditLog(filepath.Join(s.pki, "audit.log"))
	if err != nil {
		s.T.Fatal(err)
	}
	return slices.DeleteFunc(all, func(event plane.AuditEvent) bool { return event.ResponseStatus.Code >= 300 })
}

// checkNoWrites fails the test if this replica, which does not lead, has written anything since then.
func (s *scene) checkNoWrites(r *replica, since time.Time) {
	s.T.Helper()
	for _, write := range s.written() {
		of := write.ObjectRef
		if write.User.Username == r.name && write.RequestReceivedTimestamp.After(since) && !strings.HasSuffix(of.Resource, "reviews") {
			s.T.Errorf("%s, which does not lead, did %s %s/%s at %s", r.name, write.Verb, of.Resource, of.Name,
				write.RequestReceivedTimestamp.Format("15:04:05.000"))
		}
	}
}

// writes returns the Lease writes, and the writes to the leader's objects.
func (s *scene) writes() (taken, written []plane.AuditEvent) {
	for _, r := range s.written() {
		switch of := r.ObjectRef; {
		case of.Resource == "leases" && of.Name == lease:
			taken = append(taken, r)
		case of.Resource == "nodewatermarks", of.APIGroup == "ensurance.crane.io", of.Resource == "nodes":
			written = append(written, r)
		}
	}
	return taken, written
}

// checkSingleWriter fails the test if a replica wrote to the leader's objects after another had acquired the
// Lease.
func (s *scene) checkSingleWriter() {
	taken, written := s.writes()
	writers := map[string]int{}
	for _, write := range written {
		holder := ""
		for _, take := range taken {
			if take.StageTimestamp.Before(write.RequestReceivedTimestamp) {
				holder = take.User.Username
			}
		}
		writers[write.User.Username]++
		if holder != write.User.Username {
			s.T.Errorf("%s wrote %s/%s at %s: the Lease was %s's", write.User.Username, write.ObjectRef.Resource, write.ObjectRef.Name,
				write.RequestReceivedTimestamp.Format("15:04:05.000"), holder)
		}
	}
	s.T.Logf("writes by replica: %v; writes of the Lease: %d", writers, len(taken))
	if len(written) == 0 || len(taken) == 0 {
		s.T.Error("the audit log shows no writes")
	}
}
