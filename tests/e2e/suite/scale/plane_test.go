//go:build e2e

// Package scale tests the controller with many nodes. kwok simulates nodes and their pods, and the tests simulate the agents,
// with a real etcd, API server and controller. It needs no kubelet, and so no root.
package scale

import (
	"fmt"
	"testing"

	shared "plimsoll.dev/suite/plane"
)

// A plane is an API server with a controller; it is stopped at the end of the test.
type plane struct {
	*shared.Plane
	metrics    int
	controller *shared.Process
}

func start(t *testing.T) *plane {
	p := &plane{Plane: shared.Start(t, []string{"--max-requests-inflight=800", "--max-mutating-requests-inflight=400"}), metrics: shared.FreePort(t)}
	p.Run("kwok", "--kubeconfig="+p.Kubeconfig, "--manage-all-nodes=true", "--node-lease-duration-seconds=200")
	p.controller = p.Controller("admin", "--listen", fmt.Sprintf("127.0.0.1:%d", p.metrics))
	return p
}

// metric is the sum of the controller's series with this prefix.
func (p *plane) metric(series string) float64 {
	sum, _ := shared.Metric(p.metrics, series)
	return sum
}
