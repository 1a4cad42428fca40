//go:build e2e

package suite

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// change is what a pod may use from a moment on, by its node's own clock.
type change struct {
	at         float64 // seconds since boot
	millicores int     // -1: as much as it likes
}

// follow looks at a pod's cpu.max on its node without a pause, since it may be another for a part of a second alone: seen returns
// every change so far, end ends it.
func (s *scene) follow(v *victim) (seen func() []change, end func()) {
	s.Helper()
	file := fmt.Sprintf("/tmp/follow-%s-%d", s.name, time.Now().UnixNano())
	onNode(s, s.node, ": > "+file)
	// Nothing in the loop starts a process.
	loop := `last=; while [ -e %[1]s ] && read -r now <%[2]s/cpu.max; do [ "$now" = "$last" ] || { read -r up rest </proc/uptime; echo "$up $now"; last=$now; }; done >>%[1]s`
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tryOnNode(s.node, fmt.Sprintf("exec nice -n 5 sh -c '"+loop+"'", file, v.folder))
	}()
	end = func() {
		tryOnNode(s.node, "rm -f "+file)
		<-ended
	}
	s.Cleanup(end)
	seen = func() []change {
		s.Helper()
		return changes(s, onNode(s, s.node, "cat "+file))
	}
	eventually(s, 10*time.Second, "the cap is followed", func() error {
		if len(seen()) == 0 {
			return fmt.Errorf("nothing was read yet")
		}
		return nil
	})
	return seen, end
}

// changes reads lines of time, quota and period.
func changes(t testing.TB, lines string) (seen []change) {
	t.Helper()
	for _, line := range strings.Split(lines, "\n") {
		var next change
		var quota string
		var period int
		if _, err := fmt.Sscan(line, &next.at, &quota, &period); err != nil {
			continue // it is being written
		}
		next.millicores = -1
		if quota != "max" {
			var micros int
			if _, err := fmt.Sscan(quota, &micros); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			next.millicores = micros * 1000 / period
		}
		seen = append(seen, next)
	}
	return seen
}

func (c change) is(cap int) bool { return c.millicores >= cap-1 && c.millicores <= cap+1 }

// followed tells whether the cap was taken off by somebody, and is back.
func followed(seen []change, cap int) error {
	if len(resets(seen, cap)) == 0 || !seen[len(seen)-1].is(cap) {
		return fmt.Errorf("a cap of %dm: %v", cap, seen)
	}
	return nil
}

// resets are for how many seconds the cap was away, each time that it was and came back.
func resets(seen []change, cap int) (away []float64) {
	gone := -1.0
	for _, change := range seen {
		switch {
		case !change.is(cap) && gone < 0:
			gone = change.at
		case change.is(cap) && gone >= 0:
			away = append(away, change.at-gone)
			gone = -1
		}
	}
	return away
}

// restart restarts containerd or the kubelet of the scene's node, and waits until another process does its work.
func (s *scene) restart(daemon string) {
	s.Helper()
	find, command := "pgrep -o -x "+daemon, "pkill -x "+daemon
	if s.node == "v2" {
		find, command = "systemctl show --property=MainPID --value "+daemon, "systemctl restart "+daemon
	}
	process := func() string {
		pid, _ := tryOnNode(s.node, find)
		return pid
	}
	old := process()
	onNode(s, s.node, command)
	eventually(s, 60*time.Second, daemon+" works again", func() error {
		if now := process(); now == "" || now == "0" || now == old {
			return fmt.Errorf("its process is %q, was %q", now, old)
		}
		if daemon == "containerd" {
			_, err := tryOnNode(s.node, "ctr version")
			return err
		}
		_, err := tryKubectl("", "get", "--raw", "/api/v1/nodes/"+s.node+"/proxy/healthz")
		return err
	})
}
