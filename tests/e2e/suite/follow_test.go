//go:build e2e

package suite

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// change is a new CPU quota of a pod, by the node's clock.
type change struct {
	at         float64 // seconds since boot
	millicores int     // -1: unlimited
}

// follow polls a pod's CPU quota on its node without pauses, since a change may last less than a second: seen returns
// every change so far, end stops it.
func (s *scene) follow(v *victim) (seen func() []change, end func()) {
	s.Helper()
	file := fmt.Sprintf("/tmp/follow-%s-%d", s.name, time.Now().UnixNano())
	onNode(s, s.node, ": > "+file)
	poll := `read -r now <%[2]s/cpu.max`
	if s.node == "v1" { // of the pod, and of its containers
		poll = `now=; for quota in %[2]s/cpu.cfs_quota_us %[2]s/*/cpu.cfs_quota_us; do read -r one <$quota && now="$now $one"; done; [ "$now" ]`
	}
	// The loop starts no processes, which would be slow.
	loop := `last=; while [ -e %[1]s ] && { ` + poll + `; }; do [ "$now" = "$last" ] || { read -r up rest </proc/uptime; echo "$up" $now; last=$now; }; done >>%[1]s 2>/dev/null`
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tryOnNode(s.node, fmt.Sprintf("exec nice -n 5 sh -c '"+loop+"'", file, v.directory))
	}()
	end = func() {
		tryOnNode(s.node, "rm -f "+file)
		<-ended
	}
	s.Cleanup(end)
	seen = func() []change {
		s.Helper()
		return s.changes(onNode(s, s.node, "cat "+file))
	}
	eventually(s, 10*time.Second, "the quota is followed", func() error {
		if len(seen()) == 0 {
			return fmt.Errorf("no value was read yet")
		}
		return nil
	})
	return seen, end
}

// changes parses lines with the time, and with the quota and period on v2, or the quotas of the pod and of its containers on v1.
func (s *scene) changes(lines string) (seen []change) {
	for _, line := range strings.Split(lines, "\n") {
		words := strings.Fields(line)
		if len(words) < 3 {
			continue // it is being written
		}
		at, err := strconv.ParseFloat(words[0], 64)
		if err != nil {
			s.Fatalf("%q: %v", line, err)
		}
		read := settings{"pod/cpu.max": words[1] + " " + words[2]}
		if s.node == "v1" {
			read = settings{"pod/cpu.cfs_quota_us": words[1], "containers/cpu.cfs_quota_us": strings.Join(words[2:], ", ")}
		}
		seen = append(seen, change{at, read.millicores()})
	}
	return seen
}

func (c change) is(quota int) bool { return c.millicores >= quota-1 && c.millicores <= quota+1 }

// quotaRestored checks that the quota was overwritten and is in force again.
func quotaRestored(seen []change, quota int) error {
	if len(resets(seen, quota)) == 0 || !seen[len(seen)-1].is(quota) {
		return fmt.Errorf("the quota of %dm was not overwritten and set again: %v", quota, seen)
	}
	return nil
}

// resets are the durations in seconds for which the quota was overwritten.
func resets(seen []change, quota int) (away []float64) {
	gone := -1.0
	for _, change := range seen {
		switch {
		case !change.is(quota) && gone < 0:
			gone = change.at
		case change.is(quota) && gone >= 0:
			away = append(away, change.at-gone)
			gone = -1
		}
	}
	return away
}

// checkQuotaRestored fails the test if the quota was overwritten for longer than a tick may take.
func (s *scene) checkQuotaRestored(what string, seen []change, quota int) {
	s.Helper()
	for _, away := range resets(seen, quota) {
		s.Logf("%s: the quota was overwritten for %.2f s", what, away)
		// A tick is 1 s and may be up to 1 s late on a busy node.
		if away > 2 {
			s.Errorf("after %s it took %.2f s until the quota was in force again", what, away)
		}
	}
}

// checkQuotaRaised fails the test unless the kubelet raised the quota above `most`, for at most two ticks each time: one finds the new limit,
// the next throttles by it.
func (s *scene) checkQuotaRaised(what string, seen []change, most int) {
	s.Helper()
	free, longest := -1.0, -1.0
	for _, change := range seen {
		switch isFree := change.millicores < 0 || change.millicores > most; {
		case isFree && free < 0:
			free = change.at
		case !isFree && free >= 0:
			longest = max(longest, change.at-free)
			free = -1
		}
	}
	s.Logf("%s: the quota was raised for %.2f s", what, longest)
	if free >= 0 || longest < 0 || longest > 3 {
		s.Errorf("%s: the quota did not fall to at most %dm again within 3 s: %v", what, most, seen)
	}
}

// restart restarts containerd or the kubelet of the scene's node, and waits until the new process works.
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
			return fmt.Errorf("its process id is %q, was %q", now, old)
		}
		if daemon == "containerd" {
			_, err := tryOnNode(s.node, "ctr version")
			return err
		}
		_, err := tryKubectl("", "get", "--raw", "/api/v1/nodes/"+s.node+"/proxy/healthz")
		return err
	})
}
