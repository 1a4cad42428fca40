//go:build e2e

package consumers

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"plimsoll.dev/suite/plane"
	"plimsoll.dev/suite/report"
)

// A load is what an agent reports about its node, in percent: its load by load line, and for CPU and memory the expected usage and the
// standard deviation of the last 5 minutes.
type load struct {
	line, cpu, cpuDeviation, memory, memoryDeviation float64
}

const (
	// reportEvery is faster than real agents, so that the controller knows changes soon.
	reportEvery = 500 * time.Millisecond
	// announcedInterval is the interval that agents announce: after three of them a report is too old.
	announcedInterval = 2 * time.Second
)

// agents report the loads of nodes to the controller until the test ends.
type agents struct {
	*plane.Plane
	replica  string
	signer   *report.Signer
	lock     sync.Mutex
	loads    map[string]load
	known    map[string]*agent
	sequence int64
}

// An agent is the connection of a node's agent.
type agent struct {
	*report.Connection
	token, boot string
}

func newAgents(p *plane.Plane, replica string) *agents {
	p.T.Helper()
	signer, err := report.NewSigner(p.SigningKey())
	if err != nil {
		p.T.Fatal(err)
	}
	a := &agents{Plane: p, replica: replica, signer: signer, known: map[string]*agent{}}
	running, end := context.WithCancel(background)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for running.Err() == nil {
			a.report(running)
			select {
			case <-running.Done():
			case <-time.After(reportEvery):
			}
		}
	}()
	p.T.Cleanup(func() { end(); <-ended })
	return a
}

// set sets what agents report from now on. Agents of other nodes report nothing.
func (a *agents) set(loads map[string]load) {
	a.lock.Lock()
	defer a.lock.Unlock()
	a.loads = loads
}

// report sends one report of each agent. Errors are ignored, since the controller may be down.
func (a *agents) report(running context.Context) {
	a.lock.Lock()
	defer a.lock.Unlock()
	a.sequence++
	for node, load := range a.loads {
		agent, err := a.agent(node)
		if err != nil {
			a.T.Error(err)
			return
		}
		if answer, err := agent.Post(running, agent.token, agent.body(node, a.sequence, load)); err == nil && answer.Code != 200 {
			a.T.Logf("a report of %s: %d", node, answer.Code)
		}
	}
}

func (a *agents) agent(node string) (*agent, error) {
	if known := a.known[node]; known != nil {
		return known, nil
	}
	token, err := a.signer.Token(node)
	boot := fmt.Sprintf("00000000-0000-4000-8000-%012d", len(a.known))
	a.known[node] = &agent{report.Connect(a.replica, &tls.Config{InsecureSkipVerify: true}), token, boot}
	return a.known[node], err
}

func (a *agent) body(node string, sequence int64, load load) []byte {
	resource := func(expected float64) map[string]any {
		return map[string]any{"percent": expected, "expected": expected, "newcomers": 0.0, "line": 80.0}
	}
	windows := func(average, deviation float64) map[string]any {
		return map[string]any{"last5m": map[string]any{"avg": average, "stddev": deviation, "coverage": 1.0}}
	}
	status := map[string]any{
		"timestamp": time.Now().UTC().Format(time.RFC3339), "window": "10s",
		"agent":    map[string]any{"version": "0.1.0", "bootID": a.boot, "sequence": sequence},
		"capacity": map[string]any{"cpu": "4", "memory": "8Gi"},
		"usage":    map[string]any{"node": map[string]any{"cpu": fmt.Sprintf("%.0fm", 40*load.cpu), "memory": fmt.Sprintf("%.0fMi", 81.92*load.memory)}},
		"windows":  map[string]any{"cpu": windows(load.cpu, load.cpuDeviation), "memory": windows(load.memory, load.memoryDeviation)},
		"load":     map[string]any{"percent": load.line, "worst": "cpu", "cpu": resource(load.cpu), "memory": resource(load.memory)},
		"rules":    map[string]any{"total": 0, "breached": 0, "cooling": 0, "unknown": 0},
	}
	body, _ := json.Marshal(map[string]any{
		"node": node, "bootID": a.boot, "agentStartedMillis": 1000, "sequence": sequence,
		"intervalSeconds": int(announcedInterval.Seconds()), "status": status,
	})
	return body
}

// change changes what the agent of a node reports from now on.
func (a *agents) change(node string, change func(*load)) {
	a.lock.Lock()
	defer a.lock.Unlock()
	changed := a.loads[node]
	change(&changed)
	a.loads[node] = changed
}
