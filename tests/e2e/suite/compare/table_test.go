//go:build e2e

package compare

import (
	"debug/buildinfo"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"
)

// An outcome has all measurements.
type outcome struct {
	*scene
	idle, busy *phase
	views      map[string]*view
}

// table is the outcome in Markdown.
func (o *outcome) table() string {
	theirs, pods, ours := o.views[theirNodes], o.views[theirPods], o.views[ourNodes]
	rows := [][]string{
		{"", "metrics-server " + o.version(), "Plimsoll, leader + standby"},
		{"---", "---", "---"},
		o.cpu("CPU while no client reads, millicores per node", o.idle),
		o.cpu("CPU while a client lists nodes and pods once a second, millicores per node", o.busy),
		o.memory("memory, kB a node"),
		{"age of a node's figures as a client sees it, p50 / p99 / most", theirs.age(), ours.age()},
		{"CPU use is the average of the last", theirs.window(), ours.window()},
		{"list of all nodes, p50 / p99, size", theirs.latency(), ours.latency()},
		{"list of all pods, p50 / p99, size", pods.latency(), "the ten busiest of each node are in the list of nodes"},
		{"lists that lacked nodes", theirs.incompleteLists(), ours.incompleteLists()},
		{"requests to the API server a minute, by servers", o.requestRate("metrics-server"), o.requestRate(o.replicas[0].user) + " + " + o.requestRate(o.replicas[1].user)},
		{"requests to the API server a minute, by all agents", "none", o.requestRate(agents)},
	}
	text := fmt.Sprintf("\n%s: %d nodes with %d pods each; %d CPUs, Kubernetes %s; %s without a reader, %s with one.\n\n", time.Now().Format(time.DateOnly),
		o.nodes, podsEach, runtime.NumCPU(), o.kubernetes(), o.idle.took.Round(time.Second), o.busy.took.Round(time.Second))
	for _, row := range rows {
		text += "| " + strings.Join(row, " | ") + " |\n"
	}
	return text
}

func (o *outcome) cpu(what string, p *phase) []string {
	share := func(index int) string { return fmt.Sprintf("%.3f", p.cores[index]*1000/float64(o.nodes)) }
	return []string{what, share(0), share(1) + " + " + share(2)}
}

func (o *outcome) memory(what string) []string {
	share := func(index int) string {
		kilobytes := o.busy.memory[index]
		return fmt.Sprintf("%d (%.1f MiB in all)", kilobytes/o.nodes, float64(kilobytes)/1024)
	}
	return []string{what, share(0), share(1) + " + " + share(2)}
}

// requestRate is a user's requests per minute while no client reads.
func (o *outcome) requestRate(user string) string {
	count := 0
	for _, times := range o.idle.requests[user] {
		count += times
	}
	return fmt.Sprintf("%.0f", float64(count)/o.idle.took.Minutes())
}

func (v *view) age() string {
	return fmt.Sprintf("%.1f / %.1f / %.1f s", at(v.ages, 0.5), at(v.ages, 0.99), at(v.ages, 1))
}

func (v *view) window() string { return fmt.Sprintf("%.1f s", at(v.windows, 0.5)) }

func (v *view) latency() string {
	return fmt.Sprintf("%.1f / %.1f ms, %d kB", at(v.took, 0.5), at(v.took, 0.99), v.size/1000)
}

func (v *view) incompleteLists() string { return fmt.Sprintf("%d of %d", v.incomplete, len(v.took)) }

// at is the value at this quantile.
func at(values []float64, share float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return values[int(share*float64(len(values)-1))]
}

// version is the version of the built metrics-server.
func (s *scene) version() string {
	info, err := buildinfo.ReadFile(s.Tool("metrics-server"))
	if err != nil {
		s.T.Fatal(err)
	}
	for _, module := range append(info.Deps, &info.Main) {
		if module.Path == "sigs.k8s.io/metrics-server" {
			return module.Version
		}
	}
	s.T.Fatalf("the program is not metrics-server: %s", info.Path)
	return ""
}

func (s *scene) kubernetes() string {
	version, err := s.Kube.Discovery().ServerVersion()
	if err != nil {
		s.T.Fatal(err)
	}
	return version.GitVersion
}
