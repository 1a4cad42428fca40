package report

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"
)

// evictionTimeout is how long an agent waits for the answer to an eviction request.
const evictionTimeout = 8 * time.Second

// An Eviction is an agent's eviction request. One with the same boot ID and sequence is a repetition.
type Eviction struct {
	BootID    string `json:"bootID"`
	Sequence  int64  `json:"sequence"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	Rule      string `json:"rule"`
	Hash      string `json:"hash"`
}

// A Verdict is the leader's answer.
type Verdict struct {
	// Result is accepted, terminating, gone, budget, manyBudgets, wait, refused, away or unknown.
	Result, Why string
	// By is what causes the wait: server, leader or budget.
	By         string
	WaitMillis int64
}

// NotLeading is the error for the answer of a standby.
var NotLeading = fmt.Errorf("the replica does not lead")

// Evict sends an eviction request to a replica.
func (c *Connection) Evict(running context.Context, token string, eviction Eviction) (verdict Verdict, err error) {
	body, err := json.Marshal(eviction)
	if err != nil {
		return verdict, err
	}
	code, content, err := c.post(running, evictionTimeout, "/v1/evict", token, body)
	switch {
	case err != nil:
		return verdict, err
	case code == http.StatusMisdirectedRequest:
		return verdict, NotLeading
	case code != http.StatusOK:
		return verdict, fmt.Errorf("unexpected response %d: %s", code, content)
	}
	return verdict, json.Unmarshal(content, &verdict)
}

// EvictionPath is the path of the API server for eviction requests of a node's agent.
func EvictionPath(node string) string {
	return "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics/" + node + "/evictions"
}
