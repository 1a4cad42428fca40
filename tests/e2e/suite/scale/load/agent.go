package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"plimsoll.dev/suite/report"
	"plimsoll.dev/suite/stamp"
)

// An agent reports for one node.
type agent struct {
	name, token, boot string
	reports           bool
	started           int64
	sequence          int64
	sender            *sender
	tally             *tally
	connections       map[string]*report.Connection
	acknowledged      atomic.Int64 // time of the leader's last acknowledgement, in nanoseconds since 1970
	lease             *lease       // nil if Leases are not renewed
}

func newAgent(options options, index int, sender *sender, leases *leases, tally *tally) (*agent, error) {
	name := fmt.Sprintf(options.name, index)
	token, err := sender.token(name)
	a := &agent{
		name: name, token: token, boot: fmt.Sprintf("00000000-0000-4000-8000-%012d", index), reports: options.reports,
		started: time.Now().UnixMilli() & 0xffffffff, sender: sender, tally: tally, connections: map[string]*report.Connection{},
	}
	if leases != nil {
		a.lease = &lease{leases: leases, node: name}
	}
	return a, err
}

// run reports, and renews the Lease, at fixed times from a first one on.
func (a *agent) run(running context.Context, at time.Time, interval time.Duration) {
	for {
		select {
		case <-running.Done():
			return
		case <-time.After(time.Until(at)):
		}
		if a.reports {
			a.report(running, at)
		}
		relaxed := time.Since(time.Unix(0, a.acknowledged.Load())) < 5*interval/2
		if a.lease != nil && a.lease.isDue(at, relaxed) {
			go a.lease.renew(running, at, relaxed, a.tally)
		}
		at = at.Add(interval)
	}
}

// report sends one report to every replica, without waiting for the answers.
func (a *agent) report(running context.Context, at time.Time) {
	a.sequence++
	body := a.body(at)
	a.tally.sent(len(body))
	for _, endpoint := range a.sender.endpoints() {
		if a.connections[endpoint] == nil {
			a.connections[endpoint] = report.Connect(endpoint, a.sender.tls)
		}
		go func(to *report.Connection) {
			answer, err := to.Post(running, a.token, body)
			if running.Err() != nil {
				return
			}
			if err == nil && answer.Leading {
				a.acknowledged.Store(time.Now().UnixNano())
			}
			a.tally.answered(kind(answer, err), time.Since(at))
		}(a.connections[endpoint])
	}
}

type pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	CPU       string `json:"cpu"`
	Memory    string `json:"memory"`
}

// body is a report like that of a busy node's agent. The memory in use encodes the time of the measurement.
func (a *agent) body(at time.Time) []byte {
	cpu := 500 + rand.IntN(7000)
	pods := make([]pod, 10)
	for index := range pods {
		pods[index] = pod{"team-" + fmt.Sprint(index%3), fmt.Sprintf("checkout-7c9f6d%03d-x%dk2p", index, index), fmt.Sprintf("%dm", cpu/(index+2)), "1048576Ki"}
	}
	window := func() map[string]any {
		return map[string]any{"avg": 61.5, "p50": 60.1, "p90": 82.4, "p95": 88.8, "p99": 97.2, "max": 99.6, "coverage": 1.0}
	}
	windows := map[string]any{
		"last5m": window(), "last30m": window(), "last1h": window(),
		"maxAvg1h": map[string]any{"max": 81.5, "coverage": 1.0}, "maxAvg1d": map[string]any{"max": 91.5, "coverage": 0.9},
	}
	averages := map[string]any{"avg10": 12.5, "avg60": 9.25, "avg300": 4.75}
	stalled := map[string]any{"some": averages, "full": averages}
	load := func(expected float64) map[string]any {
		return map[string]any{"percent": expected / 0.8, "expected": expected, "newcomers": 0.0, "history": expected, "line": 80.0}
	}
	status := map[string]any{
		"timestamp": at.UTC().Format(time.RFC3339), "window": "10s",
		"agent":    map[string]any{"version": "0.1.0", "bootID": a.boot, "sequence": a.sequence},
		"capacity": map[string]any{"cpu": "8", "memory": "33554432Ki"},
		"usage": map[string]any{
			"node":   map[string]any{"cpu": fmt.Sprintf("%dm", cpu), "memory": fmt.Sprint(stamp.Of(at))},
			"pods":   map[string]any{"cpu": fmt.Sprintf("%dm", cpu*9/10), "memory": "15777216Ki"},
			"system": map[string]any{"cpu": fmt.Sprintf("%dm", cpu/10), "memory": "1000000Ki"},
		},
		"pressure": map[string]any{"cpu": stalled, "memory": stalled, "io": stalled},
		"windows":  map[string]any{"cpu": windows, "memory": windows},
		"load":     map[string]any{"percent": float64(cpu) / 64, "worst": "cpu", "cpu": load(float64(cpu) / 80), "memory": load(40)},
		"pods":     110, "topPods": pods,
		"rules": map[string]any{"total": 3, "breached": 1, "cooling": 0, "unknown": 0}, "breached": []string{"protect/cpu"},
	}
	body, _ := json.Marshal(map[string]any{
		"node": a.name, "bootID": a.boot, "agentStartedMillis": a.started, "sequence": a.sequence, "intervalSeconds": 10, "status": status,
	})
	return body
}
