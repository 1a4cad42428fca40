//go:build e2e

package clients

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"os"
	"sync/atomic"
	"time"
)

const (
	// Agents expect to report again so soon. Real ones do so every 10 s.
	interval = 2 * time.Second
	// So long after the leader's last acknowledgement they renew their Leases with each heartbeat, as real ones do after 25 s.
	unheard = 5 * time.Second
)

// A line is what one agent reports to one replica by.
type line struct {
	url    string
	token  string
	client http.Client
	busy   atomic.Bool
}

// reportTo lets the agents report to these replicas from now on. They go on renewing their Leases where the leader does not hear.
func (a *agents) reportTo(replicas []*replica) {
	key := a.signer()
	lines := make([][]*line, len(a.nodes))
	for index, node := range a.nodes {
		token := a.token(key, node)
		for _, r := range replicas {
			transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true}
			client := http.Client{Transport: transport, Timeout: 5 * time.Second}
			lines[index] = append(lines[index], &line{url: "https://" + r.reports.address + "/v1/report", token: token, client: client})
		}
	}
	a.lock.Lock()
	defer a.lock.Unlock()
	a.lines, a.heard = lines, make([]atomic.Int64, len(a.nodes))
}

// reports lets an agent tell every replica of a heartbeat; it says whether the leader acknowledges such.
func (a *agents) reports(running context.Context, node int, beat int64) bool {
	a.lock.Lock()
	lines := a.lines
	a.lock.Unlock()
	if lines == nil {
		return false
	}
	body := a.reported(node, beat)
	for _, to := range lines[node] {
		// None waits for another: the next report is a newer one.
		if to.busy.CompareAndSwap(false, true) {
			go func() {
				defer to.busy.Store(false)
				if leading, err := to.post(running, body); err == nil && leading {
					a.heard[node].Store(time.Now().UnixNano())
				}
			}()
		}
	}
	return time.Since(time.Unix(0, a.heard[node].Load())) < unheard
}

func (l *line) post(running context.Context, body []byte) (leading bool, err error) {
	request, err := http.NewRequestWithContext(running, http.MethodPost, l.url, bytes.NewReader(body))
	if err != nil {
		return false, err
	}
	request.Header.Set("Authorization", "Bearer "+l.token)
	request.Header.Set("Content-Type", "application/json")
	response, err := l.client.Do(request)
	if err != nil {
		return false, err
	}
	defer response.Body.Close()
	var answer struct{ Leading bool }
	if response.StatusCode != http.StatusOK {
		return false, fmt.Errorf("%s", response.Status)
	}
	err = json.NewDecoder(response.Body).Decode(&answer)
	return answer.Leading, err
}

// reported is a report of what the Lease would say of the same heartbeat.
func (a *agents) reported(node int, beat int64) []byte {
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
		"intervalSeconds": int(interval.Seconds()), "status": status,
	})
	return body
}

func boot(node int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", node) }

// signer is the key with which the cluster signs tokens.
func (a *agents) signer() *ecdsa.PrivateKey {
	text, err := os.ReadFile(a.File("sa.key"))
	if err != nil {
		a.T.Fatal(err)
	}
	block, _ := pem.Decode(text)
	key, err := x509.ParseECPrivateKey(block.Bytes)
	if err != nil {
		a.T.Fatal(err)
	}
	return key
}

// token is that of the agent's pod on a node, good for an hour.
func (a *agents) token(key *ecdsa.PrivateKey, node string) string {
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		a.T.Fatal(err)
	}
	id := sha256.Sum256(public)
	part := func(value any) string {
		text, _ := json.Marshal(value)
		return base64.RawURLEncoding.EncodeToString(text)
	}
	now := time.Now().Unix()
	text := part(map[string]any{"alg": "ES256", "kid": base64.RawURLEncoding.EncodeToString(id[:])}) + "." + part(map[string]any{
		"aud": []string{"plimsoll.dev/report"}, "iss": "https://kubernetes.default.svc", "sub": "system:serviceaccount:default:plimsoll-agent",
		"iat": now, "nbf": now, "exp": now + 3600, "jti": node, "kubernetes.io": map[string]any{
			"namespace": "default", "node": map[string]any{"name": node, "uid": node},
			"serviceaccount": map[string]any{"name": "plimsoll-agent", "uid": "it"}, "pod": map[string]any{"name": "agent-" + node, "uid": "it"},
		},
	})
	digest := sha256.Sum256([]byte(text))
	r, s, err := ecdsa.Sign(rand.Reader, key, digest[:])
	if err != nil {
		a.T.Fatal(err)
	}
	signature := make([]byte, 64)
	r.FillBytes(signature[:32])
	s.FillBytes(signature[32:])
	return text + "." + base64.RawURLEncoding.EncodeToString(signature)
}
