//go:build e2e

package chart

import (
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"plimsoll.dev/suite/plane"
)

// admission is the group of admission policies.
const admission = "admissionregistration.k8s.io"

func TestAgentsWriteTheConfiguredLoadSigns(t *testing.T) {
	for set, want := range map[string][]string{
		"placement.label.enabled=true":                                                    {"--load-label=true"},
		"placement.label.enabled=false":                                                   {"--load-label=false"},
		"placement.softTaint.enabled=true":                                                {"--load-label=true", "--soft-taint"},
		"placement.craneAnnotations.enabled=true":                                         {"--load-label=true", "--crane-annotations=Asia/Shanghai"},
		"placement.craneAnnotations.enabled=true,placement.craneAnnotations.timeZone=UTC": {"--load-label=true", "--crane-annotations=UTC"},
	} {
		rendered, err := render(t, "--set", set)
		if err != nil {
			t.Fatal(err)
		}
		var found []string
		for _, arg := range podsOf(t, rendered)["DaemonSet plimsoll-agent-v2"].Containers[0].Args {
			if strings.HasPrefix(arg, "--load-label") || strings.HasPrefix(arg, "--crane-annotations") || strings.HasPrefix(arg, "--soft-taint") {
				found = append(found, arg)
			}
		}
		if !slices.Equal(found, want) {
			t.Errorf("%s: agents run with %v", set, found)
		}
	}
}

func TestNothingOfPlacementIsRenderedByDefault(t *testing.T) {
	rendered, err := render(t)
	if err != nil {
		t.Fatal(err)
	}
	for _, object := range objects(t, rendered) {
		if name := object.GetName(); strings.HasSuffix(name, "-scheduler") || strings.HasSuffix(name, "-placement") {
			t.Errorf("%s %s is rendered", object.GetKind(), name)
		}
	}
}

func TestLoadsAreServedToSchedulersWhereEnabled(t *testing.T) {
	rendered, err := render(t, "--set", "placement.schedulerAPI.enabled=true,networkPolicies.enabled=true")
	if err != nil {
		t.Fatal(err)
	}
	controller := podsOf(t, rendered)["Deployment plimsoll-controller"].Containers[0]
	if !slices.Contains(controller.Args, "--scheduler-listen=[::]:8085") {
		t.Errorf("the controller runs with %v", controller.Args)
	}
	served := map[string]bool{}
	for _, object := range objects(t, rendered) {
		switch object.GetKind() + " " + object.GetName() {
		case "Service plimsoll-scheduler-api":
			ports, _, _ := unstructured.NestedSlice(object.Object, "spec", "ports")
			served["service"] = len(ports) == 1 && ports[0].(map[string]any)["targetPort"] == "scheduler"
		case "NetworkPolicy plimsoll-controller":
			ingress, _, _ := unstructured.NestedSlice(object.Object, "spec", "ingress")
			for _, rule := range ingress {
				port := rule.(map[string]any)["ports"].([]any)[0].(map[string]any)["port"]
				served["policy"] = served["policy"] || port == "scheduler"
			}
		}
	}
	if !served["service"] || !served["policy"] {
		t.Errorf("schedulers do not reach port 8085: %v", served)
	}
	rendered, err = render(t, "--set", "placement.schedulerAPI.enabled=true,placement.schedulerAPI.policy=kind: DynamicSchedulerPolicy")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(rendered, "--scheduler-policy=/etc/plimsoll/scheduler-policy/policy.yaml") || !strings.Contains(rendered, "    kind: DynamicSchedulerPolicy") {
		t.Error("crane-scheduler's policy does not reach the controller")
	}
	rendered, err = render(t)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(rendered, "scheduler-listen") || strings.Contains(rendered, "plimsoll-scheduler-api") {
		t.Error("loads are served by default")
	}
}

