//go:build prometheus

package dashboard

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/api"
	prometheus "github.com/prometheus/client_golang/api/prometheus/v1"
)

var (
	picture  = flag.String("picture", "../../../../docs/dashboard.svg", "file for the dashboard's picture")
	programs = flag.String("programs", "../../../../target/e2e/bin", "directory of prometheus and promtool")
)

// What the picture shows is made up: four nodes over three hours, as they could be with the policy of README.md, which only reports until it is
// enforced in the second hour.
const (
	cpus, gib    = 16, 1 << 30
	period       = 10 * time.Second // of evaluations
	scrape       = 30 * time.Second
	threshold    = 5.0 // percent of the time that protected pods wait for a CPU
	restoreValue = 2.0
	coolDown     = 5 * time.Minute
	enforcedAt   = 75 // minutes
)

var (
	begin  = time.Date(2026, 1, 14, 8, 0, 0, 0, time.UTC) // an hour before the picture, for what counts over an hour
	from   = begin.Add(time.Hour)
	to     = from.Add(3 * time.Hour)
	chance = rand.New(rand.NewPCG(7, 11))
)

// batch are pods of one busy thread each that run on a node between these minutes of the picture.
type batch struct{ begin, end, pods int }

// worker is a node: its services need these CPUs at first, and a little more every hour.
type worker struct {
	name             string
	services, growth float64
	memory           float64 // percent in use
	batch            []batch
	// The rule's state, the part of their CPU that quotas leave to batch pods, steps and restored pods so far.
	state                  string
	above, quiet           int
	last                   time.Time // above the threshold
	quota                  float64
	throttled              int
	throttles, unthrottles int
	pressure               float64
}

var workers = []*worker{
	{name: "worker-1", services: 5.5, growth: 0.5, memory: 58, batch: []batch{{-60, 999, 6}, {20, 999, 14}}},
	{name: "worker-2", services: 7, growth: 0.7, memory: 71, batch: []batch{{10, 999, 36}}},
	{name: "worker-3", services: 6.3, growth: 0.4, memory: 64, batch: []batch{{35, 999, 30}, {138, 999, 120}}},
	{name: "worker-4", services: 4.2, growth: 0.9, memory: 47, batch: []batch{{-30, 45, 20}, {90, 999, 24}, {98, 112, 115}}},
}

// now are a node's figures at one moment.
type now struct{ used, batch, p95, max, services float64 }

func around(value, deviation float64) float64 { return max(0, value+deviation*chance.NormFloat64()) }

func isEnforced(at time.Time) bool { return at.Sub(from).Minutes() >= enforcedAt }

// measure has batch pods use what services leave. Each adds its weight, in the idle class little up to five for each CPU: the more there are on
// full CPUs, the longer services wait.
func (w *worker) measure(at time.Time) now {
	pods, hours := 0, at.Sub(from).Hours()
	for _, each := range w.batch {
		if minute := hours * 60; minute >= float64(each.begin) && minute < float64(each.end) {
			pods += each.pods
		}
	}
	services := around(w.services+w.growth*hours+0.5*math.Sin(2.3*hours+w.services), 0.15)
	left, harm := cpus-services-0.3, 0.5+0.02*float64(pods)+0.1*float64(max(0, pods-5*cpus))
	if !isEnforced(at) {
		left, harm = left+0.8, 0.3*float64(pods)
	}
	used := min(float64(pods), around(0.98*left, 0.05)) * w.quota
	full := min(1, max(0, (services+used)/cpus-0.85)/0.12)
	if w.throttled = 0; w.quota < 1 { // what a quota leaves still runs in bursts
		w.throttled, full = pods, max(full, 0.3)
	}
	p95 := around(0.5+full*harm, 0.15)
	if w.throttled > 0 { // and waits for the next one
		full = 1
	}
	w.pressure += ((1 + 80*full*min(1, float64(pods)/20)) - w.pressure) * 0.2
	return now{min(cpus, services+used+0.3), used, p95, around(p95*1.5+0.3, 0.2), services}
}

// evaluate is the rule: quotas in steps of 10 % while it is above its threshold, and everything back after a quiet cool-down.
func (w *worker) evaluate(at time.Time, value float64) {
	switch {
	case value > threshold:
		w.above, w.quiet = w.above+1, 0
		if w.above >= 2 {
			w.state, w.last = "Breached", at
		}
		if w.above >= 2 && isEnforced(at) {
			w.quota = max(0.3, w.quota-0.1)
			w.throttles += max(1, w.throttled)
		}
	case value <= restoreValue:
		w.above, w.quiet = 0, w.quiet+1
	default:
		w.above, w.quiet = 0, 0
	}
	if w.state == "Breached" && w.quiet >= 6 {
		w.state = "Cooling"
	}
	if w.state == "Cooling" && at.Sub(w.last) > coolDown {
		if w.state = "Normal"; w.quota < 1 {
			w.quota, w.unthrottles = 1, w.unthrottles+1
		}
	}
}

