//go:build e2e

package suite

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

var nodeMetrics = schema.GroupVersionResource{Group: "metrics.plimsoll.dev", Version: "v1alpha1", Resource: "nodemetrics"}

// TestAgentsReportDirectlyAndRenewLeasesRarely shows that the load of a node reaches the API by reports alone. It starts no pods
// and locks no node: other scenes may restart agents meanwhile.
func TestAgentsReportDirectlyAndRenewLeasesRarely(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		eventually(t, 5*time.Minute, "the NodeMetric has data that only reports contain", func() error { return reported(node) })
		// Within the minute between two renewals.
		before := seen{}
		eventually(t, 5*time.Minute, "there is a new measurement while the Lease is unchanged, and valid for 4 minutes", func() error {
			now, err := readNode(node)
			if err != nil {
				return err
			}
			if now.seconds == 240 && now.renewed.Equal(before.renewed) && now.measured.After(before.measured) {
				return nil
			}
			if !now.renewed.Equal(before.renewed) {
				before = now
			}
			return fmt.Errorf("first %v, now %v", before, now)
		})
	})
}

// seen has the validity and renewal of a node's Lease, and the time of its NodeMetric.
type seen struct {
	seconds           int32
	renewed, measured time.Time
}

func readNode(node string) (seen, error) {
	lease, err := kube.CoordinationV1().Leases("plimsoll-node-lease").Get(background, node, metav1.GetOptions{})
	if err != nil {
		return seen{}, err
	}
	metric, err := nodeMetric(node)
	if err != nil {
		return seen{}, err
	}
	text, _, _ := unstructured.NestedString(metric.Object, "status", "timestamp")
	measured, err := time.Parse(time.RFC3339, text)
	return seen{*lease.Spec.LeaseDurationSeconds, lease.Spec.RenewTime.Time, measured}, err
}

func nodeMetric(node string) (*unstructured.Unstructured, error) {
	return objects.Resource(nodeMetrics).Get(background, node, metav1.GetOptions{})
}

// reported returns an error unless a NodeMetric has percentiles, pressure, the busiest pods, and a condition that shows that the agent reports.
func reported(node string) error {
	metric, err := nodeMetric(node)
	if err != nil {
		return err
	}
	for _, path := range [][]string{{"windows", "cpu", "last5m", "p95"}, {"pressure", "cpu", "some", "avg10"}, {"topPods"}, {"usage", "pods", "cpu"}} {
		if _, known, _ := unstructured.NestedFieldNoCopy(metric.Object, append([]string{"status"}, path...)...); !known {
			return fmt.Errorf("no %s: %v", strings.Join(path, "."), metric.Object["status"])
		}
	}
	conditions, _, _ := unstructured.NestedSlice(metric.Object, "status", "conditions")
	for _, each := range conditions {
		if condition := each.(map[string]any); condition["type"] == "Healthy" && condition["status"] == "True" && condition["reason"] == "AgentReporting" {
			return nil
		}
	}
	return fmt.Errorf("conditions are %v", conditions)
}