// TestPolledNamespacesAreReadableOnlyWhereEnabled: the values decide whether the controller polls, and which namespaces it may read.
func TestPolledNamespacesAreReadableOnlyWhereEnabled(t *testing.T) {
	const polling = "placement.polling.enabled=true,networkPolicies.enabled=true,networkPolicies.metricsFrom[0].podSelector.matchLabels.app=prometheus"
	for set, want := range map[string]string{
		"placement.polling.enabled=false": "",
		polling:                           "Role plimsoll/plimsoll-polling, Service plimsoll/plimsoll-agent",
		polling + ",placement.polling.services[0].namespace=monitoring,placement.polling.services[0].name=exporter": "Role monitoring/plimsoll-polling",
	} {
		rendered, err := render(t, "--set", set)
		if err != nil {
			t.Fatal(err)
		}
		var found []string
		for _, object := range objects(t, rendered) {
			switch object.GetKind() + " " + object.GetName() {
			case "Role plimsoll-polling", "Service plimsoll-agent":
				found = append(found, object.GetKind()+" "+object.GetNamespace()+"/"+object.GetName())
			case "NetworkPolicy plimsoll-agent":
				if ingress, _, _ := unstructured.NestedSlice(object.Object, "spec", "ingress"); len(ingress) != 2 {
					t.Errorf("%s: the controllers do not reach the agents: %v", set, ingress)
				}
			}
		}
		slices.Sort(found)
		if strings.Join(found, ", ") != want {
			t.Errorf("%s: %v", set, found)
		}
		controller := podsOf(t, rendered)["Deployment plimsoll-controller"].Containers[0]
		if slices.Contains(controller.Args, "--poll=/etc/plimsoll/polling/polling.yaml") != (want != "") {
			t.Errorf("%s: the controller runs with %v", set, controller.Args)
		}
	}
	for set, message := range map[string]string{
		"placement.polling.services[0].name=exporter":                                   "namespace",
		"placement.polling.interval=soon":                                               "interval",
		"placement.polling.services[0].namespace=a,placement.polling.services[0].nam=b": "name",
	} {
		if _, err := render(t, "--set", set); err == nil || !strings.Contains(err.Error(), message) {
			t.Errorf("%s is not rejected as expected: %v", set, err)
		}
	}
}

// TestSoftTaintIsRejectedWhereKarpenterRuns: package karpenter shows why.
func TestSoftTaintIsRejectedWhereKarpenterRuns(t *testing.T) {
	const taint, message = "placement.softTaint.enabled=true", "this cluster serves karpenter.sh. Karpenter takes a node with a PreferNoSchedule taint for closed"
	for _, api := range []string{"karpenter.sh/v1", "karpenter.sh/v1beta1", "karpenter.sh/v1/NodePool"} {
		_, err := render(t, "--api-versions", api, "--set", taint)
		if err == nil || !strings.Contains(err.Error(), message) || !strings.Contains(err.Error(), "--set placement.softTaint.allowWithKarpenter=true") {
			t.Errorf("%s: the soft taint is not rejected as expected: %v", api, err)
		}
		for _, accepted := range []string{taint + ",placement.softTaint.allowWithKarpenter=true", "placement.softTaint.allowWithKarpenter=true"} {
			if _, err := render(t, "--api-versions", api, "--set", accepted); err != nil {
				t.Errorf("%s: %s: %v", api, accepted, err)
			}
		}
	}
	if _, err := render(t, "--api-versions", "karpenter.shop/v1", "--set", taint); err != nil {
		t.Error(err)
	}
}

// TestPlacementByLoadNeedsTheLabel: without it all nodes would look alike to schedulers.
func TestPlacementByLoadNeedsTheLabel(t *testing.T) {
	for _, what := range []string{"admissionPolicy", "scheduler"} {
		_, err := render(t, "--set", "placement.label.enabled=false,placement."+what+".enabled=true")
		if err == nil || !strings.Contains(err.Error(), "read the label that placement.label.enabled=true makes agents write") {
			t.Errorf("%s without the label is not rejected as expected: %v", what, err)
		}
	}
}

