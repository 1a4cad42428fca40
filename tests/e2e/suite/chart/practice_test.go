//go:build e2e

package chart

import (
	"fmt"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// waived are kube-score checks that this chart does not follow, and why.
var waived = map[string]string{
	"container-image-pull-policy":                   "a version's tag and a digest are always the same image",
	"container-ephemeral-storage-request-and-limit": "nothing is written: the root file system is read-only, and there is no emptyDir",
	"container-security-context-user-group-id":      "the agent is root, as cgroup files are root's; TestDeploymentsRunAsNonRoot checks the others",
	"pod-networkpolicy":                             "off by default: networkPolicies.enabled",
}

// checkPractice runs kube-score on the rendered objects. There are no CPU limits: the process that lifts throttles must not be throttled.
func checkPractice(t *testing.T, rendered string) {
	t.Helper()
	args := []string{"score", "--output-format", "ci", "--ignore-container-cpu-limit"}
	for check := range waived {
		args = append(args, "--ignore-test", check)
	}
	if _, err := run(t, rendered, "kube-score", append(args, "-")...); err != nil {
		t.Error(err)
	}
}

// checkMonitoring decodes an object of the Prometheus operator strictly.
func checkMonitoring(t *testing.T, object unstructured.Unstructured) {
	t.Helper()
	var into any
	switch object.GetKind() {
	case monitoring.PodMonitorsKind:
		into = &monitoring.PodMonitor{}
	case monitoring.ServiceMonitorsKind:
		into = &monitoring.ServiceMonitor{}
	case monitoring.PrometheusRuleKind:
		into = &monitoring.PrometheusRule{}
	default:
		return
	}
	text, err := object.MarshalJSON()
	if err == nil {
		err = strict(text, into)
	}
	if err != nil {
		t.Errorf("%s %s: %v", object.GetKind(), object.GetName(), err)
	}
}

func TestDeploymentsRunAsNonRoot(t *testing.T) {
	rendered, err := render(t, "--set", "placement.scheduler.enabled=true")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, object := range objects(t, rendered) {
		if object.GetKind() != "Deployment" {
			continue
		}
		user, _, _ := unstructured.NestedFieldNoCopy(object.Object, "spec", "template", "spec", "securityContext", "runAsUser")
		if fmt.Sprint(user) != "65532" {
			t.Errorf("%s runs as %v", object.GetName(), user)
		}
		found++
	}
	if found != 2 {
		t.Errorf("the chart renders %d Deployments, not 2", found)
	}
}
