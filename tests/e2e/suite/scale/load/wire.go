package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/http"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"plimsoll.dev/suite/report"
)

// A sender has the replicas' addresses, and creates agents' tokens.
type sender struct {
	tls    *tls.Config
	signer *report.Signer
	known  atomic.Pointer[[]string]
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
	signer, err := report.NewSigner(options.signer)
	if err != nil {
		return nil, err
	}
	s := &sender{signer: signer, tls: &tls.Config{RootCAs: roots, ServerName: options.serverName, NextProtos: []string{"h2"}}}
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

// token is a report token for this node, empty if agents do not report.
func (s *sender) token(node string) (string, error) {
	if s.signer == nil {
		return "", nil
	}
	return s.signer.Token(node)
}

// kind is the kind under which an answer is counted.
func kind(answer report.Answer, err error) string {
	switch {
	case errors.Is(err, context.DeadlineExceeded) || os.IsTimeout(err):
		return "timeout"
	case err != nil:
		return "broken"
	case answer.Code == http.StatusOK && answer.Leading:
		return "leader"
	case answer.Code == http.StatusOK:
		return "standby"
	}
	return strconv.Itoa(answer.Code)
}