func TestAdmissionPolicyHasTheVersionThatIsServed(t *testing.T) {
	for _, each := range []struct{ version, served, want string }{
		{"1.34.4", "", "v1beta1"},
		{"1.35.9", "", "v1beta1"},
		{"1.36.0-rc.0", "", "v1"},
		{"1.36.3-gke.100", "", "v1"},
		{"1.37.0", "", "v1"},
		{"1.35.0", "v1", "v1"},
		{"1.36.0", "v1beta1", "v1beta1"},
	} {
		args := []string{"--kube-version", each.version, "--set", "placement.admissionPolicy.enabled=true"}
		if each.served != "" {
			args = append(args, "--api-versions", admission+"/"+each.served+"/MutatingAdmissionPolicy")
		}
		rendered, err := render(t, args...)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, kind := range []string{"MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"} {
			if found := one(t, rendered, kind, "plimsoll-placement")["apiVersion"]; found != admission+"/"+each.want {
				t.Errorf("Kubernetes %s that serves %q: the version of %s is %s", each.version, each.served, kind, found)
			}
		}
	}
}

func TestSecondSchedulerHasTheVersionOfTheCluster(t *testing.T) {
	const digest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	for _, each := range []struct{ version, set, want string }{
		{"1.34.4", "", "registry.k8s.io/kube-scheduler:v1.34.4"},
		{"v1.35.2-eks-1a2b3c", "", "registry.k8s.io/kube-scheduler:v1.35.2"},
		{"1.36.3-gke.100", "", "registry.k8s.io/kube-scheduler:v1.36.3"},
		{"1.34.4+k3s1", "", "registry.k8s.io/kube-scheduler:v1.34.4"},
		{"1.34.4", ",placement.scheduler.image.tag=v1.33.9", "registry.k8s.io/kube-scheduler:v1.33.9"},
		{"1.34.4", ",placement.scheduler.image.repository=a.example/b", "a.example/b:v1.34.4"},
		{"1.34.4", ",placement.scheduler.image.tag=v1.33.9,placement.scheduler.image.digest=" + digest, "registry.k8s.io/kube-scheduler@" + digest},
	} {
		rendered, err := render(t, "--kube-version", each.version, "--set", "placement.scheduler.enabled=true"+each.set)
		if err != nil {
			t.Error(err)
			continue
		}
		if found := podsOf(t, rendered)["Deployment plimsoll-scheduler"].Containers[0].Image; found != each.want {
			t.Errorf("Kubernetes %s%s: the image is %s", each.version, each.set, found)
		}
	}
}

// TestSecondSchedulerIsReplacedWhenItsConfigurationChanges: kube-scheduler reads its configuration only when it starts.
func TestSecondSchedulerIsReplacedWhenItsConfigurationChanges(t *testing.T) {
	sums := map[string]bool{}
	for _, release := range []string{"plimsoll", "plimsoll", "other"} {
		rendered, err := run(t, "", plane.Helm(), "template", release, plane.Absolute(t, chart), "--namespace", "plimsoll", "--set", "placement.scheduler.enabled=true")
		if err != nil {
			t.Fatal(err)
		}
		for _, object := range objects(t, rendered) {
			if object.GetKind() == "Deployment" && strings.HasSuffix(object.GetName(), "-scheduler") {
				sum, _, _ := unstructured.NestedString(object.Object, "spec", "template", "metadata", "annotations", "plimsoll.dev/config")
				sums[sum] = true
			}
		}
	}
	if len(sums) != 2 || sums[""] {
		t.Errorf("unexpected checksums of two configurations: %v", sums)
	}
}

// TestSecondSchedulerIsBoundToTheRolesOfTheFirst, and to nothing else.
func TestSecondSchedulerIsBoundToTheRolesOfTheFirst(t *testing.T) {
	rendered, err := render(t, "--set", "placement.scheduler.enabled=true")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, object := range objects(t, rendered) {
		role, isBinding, _ := unstructured.NestedString(object.Object, "roleRef", "name")
		subjects, _, _ := unstructured.NestedSlice(object.Object, "subjects")
		if isBinding && subjects[0].(map[string]any)["name"] == "plimsoll-scheduler" {
			found = append(found, strings.TrimSpace(object.GetNamespace()+" "+role))
		}
	}
	slices.Sort(found)
	want := []string{"kube-system extension-apiserver-authentication-reader", "plimsoll plimsoll-scheduler", "system:kube-scheduler", "system:volume-scheduler"}
	if !slices.Equal(found, want) {
		t.Errorf("the second scheduler is bound to %q", found)
	}
}
