//go:build e2e

package clients

import (
	"bytes"
	"fmt"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"plimsoll.dev/suite/plane"
)

// TestWatchersMoveToAnotherReplicaWhenTheWatchdogKillsTheLeader: the leader is stopped for 30 s, and all who watch are held by it. Without
// --watchdog they would be shown nothing for that long.
func TestWatchersMoveToAnotherReplicaWhenTheWatchdogKillsTheLeader(t *testing.T) {
	s := openWith(t, setting{flags: []string{"--watchdog"}})
	s.edits()
	leader, standby := s.leader()
	held, kubectl := s.heldBy(leader, standby)
	controller := leader.Child()
	if err := syscall.Kill(controller, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stopped := time.Now()
	code := make(chan int, 1)
	go func() { code <- leader.Ended() }()
	s.knowInTime("stopped: clients that the leader held", held)
	s.isStartedAgain(leader, code)
	again := time.Now()
	select {
	case watch := <-kubectl:
		took := watch.at.Sub(stopped)
		t.Logf("stopped: kubectl get --watch ended after %s", took.Round(100*time.Millisecond))
		if watch.err != nil || took > failover {
			t.Errorf("kubectl get --watch ended after %s: %v", took, watch.err)
		}
	case <-time.After(soon):
		t.Error("kubectl get --watch does not end")
	}
	s.complete(leader)
	time.Sleep(time.Until(stopped.Add(30 * time.Second)))
	s.knowSoon("30 s later: clients that the leader held", held)
	if now, _ := s.leader(); now != standby {
		t.Errorf("%s leads again", now.name)
	}
	s.wroteNothing(leader, again)
}

// An end is when a process ended, and its error.
type end struct {
	at  time.Time
	err error
}

// heldBy are clients whose watches the leader serves, and the end of a kubectl among them.
func (s *scene) heldBy(leader, standby *replica) ([]*ledger, <-chan end) {
	s.T.Helper()
	answers := func(r *replica, verb string) float64 {
		count, err := plane.Metric(r.metrics, fmt.Sprintf("plimsoll_controller_metrics_api_answers_total{verb=%q", verb))
		if err != nil {
			s.T.Fatal(err)
		}
		return count
	}
	s.leave(standby)
	s.Eventually(soon, "the API server asks "+leader.name+" alone", func() error {
		before := answers(standby, "list")
		for range 20 {
			if _, err := s.list(0); err != nil {
				return err
			}
		}
		if asked := answers(standby, "list") - before; asked > 0 {
			return fmt.Errorf("it asked %s %.0f times", standby.name, asked)
		}
		return nil
	})
	before := answers(standby, "watch")
	all := []*ledger{
		s.informer("client-go's informer that streams", true),
		s.informer("client-go's informer that lists", false),
		s.runtimeCache(),
	}
	s.allKnow(soon, all)
	held := answers(leader, "watch")
	kubectl := s.kubectlWatches()
	s.Eventually(soon, "the leader serves kubectl's watch", func() error {
		if now := answers(leader, "watch"); now <= held {
			return fmt.Errorf("it has answered %.0f, as before", now)
		}
		return nil
	})
	if now := answers(standby, "watch"); now != before {
		s.T.Fatalf("%s serves some of the watches", standby.name)
	}
	s.join(standby)
	s.isEndpoint(standby, true)
	return all, kubectl
}

// kubectlWatches runs `kubectl get --watch`, which ends with its watch.
func (s *scene) kubectlWatches() <-chan end {
	s.T.Helper()
	var told bytes.Buffer
	command := exec.CommandContext(s.running(), s.Tool("kubectl"), "--kubeconfig", s.Kubeconfig, "--cache-dir="+s.T.TempDir(), "get", "nodemetrics", "--watch")
	command.Stdout, command.Stderr = &told, &told
	if err := command.Start(); err != nil {
		s.T.Fatal(err)
	}
	ended := make(chan end, 1)
	go func() {
		err := command.Wait()
		if !bytes.Contains(told.Bytes(), []byte(s.agents.nodes[0])) {
			err = fmt.Errorf("it showed no node (%v): %s", err, &told)
		} else {
			// An error because the watch ended is fine.
			err = nil
		}
		ended <- end{time.Now(), err}
	}()
	return ended
}

// isStartedAgain waits until a replica's watchdog has ended it, and starts it as the kubelet does then.
func (s *scene) isStartedAgain(r *replica, code <-chan int) {
	s.T.Helper()
	select {
	case code := <-code:
		if code != 3 {
			s.T.Errorf("%s ended with %d", r.name, code)
		}
	case <-time.After(soon):
		s.T.Fatalf("%s does not end", r.name)
	}
	r.Start()
}
