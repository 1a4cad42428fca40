//go:build e2e

package clients

import (
	"bytes"
	"fmt"
	"os/exec"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"plimsoll.dev/suite/plane"
)

// detection is how long the kubelet may take to kill a stopped container with the chart's liveness probe: the stop comes just after a probe,
// and three probes fail, 2 s apart, by a timeout of 1 s. Then preStop and the process have 3 s together.
const detection = 10 * time.Second

// TestWatchersMoveToAnotherReplicaWhenTheKubeletKillsAStoppedLeader: all watches are served by the leader, which is stopped. Its liveness probe
// fails, the kubelet kills it, and the clients start their watches again at the other replica.
func TestWatchersMoveToAnotherReplicaWhenTheKubeletKillsAStoppedLeader(t *testing.T) {
	s := open(t)
	s.edits()
	leader, standby := s.leader()
	clients, kubectl := s.clientsOf(leader, standby)
	killed := s.killWhenUnhealthy(leader)
	leader.Signal(syscall.SIGSTOP)
	stopped := time.Now()
	took := s.logUpToDate("stopped: clients of the leader", clients)
	if limit := detection + 2*time.Second; took > limit {
		t.Errorf("clients were not up to date within %s", limit)
	}
	t.Logf("killed after %s", (<-killed).Sub(stopped).Round(100*time.Millisecond))
	leader.Start()
	again := time.Now()
	select {
	case watch := <-kubectl:
		took := watch.at.Sub(stopped)
		t.Logf("stopped: kubectl get --watch ended after %s", took.Round(100*time.Millisecond))
		if watch.err != nil || took > detection+2*time.Second {
			t.Errorf("kubectl get --watch ended after %s: %v", took, watch.err)
		}
	case <-time.After(waitTimeout):
		t.Error("kubectl get --watch did not end")
	}
	s.waitReady(leader)
	time.Sleep(time.Until(stopped.Add(30 * time.Second)))
	s.logUpToDate("30 s later: clients of the leader", clients)
	if now, _ := s.leader(); now != standby {
		t.Errorf("%s leads again", now.name)
	}
	s.checkNoWrites(leader, again)
}

// An end is the time at which a process exited, and its error.
type end struct {
	at  time.Time
	err error
}

// clientsOf are clients whose watches the leader serves. The channel gets the end of another one, kubectl.
func (s *scene) clientsOf(leader, standby *replica) ([]*ledger, <-chan end) {
	s.T.Helper()
	answers := func(r *replica, verb string) float64 {
		count, err := plane.Metric(r.metrics, fmt.Sprintf("plimsoll_controller_metrics_api_answers_total{verb=%q", verb))
		if err != nil {
			s.T.Fatal(err)
		}
		return count
	}
	s.leave(standby)
	s.Eventually(waitTimeout, "the API server sends requests to "+leader.name+" only", func() error {
		before := answers(standby, "list")
		for range 20 {
			if _, err := s.list(0); err != nil {
				return err
			}
		}
		if received := answers(standby, "list") - before; received > 0 {
			return fmt.Errorf("the API server sent %.0[2]f list requests to %[1]s", standby.name, received)
		}
		return nil
	})
	before := answers(standby, "watch")
	all := []*ledger{
		s.informer("client-go's informer that streams", true),
		s.informer("client-go's informer that lists", false),
		s.runtimeCache(),
	}
	s.waitUpToDate(waitTimeout, all)
	served := answers(leader, "watch")
	kubectl := s.kubectlWatches()
	s.Eventually(waitTimeout, "the leader serves kubectl's watch", func() error {
		if now := answers(leader, "watch"); now <= served {
			return fmt.Errorf("the leader has still served only %.0f watches", now)
		}
		return nil
	})
	if now := answers(standby, "watch"); now != before {
		s.T.Fatalf("%s serves some of the watches", standby.name)
	}
	s.join(standby)
	s.waitEndpoint(standby, true)
	return all, kubectl
}

// kubectlWatches runs `kubectl get --watch`, which exits when its watch ends.
func (s *scene) kubectlWatches() <-chan end {
	s.T.Helper()
	var output bytes.Buffer
	command := exec.CommandContext(s.running(), s.Tool("kubectl"), "--kubeconfig", s.Kubeconfig, "--cache-dir="+s.T.TempDir(), "get", "nodemetrics", "--watch")
	command.Stdout, command.Stderr = &output, &output
	if err := command.Start(); err != nil {
		s.T.Fatal(err)
	}
	ended := make(chan end, 1)
	go func() {
		err := command.Wait()
		if !bytes.Contains(output.Bytes(), []byte(s.agents.nodes[0])) {
			err = fmt.Errorf("it showed no node (%v): %s", err, &output)
		} else {
			// An error is expected if the watch was cut.
			err = nil
		}
		ended <- end{time.Now(), err}
	}()
	return ended
}

// killWhenUnhealthy kills a replica when its liveness probe fails, as the kubelet does with the chart's settings. The channel gets the time of it.
func (s *scene) killWhenUnhealthy(r *replica) <-chan time.Time {
	killed := make(chan time.Time, 1)
	probe := s.controller.LivenessProbe
	// The preStop hook takes the whole grace period; the kubelet then gives the process 2 s.
	grace := time.Duration(*probe.TerminationGracePeriodSeconds+2) * time.Second
	go func() {
		s.untilUnhealthy(r, probe)
		time.Sleep(grace)
		r.Kill()
		killed <- time.Now()
	}()
	return killed
}

// untilUnhealthy probes a replica until the probe has failed as often as its threshold.
func (s *scene) untilUnhealthy(r *replica, probe *corev1.Probe) {
	next := time.NewTicker(time.Duration(probe.PeriodSeconds) * time.Second)
	defer next.Stop()
	for failures := int32(0); ; <-next.C {
		if err := r.ready(probe); err == nil {
			failures = 0
		} else if failures++; failures == probe.FailureThreshold {
			return
		}
	}
}
