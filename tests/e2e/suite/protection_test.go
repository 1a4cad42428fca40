//go:build e2e

package suite

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// protectionWays are the actions that protect an important pod from batch pods, in the order of docs/protection.md.
var protectionWays = []struct{ name, throttle string }{
	{"quota only", "{stepCPURatio: 30, minCPURatio: 10}"},
	{"idle class only", "{idle: true, minCPURatio: 100, stepCPURatio: 10}"},
	{"idle class and quota", "{idle: true, stepCPURatio: 30, minCPURatio: 10}"},
}

// loadScene has pods that run the program's own load generator: a service, or batch work.
type loadScene struct {
	*scene
	image string
}

// start starts a pod that requests 300m of CPU, and waits until it runs. In its container the program has no parent process.
func (l loadScene) start(name, app string, args ...string) {
	l.Helper()
	requesting := work{name: name, requests: "300m", labels: map[string]string{"app": app}}
	l.startChanged(requesting, func(spec *corev1.PodSpec) {
		spec.Containers[0].Image, spec.Containers[0].Args = l.image, append(args, "--parent=0", "--threads=4")
	})
	l.waitRunning(name)
}

// request is a request of the service: when it was due since its node booted, and how long it took.
type request struct{ due, latency time.Duration }

// requests returns the service's requests so far. One that was given up took as long as the timeout.
func (l loadScene) requests(pod string, timeout time.Duration) (found []request) {
	l.Helper()
	lines, err := kube.CoreV1().Pods(l.name).GetLogs(pod, &corev1.PodLogOptions{}).DoRaw(background)
	if err != nil {
		l.Fatal(err)
	}
	for _, line := range strings.Split(string(lines), "\n") {
		due, took, _ := strings.Cut(line, " ")
		at, err := strconv.ParseInt(due, 10, 64)
		if err != nil {
			continue
		}
		latency := timeout
		if nanos, err := strconv.ParseInt(took, 10, 64); err == nil {
			latency = time.Duration(nanos)
		}
		found = append(found, request{time.Duration(at), latency})
	}
	return found
}

// used is the CPU time of a pod.
func (l loadScene) used(pod string) time.Duration {
	l.Helper()
	read := "cat " + l.directoryOf(l.name, pod, "cpuacct") + "/cpuacct.usage"
	unit := time.Nanosecond
	if l.node != "v1" {
		read = "sed -n 's/^usage_usec //p' " + l.directoryOf(l.name, pod, "cpu") + "/cpu.stat"
		unit = time.Microsecond
	}
	count, err := strconv.ParseInt(strings.TrimSpace(onNode(l, l.node, read)), 10, 64)
	if err != nil {
		l.Fatal(err)
	}
	return time.Duration(count) * unit
}

// meter starts to measure a pod's CPU; the returned function returns the millicores that it has used on average since then.
func (l loadScene) meter(pod string) func() float64 {
	l.Helper()
	began, before := time.Now(), l.used(pod)
	return func() float64 { return 1000 * (l.used(pod) - before).Seconds() / time.Since(began).Seconds() }
}

// protected is how the important pod fared, and what CPU the batch pods got.
type protected struct {
	p50, p99   time.Duration
	served     int
	millicores float64
}

// TestImportantPodStaysFast runs the scene "burst" of docs/protection.md as pods: a service that needs four times the CPU that it requests, alone,
// beside two batch pods that request as much, and then with each action that protects it.
func TestImportantPodStaysFast(t *testing.T) {
	onlyLong(t)
	const (
		timeout         = time.Second
		settle, measure = 10 * time.Second, 15 * time.Second
	)
	onEachNode(t, func(t *testing.T, node string) {
		lockAllNodes(t) // they share the CPUs of this machine
		s := newScene(t, node)
		repository, tag, err := image()
		if err != nil {
			t.Fatal(err)
		}
		l := loadScene{s, repository + ":" + tag}
		batch := []string{"batch-a", "batch-b"}
		l.start("important", "important", "demo-worker", "--rate=150", "--work-micros=8000", fmt.Sprintf("--request-timeout-millis=%d", timeout.Milliseconds()))

		table := "| way | p50 ms | p99 ms | times alone | served/s | batch CPU |\n|---|---|---|---|---|---|\n"
		var baseline time.Duration
		observe := func(way string, running ...string) (found protected) {
			time.Sleep(settle)
			earlier := l.requests("important", timeout)
			if len(earlier) == 0 {
				t.Fatal("the service has logged no requests")
			}
			use := map[string]func() float64{}
			for _, pod := range running {
				use[pod] = l.meter(pod)
			}
			time.Sleep(measure)
			for _, millicores := range use {
				found.millicores += millicores()
			}
			// Those that are still in the queue are given up or served by then.
			time.Sleep(timeout)
			from := earlier[len(earlier)-1].due
			var latencies []time.Duration
			for _, each := range l.requests("important", timeout) {
				if each.due > from && each.due <= from+measure {
					latencies = append(latencies, each.latency)
					if each.latency != timeout {
						found.served++
					}
				}
			}
			if len(latencies) < 1000 {
				t.Fatalf("%s: only %d requests were due", way, len(latencies))
			}
			slices.Sort(latencies)
			found.p50, found.p99 = latencies[len(latencies)/2], latencies[len(latencies)*99/100]
			if baseline == 0 {
				baseline = found.p99
			}
			table += fmt.Sprintf("| %s | %.1f | %.1f | %.2f | %.0f | %.0fm |\n", way, found.p50.Seconds()*1000, found.p99.Seconds()*1000,
				found.p99.Seconds()/baseline.Seconds(), float64(found.served)/measure.Seconds(), found.millicores)
			return found
		}
		defer func() { t.Logf("%s:\n%s", node, table) }()

		observe("alone")
		for _, name := range batch {
			l.start(name, "batch", "demo-burner")
		}
		unprotected := observe("unprotected", batch...)
		if baseline > timeout/5 {
			t.Skipf("the p99 is %s without batch pods: the machine is too busy", baseline)
		}
		if unprotected.p99 < 3*baseline {
			t.Fatalf("batch pods do not harm the service: its p99 is %s alone and %s beside them", baseline, unprotected.p99)
		}
		rule := rule{action: s.name, metric: "cpu_total_usage", threshold: 1700}
		if node != "v1" {
			rule.metric, rule.threshold = "protected_cpu_delay_max", 10
		}
		for _, way := range protectionWays {
			s.action(s.name, "{coolDownSeconds: 300, throttle: {cpuThrottle: "+way.throttle+"}}")
			s.allow(s.name, "batch", s.name)
			s.rule(s.name, rule)
			s.waitRulesEnforced(s.name)
			found := observe(way.name, batch...)
			// Quotas alone are for comparison: what they leave to batch pods still runs in bursts.
			if strings.HasPrefix(way.name, "idle") && (found.p99 > 3*baseline || found.millicores < 100) {
				t.Errorf("%s: the service's p99 is %s, alone it is %s; batch pods got %.0fm", way.name, found.p99, baseline, found.millicores)
			}
			s.noPolicies()
			s.waitSettled()
		}
	})
}
