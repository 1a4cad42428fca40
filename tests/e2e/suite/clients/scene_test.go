//go:build e2e

// Package clients shows the API metrics.plimsoll.dev by clients that nobody here wrote: client-go's informers, controller-runtime's
// cache, kubectl. The API server and two replicas of the controller are real; nodes are objects, and the test acts for their agents.
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
	service = "plimsoll-metrics"
	lease   = "plimsoll-controller"
	soon    = 2 * time.Minute
	// A client has new data so long after a leader was lost, at the latest.
	failover = 10 * time.Second
)

// A scene is a control plane with two replicas and the agents of some nodes, and all that clients were shown.
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

// A replica is a controller; its name is also that of its user.
type replica struct {
	*plane.Process
	name                 string
	api, metrics, report int
	// The ways to it: of what it asks the API server, and of what agents report.
	server, reports *wire
	leave           func()
}

// A setting is how a scene differs from the usual one.
type setting struct {
	// directly: agents report, rather than renewing their Leases alone.
	directly bool
	// issued: cert-manager makes the certificate of the replicas, rather than these themselves.
	issued bool
	// ahead is by how much the first replica's wall clock is.
	ahead time.Duration
	// pace is that of the agents; none: they are quick.
	pace pace
	// flags are more of those that both replicas have.
	flags []string
}

// open sets it up, with the load of all nodes served.
func open(t *testing.T) *scene { return openWith(t, setting{}) }

// openWith does so otherwise.
func openWith(t *testing.T, with setting) *scene {
	s := &scene{pki: t.TempDir(), host: plane.Host(t)}
	if with.pace == (pace{}) {
		with.pace = quick
	}
	s.Plane = plane.Start(t, s.flags(t), "first", "second")
	s.controller = s.container()
	s.agents = begin(s.Plane, 6, with.pace)
	if with.issued {
		s.install()
	} else {
		s.Aggregate("metrics.plimsoll.dev", "v1alpha1", service)
	}
	s.begin("first", with)
	with.ahead = 0
	s.begin("second", with)
	if with.directly {
		s.agents.reportTo(s.replicas)
	}
	s.agents.report()
	s.Eventually(soon, "the load of all nodes is served", func() error {
		l := s.untold("before")
		list, err := s.list(0)
		if err != nil {
			return err
		}
		l.listed(list)
		if wrong := l.verdict(); len(wrong) > 0 {
			return fmt.Errorf("%s", strings.Join(wrong, "; "))
		}
		return nil
	})
	// Discovery follows a moment later.
	s.Eventually(soon, "kubectl and others find the API", func() error {
		_, err := s.TryKubectl("", "get", "nodemetrics", "--cache-dir="+t.TempDir())
		return err
	})
	t.Cleanup(s.judge)
	return s
}

// judge fails the test for whatever was shown to any client and can't be right.
func (s *scene) judge() {
	for _, l := range s.ledgers {
		for why, times := range l.refusals {
			s.T.Logf("%s was refused %d times: %s", l.name, times, why)
		}
		if wrong := l.verdict(); len(wrong) > 0 {
			s.T.Errorf("%s was shown %d times what can't be right:\n%s", l.name, len(wrong), strings.Join(wrong[:min(len(wrong), 5)], "\n"))
		}
	}
	s.oneWriterAtAnyTime()
}

// secret replaces one of the files by which the API server passes requests on.
func (s *scene) secret(name, content string) {
	s.T.Helper()
	plane.WriteFile(s.T, filepath.Join(s.pki, name), content)
}

// flags are those by which an API server passes requests on, and tells of every write.
func (s *scene) flags(t *testing.T) []string {
	s.authority = plane.NewAuthority(t, "front-proxy-ca")
	return append(plane.Aggregation(t, s.pki, s.authority),
		"--audit-log-path="+filepath.Join(s.pki, "audit.log"),
		"--audit-policy-file="+plane.WriteFile(t, filepath.Join(s.pki, "audit.json"), `{"apiVersion":"audit.k8s.io/v1","kind":"Policy","omitStages":["RequestReceived"],"rules":[
			{"level":"Metadata","users":["first","second"],"verbs":["create","update","patch","delete"]},{"level":"None"}]}`))
}

