//go:build e2e

package plane

import (
	"context"
	"fmt"
	"os/exec"
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
	program := p.File("load")
	build := exec.Command("go", "build", "-o", program, "./scale/load")
	build.Dir = Absolute(p.T, "tests/e2e/suite")
	if out, err := build.CombinedOutput(); err != nil {
		p.T.Fatalf("go build: %v: %s", err, out)
	}
	return program
}

// LoadFlags are those by which the agents reach the replicas that were announced. They are known once a replica leads.
func (p *Plane) LoadFlags() []string {
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
	return []string{"--endpoints", p.File("endpoints"), "--server-name", ReportService + ".default.svc",
		"--ca", p.Write("report-ca.crt", bundle), "--sign-with", p.File("sa.key")}
}

// Announce tells the agents where the replicas are, as a Service's endpoints do.
func (p *Plane) Announce(addresses ...string) {
	p.T.Helper()
	p.Write("endpoints", strings.Join(addresses, "\n"))
}
