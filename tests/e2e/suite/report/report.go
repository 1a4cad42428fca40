// Package report sends requests to a controller as agents do, with tokens that it signs itself with the cluster's signing key.
package report

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
	"io"
	"net/http"
	"os"
	"time"
)

const (
	issuer  = "https://kubernetes.default.svc"
	account = "plimsoll-agent"
	// Tokens are valid for an hour and were issued 5 minutes ago, like pods' tokens, which the kubelet renews in time.
	age, life = 5 * time.Minute, time.Hour
	// AnswerTimeout is how long an agent waits for an answer.
	AnswerTimeout = 5 * time.Second
)

// A Signer signs tokens as the API server does.
type Signer struct {
	key *ecdsa.PrivateKey
	id  string
}

// NewSigner reads the cluster's signing key, an EC key in PEM.
func NewSigner(file string) (*Signer, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, fmt.Errorf("%s: no PEM", file)
	}
	key, err := x509.ParseECPrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return nil, err
	}
	id := sha256.Sum256(public)
	return &Signer{key, base64.RawURLEncoding.EncodeToString(id[:])}, nil
}

// Token is a token of the agent's pod on a node, in the namespace default.
func (s *Signer) Token(node string) (string, error) {
	part := func(value any) string {
		text, _ := json.Marshal(value)
		return base64.RawURLEncoding.EncodeToString(text)
	}
	issued := time.Now().Add(-age)
	text := part(map[string]any{"alg": "ES256", "kid": s.id}) + "." + part(map[string]any{
		"aud": []string{"plimsoll.dev/report"}, "iss": issuer, "sub": "system:serviceaccount:default:" + account,
		"iat": issued.Unix(), "nbf": issued.Unix(), "exp": issued.Add(life).Unix(), "jti": node, "kubernetes.io": map[string]any{
			"namespace": "default", "node": map[string]any{"name": node, "uid": node},
			"serviceaccount": map[string]any{"name": account, "uid": "it"}, "pod": map[string]any{"name": "agent-" + node, "uid": "it"},
		},
	})
	digest := sha256.Sum256([]byte(text))
	r, v, err := ecdsa.Sign(rand.Reader, s.key, digest[:])
	if err != nil {
		return "", err
	}
	signature := make([]byte, 64)
	r.FillBytes(signature[:32])
	v.FillBytes(signature[32:])
	return text + "." + base64.RawURLEncoding.EncodeToString(signature), nil
}

// A Connection is one agent's connection to one replica.
type Connection struct {
	address string
	client  http.Client
}

// Connect prepares a connection, which is opened by the first request.
func Connect(replica string, config *tls.Config) *Connection {
	transport := &http.Transport{TLSClientConfig: config.Clone(), ForceAttemptHTTP2: true, MaxConnsPerHost: 1, DisableCompression: true}
	return &Connection{"https://" + replica, http.Client{Transport: transport}}
}

// An Answer is a replica's answer to a report.
type Answer struct {
	Code                int
	Leading             bool `json:"leading"`
	NextIntervalSeconds int  `json:"nextIntervalSeconds"`
}

// Post sends a report.
func (c *Connection) Post(running context.Context, token string, body []byte) (Answer, error) {
	code, content, err := c.post(running, AnswerTimeout, "/v1/report", token, body)
	answer := Answer{Code: code}
	if err == nil && code == http.StatusOK {
		err = json.Unmarshal(content, &answer)
	}
	return answer, err
}

// post sends a body, and returns the status and body of the response.
func (c *Connection) post(running context.Context, limit time.Duration, path, token string, body []byte) (int, []byte, error) {
	waiting, end := context.WithTimeout(running, limit)
	defer end()
	request, err := http.NewRequestWithContext(waiting, http.MethodPost, c.address+path, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	request.Header.Set("Content-Type", "application/json")
	response, err := c.client.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	content, err := io.ReadAll(io.LimitReader(response.Body, 16<<10))
	return response.StatusCode, content, err
}
