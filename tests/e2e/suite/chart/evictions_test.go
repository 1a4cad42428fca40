//go:build e2e

package chart

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// roles are the kinds and names of the objects with a rule for the resource.
func roles(t *testing.T, rendered, resource string) (found []string) {
	t.Helper()
	for _, object := range objects(t, rendered) {
		rules, _, _ := unstructured.NestedSlice(object.Object, "rules")
		for _, rule := range rules {
			if resources, _ := rule.(map[string]any)["resources"].([]any); slices.Contains(resources, any(resource)) {
				found = append(found, object.GetKind()+" "+object.GetName())
			}
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

func TestOnlyTheControllerMayEvict(t *testing.T) {
	for name, file := range combinations(t) {
		rendered, err := render(t, "--values", file)
		if err != nil {
			t.Fatal(err)
		}
		full, account := "plimsoll", "plimsoll-controller"
		if name == "names" {
			full, account = "qos", "qos-leader"
		}
		if found := roles(t, rendered, "pods/eviction"); fmt.Sprint(found) != "[ClusterRole "+full+"-controller]" {
			t.Errorf("%s: pods/eviction is allowed to %v", name, found)
		}
		if found := roles(t, rendered, "nodemetrics/evictions"); fmt.Sprint(found) != "[ClusterRole "+full+"-agent]" {
			t.Errorf("%s: nodemetrics/evictions is allowed to %v", name, found)
		}
		one(t, rendered, "ValidatingAdmissionPolicy", account+"-eviction")
		one(t, rendered, "ValidatingAdmissionPolicyBinding", account+"-eviction")
		if strings.Contains(rendered, "WebhookConfiguration") {
			t.Errorf("%s: the chart renders a webhook configuration", name)
		}
	}
}

func TestKubeSystemPodsAreEvictedOnlyIfConfigured(t *testing.T) {
	for set, refused := range map[string]bool{"evictionBudget.kubeSystem=false": true, "evictionBudget.kubeSystem=true": false} {
		rendered, err := render(t, "--set", set)
		if err != nil {
			t.Fatal(err)
		}
		policy := one(t, rendered, "ValidatingAdmissionPolicy", "plimsoll-controller-eviction")
		if strings.Contains(fmt.Sprint(policy), "request.namespace != 'kube-system'") != refused {
			t.Errorf("%s: the policy refuses evictions in kube-system: %t", set, !refused)
		}
	}
}

// TestAgentsReportAndRequestEvictionsWithoutMetricsAPI: their connection to the controller does not depend on the API.
func TestAgentsReportAndRequestEvictionsWithoutMetricsAPI(t *testing.T) {
	rendered, err := render(t, "--values", combinations(t)["least"], "--set", "networkPolicies.enabled=true")
	if err != nil {
		t.Fatal(err)
	}
	one(t, rendered, "Service", "plimsoll-report")
	// The Secret of the CA, and its bundle for agents.
	for _, made := range []string{"secrets", "configmaps"} {
		if found := roles(t, rendered, made); !slices.Contains(found, "Role plimsoll-controller") {
			t.Errorf("%s are allowed only to %v", made, found)
		}
	}
	for _, object := range objects(t, rendered) {
		if object.GetKind() == "APIService" || object.GetKind() == "Service" && object.GetName() == "plimsoll-metrics" {
			t.Errorf("%s %s is rendered although the metrics API is disabled", object.GetKind(), object.GetName())
		}
	}
	container := func(kind, name string) map[string]any {
		return field[[]any](t, one(t, rendered, kind, name), "spec", "template", "spec", "containers")[0].(map[string]any)
	}
	controller, agent := container("Deployment", "plimsoll-controller"), container("DaemonSet", "plimsoll-agent-v2")
	if listens := option(controller, "report-listen"); listens != "[::]:8444" {
		t.Errorf("the controller listens for reports on %q", listens)
	}
	if listens := option(controller, "metrics-api-listen"); listens != "" {
		t.Errorf("the controller serves the metrics API on %s although it is disabled", listens)
	}
	if args := field[[]any](t, controller, "args"); !slices.Contains(args, any("--no-eviction-budgets")) {
		t.Errorf("eviction budgets are not disabled: %v", args)
	}
	if service := option(agent, "report-service"); !strings.HasPrefix(service, "plimsoll-report") {
		t.Errorf("the agent reports to service %q", service)
	}
	ports := fmt.Sprint(field[[]any](t, one(t, rendered, "NetworkPolicy", "plimsoll-controller"), "spec", "ingress"))
	if !strings.Contains(ports, "port:report") || strings.Contains(ports, "port:https") {
		t.Errorf("the NetworkPolicy of the controller allows %s", ports)
	}
}
