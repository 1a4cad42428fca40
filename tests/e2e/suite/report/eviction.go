package report

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"
)

// evictionTimeout is how long an agent waits for the answer to a request to evict a pod.
const evictionTimeout = 8 * time.Second

// An Eviction is what an agent asks the leader for. With the same boot id and sequence it is the same request.
type Eviction struct {
	BootID    string `json:"bootID"`
	Sequence  int64  `json:"sequence"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	Rule      string `json:"rule"`
	Hash      string `json:"hash"`
}

// A Verdict is what the leader answers.
type Verdict struct {
	// Result is accepted, terminating, gone, budget, manyBudgets, wait, refused, away or unknown.
	Result, Why string
	// By is who asks for the wait: server, leader or budget.
	By         string
	WaitMillis int64
}

// NotLeading is what a replica answers that does not lead.
var NotLeading = fmt.Errorf("the replica does not lead")

// Evict asks a replica for the eviction of a pod.
func (c *Connection) Evict(running context.Context, token string, wish Eviction) (said Verdict, err error) {
	body, err := json.Marshal(wish)
	if err != nil {
		return said, err
	}
	code, content, err := c.post(running, evictionTimeout, "/v1/evict", token, body)
	switch {
	case err != nil:
		return said, err
	case code == http.StatusMisdirectedRequest:
		return said, NotLeading
	case code != http.StatusOK:
		return said, fmt.Errorf("it is answered %d: %s", code, content)
	}
	return said, json.Unmarshal(content, &said)
}

// EvictionPath is where the agent of a node asks the API server for the same.
func EvictionPath(node string) string {
	return "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics/" + node + "/evictions"
}