// series writes a node's samples in the OpenMetrics format, each metric apart.
func (w *worker) series(write func(metric, labels string, value float64), of now, strategy string) {
	memory := around(w.memory, 0.3)
	const waits = `rule="services/cpu-wait",metric="protected_cpu_delay_p95"`
	write("plimsoll_agent_rule_value", waits, of.p95)
	write("plimsoll_agent_rule_threshold", waits, threshold)
	for _, state := range []string{"Normal", "Breached", "Cooling"} {
		is := 0.0
		if state == w.state {
			is = 1
		}
		write("plimsoll_agent_rule_state", fmt.Sprintf(`rule="services/cpu-wait",strategy=%q,state=%q`, strategy, state), is)
	}
	write("plimsoll_agent_node_protected_stalled_percent", `resource="cpu",stat="p95"`, of.p95)
	write("plimsoll_agent_node_protected_stalled_percent", `resource="cpu",stat="max"`, of.max)
	write("plimsoll_agent_load_percent", `term="worst"`, 100*max(of.p95/threshold, of.services/cpus/0.9, memory/90))
	write("plimsoll_agent_batch_cpu_usage_cores", "", of.batch)
	write("plimsoll_agent_node_cpu_usage_cores", `part="node"`, of.used)
	write("plimsoll_agent_node_cpu_capacity_cores", "", cpus)
	write("plimsoll_agent_node_memory_usage_bytes", `part="node"`, memory/100*64*gib)
	write("plimsoll_agent_node_memory_capacity_bytes", "", 64*gib)
	write("plimsoll_agent_node_pressure_percent", `resource="cpu",tasks="some",window="60s"`, around(w.pressure, 0.5))
	write("plimsoll_agent_node_pressure_percent", `resource="memory",tasks="some",window="60s"`, around(-0.1, 0.1))
	write("plimsoll_agent_node_pressure_percent", `resource="io",tasks="some",window="60s"`, around(1.5+0.05*w.memory, 0.4))
	write("plimsoll_agent_throttled_pods", "", float64(w.throttled))
	write("plimsoll_agent_scheduling_disabled", `effect="NoSchedule"`, 0)
	write("plimsoll_agent_stopped", "", 0)
	write("plimsoll_agent_evictions_total", `outcome="accepted"`, 0)
	write("plimsoll_agent_actions_total", `action="throttle",strategy="Enforce"`, float64(w.throttles))
	write("plimsoll_agent_actions_total", `action="unthrottle",strategy="Enforce"`, float64(w.unthrottles))
}

// madeUp are all samples, in the OpenMetrics format.
func madeUp() string {
	metrics, order := map[string]*strings.Builder{}, []string{}
	at := begin
	writer := func(common string) func(metric, labels string, value float64) {
		return func(metric, labels string, value float64) {
			if metrics[metric] == nil {
				metrics[metric], order = &strings.Builder{}, append(order, metric)
			}
			if labels != "" {
				labels = "," + labels
			}
			fmt.Fprintf(metrics[metric], "%s{%s%s} %.4g %d\n", metric, common, labels, value, at.Unix())
		}
	}
	for _, worker := range workers {
		worker.state, worker.quota = "Normal", 1
	}
	for ; !at.After(to); at = at.Add(period) {
		isScraped, strategy := at.Sub(begin)%scrape == 0, "Preview"
		if isEnforced(at) {
			strategy = "Enforce"
		}
		for _, worker := range workers {
			figures := worker.measure(at)
			worker.evaluate(at, figures.p95)
			if isScraped {
				worker.series(writer(fmt.Sprintf("node=%q,instance=%q", worker.name, worker.name)), figures, strategy)
			}
		}
		if isScraped {
			write := writer(`instance="controller"`)
			write("plimsoll_controller_leader", "", 1)
			write("plimsoll_controller_nodes_without_agent", "", 0)
			write("plimsoll_controller_unresponsive_agents", "", 0)
		}
	}
	var all strings.Builder
	for _, metric := range order {
		all.WriteString(metrics[metric].String())
	}
	return all.String() + "# EOF\n"
}

// serve starts a Prometheus that has these samples.
func serve(t *testing.T, samples string) prometheus.API {
	t.Helper()
	directory := t.TempDir()
	file := func(name string) string { return filepath.Join(directory, name) }
	for name, text := range map[string]string{"samples": samples, "prometheus.yaml": "{}\n"} {
		if err := os.WriteFile(file(name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command(filepath.Join(*programs, "promtool"), "tsdb", "create-blocks-from", "openmetrics", file("samples"), file("data")).CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()
	var log strings.Builder
	server := exec.Command(filepath.Join(*programs, "prometheus"), "--config.file="+file("prometheus.yaml"), "--storage.tsdb.path="+file("data"),
		"--storage.tsdb.retention.time=100y", "--web.listen-address="+address)
	server.Stdout, server.Stderr = &log, &log
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		server.Process.Kill()
		server.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	client, err := api.NewClient(api.Config{Address: "http://" + address})
	if err != nil {
		t.Fatal(err)
	}
	served := prometheus.NewAPI(client)
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
		if _, err := served.Buildinfo(t.Context()); err == nil {
			return served
		} else if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// TestDashboardIsDrawn draws docs/dashboard.svg. `make dashboard` has the queries answered by a real cluster.
func TestDashboardIsDrawn(t *testing.T) {
	shown := inDocs(t)
	answers, err := shown.Ask(serve(t, madeUp()), from, to, 2*time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if missing := shown.Missing(answers); len(missing) > 0 {
		t.Fatalf("no result for\n%s", strings.Join(missing, "\n"))
	}
	if len(answers.Moments["Actions"]) == 0 || len(answers.Moments["Restored"]) == 0 {
		t.Errorf("actions are %v", answers.Moments)
	}
	if err := os.WriteFile(*picture, []byte(shown.Draw(answers)), 0o644); err != nil {
		t.Fatal(err)
	}
}
