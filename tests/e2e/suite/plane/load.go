//go:build e2e

package plane

import (
	"context"
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ReportService is the Service by whose name agents know the replicas that they report to.
const ReportService = "plimsoll-report"

// BuildLoad builds what stands for the agents of many nodes, and makes the objects that agents need.
func (p *Plane) BuildLoad() string {
	p.T.Helper()
	p.Apply(`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"plimsoll-node-lease"}}`,
		`{"apiVersion":"v1","kind":"ServiceAccount","metadata":{"name":"plimsoll-agent","namespace":"default"}}`)
	return p.build("./scale/load")
}

// LoadFlags are those by which the agents reach the replicas that were announced. They are known once a replica leads.
func (p *Plane) LoadFlags() []string {
	p.T.Helper()
	return []string{"--endpoints", p.File("endpoints"), "--server-name", ReportService + ".default.svc",
		"--ca", p.Write("report-ca.crt", p.ReportAuthority()), "--sign-with", p.SigningKey()}
}

// ReportAuthority is by which agents know the replicas. It is known once a replica leads.
func (p *Plane) ReportAuthority() string {
	p.T.Helper()
	bundle := ""
	p.Eventually(time.Minute, "the leader tells its authority", func() error {
		object, err := p.Kube.CoreV1().ConfigMaps("default").Get(context.Background(), ReportService+"-ca", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if bundle = object.Data["ca.crt"]; bundle == "" {
			return fmt.Errorf("it is empty")
		}
		return nil
	})
	return bundle
}

// SigningKey is the file of the key with which the cluster signs tokens.
func (p *Plane) SigningKey() string { return p.File("sa.key") }

// Announce tells the agents where the replicas are, as a Service's endpoints do.
func (p *Plane) Announce(addresses ...string) {
	p.T.Helper()
	p.Write("endpoints", strings.Join(addresses, "\n"))
}