// begin starts a replica.
func (s *scene) begin(name string, with setting) {
	r := &replica{name: name, api: plane.FreePort(s.T), metrics: plane.FreePort(s.T)}
	r.server = newWire(s.T, strings.TrimPrefix(s.Address, "https://"))
	flags := append([]string{"--listen", fmt.Sprintf("127.0.0.1:%d", r.metrics),
		"--metrics-api-listen", fmt.Sprintf("0.0.0.0:%d", r.api), "--pod-ip", "127.0.0.1"}, with.flags...)
	if with.directly {
		r.report = plane.FreePort(s.T)
		r.reports = newWire(s.T, fmt.Sprintf("127.0.0.1:%d", r.report))
		flags = append(flags, "--report-listen", fmt.Sprintf("0.0.0.0:%d", r.report))
	}
	if with.issued {
		m := s.mounts(secret, lag*time.Duration(len(s.replicas)))
		flags = append(flags, "--tls-cert-file", m.file("tls.crt"),
			"--tls-private-key-file", m.file("tls.key"), "--tls-ca-file", m.file("ca.crt"))
	}
	r.Process = s.ControllerBy(s.KubeconfigAt(name, "https://"+r.server.address), with.ahead, flags...)
	s.replicas = append(s.replicas, r)
	s.join(r)
}

func (r *replica) leads() bool {
	leads, err := plane.Metric(r.metrics, "plimsoll_controller_leader")
	return err == nil && leads > 0
}

// leader is the replica that leads, and the one that does not.
func (s *scene) leader() (*replica, *replica) {
	s.T.Helper()
	var leader *replica
	s.Eventually(soon, "one replica leads", func() error {
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

// again starts a replica that was ended, and waits until it knows all.
func (s *scene) again(r *replica) {
	s.T.Helper()
	r.Start()
	s.complete(r)
}

// complete waits until a replica knows all.
func (s *scene) complete(r *replica) {
	s.T.Helper()
	s.Eventually(soon, r.name+" knows all", func() error { return get(plane.Local("http", r.metrics) + "/readyz") })
}

// allKnow waits until every client has been shown new data of all nodes, and says how long after now that was, and who was the last.
func (s *scene) allKnow(limit time.Duration, which []*ledger) (time.Duration, *ledger) {
	s.T.Helper()
	// The next one may be under way.
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
			s.T.Fatalf("not within %s: %v", limit, late)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// knowInTime does so, and fails the test if that takes longer than a failover may.
func (s *scene) knowInTime(what string, which []*ledger) {
	s.T.Helper()
	if took := s.knowSoon(what, which); took > failover {
		s.T.Errorf("%s: that is more than %s", what, failover)
	}
}

// knowSoon waits for that, and tells how long it took.
func (s *scene) knowSoon(what string, which []*ledger) time.Duration {
	s.T.Helper()
	took, last := s.allKnow(soon, which)
	s.T.Logf("%s: new data after %s, %s last", what, took.Round(100*time.Millisecond), last.name)
	return took
}

// written is what the replicas have written, and succeeded with, as the API server has it.
func (s *scene) written() []plane.AuditEvent {
	all, err := plane.AuditLog(filepath.Join(s.pki, "audit.log"))
	if err != nil {
		s.T.Fatal(err)
	}
	return slices.DeleteFunc(all, func(event plane.AuditEvent) bool { return event.ResponseStatus.Code >= 300 })
}

// wroteNothing fails the test for whatever this replica has written since.
func (s *scene) wroteNothing(r *replica, since time.Time) {
	s.T.Helper()
	for _, write := range s.written() {
		of := write.ObjectRef
		if write.User.Username == r.name && write.RequestReceivedTimestamp.After(since) && !strings.HasSuffix(of.Resource, "reviews") {
			s.T.Errorf("%s did %s %s/%s at %s, and does not lead", r.name, write.Verb, of.Resource, of.Name,
				write.RequestReceivedTimestamp.Format("15:04:05.000"))
		}
	}
}

// writes are those of the Lease, and those to the objects that the leader writes.
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

// oneWriterAtAnyTime fails the test if a replica has written, to the objects that the leader writes, after another had taken the
// Lease.
func (s *scene) oneWriterAtAnyTime() {
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
