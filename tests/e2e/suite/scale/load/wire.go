package main

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
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"sync/atomic"
	"time"
)

// patience is how long an agent waits for an answer.
const patience = 5 * time.Second

// A sender knows the replicas, and signs what lets an agent speak to them.
type sender struct {
	options options
	tls     *tls.Config
	key     *ecdsa.PrivateKey
	known   atomic.Pointer[[]string]
}

func newSender(options options) (*sender, error) {
	if !options.reports {
		return &sender{}, nil
	}
	authority, err := os.ReadFile(options.authority)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority)
	text, err := os.ReadFile(options.signer)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, fmt.Errorf("%s: no PEM", options.signer)
	}
	key, err := x509.ParseECPrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	s := &sender{options: options, key: key, tls: &tls.Config{RootCAs: roots, ServerName: options.serverName, NextProtos: []string{"h2"}}}
	known := lines(options.endpoints)
	s.known.Store(&known)
	go func() {
		for range time.Tick(time.Second) {
			if known := lines(options.endpoints); len(known) > 0 {
				s.known.Store(&known)
			}
		}
	}()
	return s, nil
}

func (s *sender) endpoints() []string { return *s.known.Load() }

// token is one as the kubelet's of a pod on this node, good for an hour.
func (s *sender) token(node string) (string, error) {
	if s.key == nil {
		return "", nil
	}
	now := time.Now().Unix()
	der, err := x509.MarshalPKIXPublicKey(&s.key.PublicKey)
	if err != nil {
		return "", err
	}
	id := sha256.Sum256(der)
	part := func(value any) string {
		text, _ := json.Marshal(value)
		return base64.RawURLEncoding.EncodeToString(text)
	}
	text := part(map[string]any{"alg": "ES256", "kid": base64.RawURLEncoding.EncodeToString(id[:])}) + "." + part(map[string]any{
		"aud": []string{"plimsoll.dev/report"}, "iss": s.options.issuer, "sub": s.options.subject, "iat": now, "nbf": now, "exp": now + 3600,
		"jti": node, "kubernetes.io": map[string]any{
			"namespace": "default", "node": map[string]any{"name": node, "uid": node},
			"serviceaccount": map[string]any{"name": "plimsoll-agent", "uid": "it"}, "pod": map[string]any{"name": "agent-" + node, "uid": "it"},
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

// A connection is one agent's to one replica.
type connection struct {
	url    string
	client http.Client
}

func (s *sender) connect(endpoint string) *connection {
	transport := &http.Transport{TLSClientConfig: s.tls.Clone(), ForceAttemptHTTP2: true, MaxConnsPerHost: 1, DisableCompression: true}
	return &connection{"https://" + endpoint + "/v1/report", http.Client{Transport: transport, Timeout: patience}}
}

type answer struct {
	code                int
	Leading             bool `json:"leading"`
	NextIntervalSeconds int  `json:"nextIntervalSeconds"`
}

func (a answer) word(err error) string {
	switch {
	case errors.Is(err, context.DeadlineExceeded) || os.IsTimeout(err):
		return "timeout"
	case err != nil:
		return "broken"
	case a.code == http.StatusOK && a.Leading:
		return "leader"
	case a.code == http.StatusOK:
		return "standby"
	}
	return strconv.Itoa(a.code)
}

func (c *connection) post(running context.Context, token string, body []byte) (answer, error) {
	request, err := http.NewRequestWithContext(running, http.MethodPost, c.url, bytes.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	request.Header.Set("Content-Type", "application/json")
	response, err := c.client.Do(request)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	said := answer{code: response.StatusCode}
	content, err := io.ReadAll(io.LimitReader(response.Body, 4096))
	if err == nil && said.code == http.StatusOK {
		err = json.Unmarshal(content, &said)
	}
	return said, err
}
