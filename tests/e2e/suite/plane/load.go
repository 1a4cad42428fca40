//go:build e2e

package plane

import (
	"context"
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ReportService is the Service that agents send their reports to.
const ReportService = "plimsoll-report"

// BuildLoad builds the program that simulates the agents of many nodes, and creates the objects that agents need.
func (p *Plane) BuildLoad() string {
	p.T.Helper()
	p.Apply(`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"plimsoll-node-lease"}}`,
		`{"apiVersion":"v1","kind":"ServiceAccount","metadata":{"name":"plimsoll-agent","namespace":"default"}}`)
	return p.build("./scale/load")
}

// LoadFlags are the flags with which that program reaches the published endpoints. It waits until a replica leads.
func (p *Plane) LoadFlags() []string {
	p.T.Helper()
	return []string{"--endpoints", p.File("endpoints"), "--server-name", ReportService + ".default.svc",
		"--ca", p.Write("report-ca.crt", p.ReportAuthority()), "--sign-with", p.SigningKey()}
}

// ReportAuthority is the CA bundle with which agents verify the replicas. It waits until a replica leads.
func (p *Plane) ReportAuthority() string {
	p.T.Helper()
	bundle := ""
	p.Eventually(time.Minute, "the leader publishes its CA bundle", func() error {
		object, err := p.Kube.CoreV1().ConfigMaps("default").Get(context.Background(), ReportService+"-ca", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if bundle = object.Data["ca.crt"]; bundle == "" {
			return fmt.Errorf("the CA bundle is empty")
		}
		return nil
	})
	return bundle
}

// SigningKey is the file with the key that signs service account tokens.
func (p *Plane) SigningKey() string { return p.File("sa.key") }

// PublishEndpoints publishes the addresses of the replicas to the agents, as a Service's endpoints do.
func (p *Plane) PublishEndpoints(addresses ...string) {
	p.T.Helper()
	p.Write("endpoints", strings.Join(addresses, "\n"))
}
