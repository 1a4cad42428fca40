//go:build e2e

// Package compare runs metrics-server and the controller side by side, on one API server, with the same simulated nodes and the same
// client, and prints the cost of each and the age of its data. It needs no kubelet, and so no root.
package compare

import (
	"flag"
	"fmt"
	"strconv"
	"testing"
	"time"
)

var (
	nodes  = flag.Int("nodes", 200, "how many nodes")
	length = flag.Duration("for", 90*time.Second, "duration of each phase: first no client reads, then one does")
)

// TestNodeMetricsComparedWithMetricsServer prints a table in Markdown: docs/internals/node-metrics.md has it.
func TestNodeMetricsComparedWithMetricsServer(t *testing.T) {
	s := open(t, *nodes)
	// Warm-up: the first responses fill caches.
	time.Sleep(resolution)
	idle := s.phase(func(until time.Time) { time.Sleep(time.Until(until)) })
	var views map[string]*view
	busy := s.phase(func(until time.Time) { views = s.read(until) })
	for _, p := range []*phase{idle, busy} {
		t.Logf("requests to the API server in %s: %v", p.took.Round(time.Second), p.requests)
	}
	for path, v := range views {
		if len(v.took) == v.incomplete {
			t.Fatalf("%s never listed all nodes", path)
		}
		if v.node != nil && at(v.ages, 0) < -1 {
			t.Errorf("%s: values are %.1f s in the future", path, -at(v.ages, 0))
		}
	}
	fmt.Println((&outcome{s, idle, busy, views}).table())
}

// A phase has the servers' resource usage during a time.
type phase struct {
	took     time.Duration
	cores    []float64 // of each server
	memory   []int     // of each, in kB: the maximum
	requests map[string]map[string]int
}

// phase measures the servers while a function runs.
func (s *scene) phase(during func(until time.Time)) *phase {
	servers := s.servers()
	p := &phase{}
	started := time.Now()
	before := cpuSeconds(servers)
	ended, memory := make(chan struct{}), make(chan []int)
	go func() { memory <- maxMemory(servers, ended) }()
	during(started.Add(*length))
	after := cpuSeconds(servers)
	p.took = time.Since(started)
	close(ended)
	p.memory = <-memory
	for index := range servers {
		p.cores = append(p.cores, (after[index]-before[index])/p.took.Seconds())
	}
	p.requests = s.requests(started, started.Add(p.took))
	return p
}

// maxMemory polls the memory of each server until a function ends, and returns the maxima in kB.
func maxMemory(servers []*server, ended chan struct{}) []int {
	highest := make([]int, len(servers))
	for {
		for index, server := range servers {
			resident, _ := strconv.Atoi(server.Resident())
			highest[index] = max(highest[index], resident)
		}
		select {
		case <-ended:
			return highest
		case <-time.After(time.Second):
		}
	}
}

// cpuSeconds is the CPU time that each server has used so far.
func cpuSeconds(servers []*server) []float64 {
	all := []float64{}
	for _, server := range servers {
		all = append(all, server.CPU())
	}
	return all
}
