//go:build e2e

package clients

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"time"

	"plimsoll.dev/suite/report"
)

// An agentConnection is one agent's connection to one replica.
type agentConnection struct {
	*report.Connection
	token string
	busy  atomic.Bool
}

// startReports lets the agents report to these replicas. They renew their Leases whenever the leader does not acknowledge.
func (a *agents) startReports(replicas []*replica) {
	connections := make([][]*agentConnection, len(a.nodes))
	for index, node := range a.nodes {
		token := a.token(node)
		for _, r := range replicas {
			to := report.Connect(r.reports.address, &tls.Config{InsecureSkipVerify: true})
			connections[index] = append(connections[index], &agentConnection{Connection: to, token: token})
		}
	}
	a.lock.Lock()
	defer a.lock.Unlock()
	a.connections, a.acknowledged = connections, make([]atomic.Int64, len(a.nodes))
}

// token is the report token of a node's agent.
func (a *agents) token(node string) string {
	a.T.Helper()
	signer, err := report.NewSigner(a.SigningKey())
	a.must(nil, err)
	token, err := signer.Token(node)
	a.must(nil, err)
	return token
}

// reports sends an agent's heartbeat to every replica; it returns whether the leader acknowledged a recent one.
func (a *agents) reports(running context.Context, node int, beat int64) bool {
	a.lock.Lock()
	connections := a.connections
	a.lock.Unlock()
	if connections == nil {
		return false
	}
	body := a.reportBody(node, beat)
	for _, to := range connections[node] {
		// Reports are not queued: the next one is newer.
		if to.busy.CompareAndSwap(false, true) {
			go func() {
				defer to.busy.Store(false)
				if answer, err := to.Post(running, to.token, body); err == nil && answer.Leading {
					a.acknowledged[node].Store(time.Now().UnixNano())
				}
			}()
		}
	}
	return time.Since(time.Unix(0, a.acknowledged[node].Load())) < a.ackTimeout
}

// reportBody is the report with the same data as the Lease of this heartbeat.
func (a *agents) reportBody(node int, beat int64) []byte {
	used := map[string]any{"cpu": fmt.Sprintf("%dm", cpus*10*cpu(node, beat)), "memory": "4Gi"}
	status := map[string]any{
		"timestamp": time.Now().UTC().Format(time.RFC3339), "window": "10s",
		"agent":    map[string]any{"version": "0.1.0", "bootID": boot(node), "sequence": beat + 1},
		"capacity": map[string]any{"cpu": fmt.Sprint(cpus), "memory": "16Gi"},
		"usage":    map[string]any{"node": used},
		"rules":    map[string]any{"total": 2, "breached": 1, "cooling": 0, "unknown": 0}, "breached": []string{"all/cpu"},
	}
	body, _ := json.Marshal(map[string]any{
		"node": a.nodes[node], "bootID": boot(node), "agentStartedMillis": 1000, "sequence": beat + 1,
		"intervalSeconds": int(a.interval.Seconds()), "status": status,
	})
	return body
}

func boot(node int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", node) }
