//go:build e2e

// Package chart shows what the Helm chart renders and refuses, without a cluster, and on an API server what installing it does.
package chart

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"plimsoll.dev/suite/plane"
)

const chart = "charts/plimsoll"

// run runs a program with an input: its output, and what it complains of.
func run(t *testing.T, input, name string, args ...string) (string, error) {
	t.Helper()
	var out, complaint bytes.Buffer
	command := exec.Command(plane.Tool(t, name), args...)
	command.Env = append(os.Environ(), "HOME="+t.TempDir())
	command.Stdin, command.Stdout, command.Stderr = strings.NewReader(input), &out, &complaint
	if err := command.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w: %s%s", name, strings.Join(args, " "), err, complaint.String(), out.String())
	}
	return out.String(), nil
}

// render renders the chart as release plimsoll in namespace plimsoll.
func render(t *testing.T, args ...string) (string, error) {
	t.Helper()
	return run(t, "", plane.Helm(), append([]string{"template", "plimsoll", plane.Absolute(t, chart), "--namespace", "plimsoll"}, args...)...)
}

// combinations are the files of values that the chart is checked with, by name.
func combinations(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob(plane.Absolute(t, chart+"/ci/*-values.yaml"))
	if err != nil || len(files) < 6 {
		t.Fatalf("files of values: %v (%v)", files, err)
	}
	found := map[string]string{}
	for _, file := range files {
		found[strings.TrimSuffix(filepath.Base(file), "-values.yaml")] = file
	}
	return found
}

// refused are values that there are not, each with what the answer has to say.
var refused = []struct{ set, says string }{
	{"controller.replica=3", "at '/controller': additional properties 'replica' not allowed"},
	{"controller.replica=3", "invalid propertyName 'replica'\n  - at '': value must be 'controller.replicas'"},
	{"controller.Replicas=3", "value must be 'controller.replicas'"},
	{"controller.maxUnscheduleable=10%", "value must be 'controller.maxUnschedulable'"},
	{"controler.replicas=3", "invalid propertyName 'controler'\n  - at '': value must be 'controller'"},
	{"replicas=3", "invalid propertyName 'replicas'\n  - at '': value must be 'controller.replicas'"},
	{"resources.limits.cpu=1", "value must be one of 'agent.resources', 'controller.resources'"},
	{"imageTag=1", "value must be 'image'"},
	{"imagePullSecret=registry", "value must be 'imagePullSecrets'"},
	{"colour=red", "value must be one of 'agent', 'controller', 'crds',"},
	{"image.version=1", "value must be one of 'image.digest', 'image.pullPolicy', 'image.repository', 'image.tag'"},
	{"metricsApi.enabled=false", "value must be 'metricsAPI'"},
	{"monitoring.alerts.label.release=a", "value must be 'monitoring.alerts.labels'"},
	{"agent.layouts[0].cgroups=v2,agent.layouts[0].name=a,agent.layouts[0].kubepods=b", "value must be 'agent.layouts[].cgroup'"},
	{"agent.resources.limit.memory=1Gi", "value must be 'limits'"},
	{"agent.seLinuxOptions.typ=spc_t", "value must be 'agent.seLinuxOptions.type'"},
	{"agent.selinuxOptions.type=spc_t", "value must be 'agent.seLinuxOptions'"},
	{"controller.tolerations[0].operater=Exists", "value must be 'operator'"},
	{"metricsAPI.certmanager.enabled=true", "value must be 'metricsAPI.certManager'"},
	{"metricsAPI.certManager.issuer=a", "value must be 'metricsAPI.certManager.issuerRef'"},
	{"metricsAPI.certManager.issuerRef.kind=ClusterIssuer", "at '/metricsAPI/certManager/issuerRef': properties 'name' required, if 'kind' exists"},
	{"controller.replicas=two", "at '/controller/replicas': got string, want integer"},
	{"controller.replicas=0", "at '/controller/replicas': minimum: got 0, want 1"},
	{"controller.maxUnschedulable=101%", "at '/controller/maxUnschedulable': '101%' does not match"},
	{"agent.sampleInterval=fast", "at '/agent/sampleInterval': 'fast' does not match"},
	{"agent.layouts[0].cgroup=v3,agent.layouts[0].name=a,agent.layouts[0].kubepods=b", "at '/agent/layouts/0/cgroup': value must be one of 'v1', 'v2'"},
	{"agent.layouts[0].cgroup=v2", "at '/agent/layouts/0': missing properties 'name', 'kubepods'"},
	{"image.digest=abc", "at '/image/digest': 'abc' does not match"},
	{"image.pullPolicy=Sometimes", "value must be one of 'Always', 'IfNotPresent', 'Never'"},
	{"policies.preset=aggressive", "at '/policies/preset': value must be one of 'none', 'preview', 'conservative'"},
	{"agent=null", "missing property 'agent'"},
	{"leases.namespace=kube-node-lease", "leases.namespace: kube-node-lease is Kubernetes' own; name another"},
	{"agent.layouts[0].name=a,agent.layouts[0].cgroup=v2,agent.layouts[0].kubepods=b,agent.layouts[1].name=a,agent.layouts[1].cgroup=v1,agent.layouts[1].kubepods=b",
		"agent.layouts: two are named a"},
}

func TestValuesThatThereAreNotAreRefusedWithTheOnesThatWereMeant(t *testing.T) {
	for _, value := range refused {
		_, err := render(t, "--set", value.set)
		if err == nil {
			t.Errorf("%s is taken", value.set)
		} else if !strings.Contains(err.Error(), value.says) {
			t.Errorf("%s: the answer is not %q: %v", value.set, value.says, err)
		}
	}
}

func TestAnOldKubernetesIsRefused(t *testing.T) {
	_, err := render(t, "--kube-version", "1.32.9")
	if err == nil || !strings.Contains(err.Error(), "chart requires kubeVersion: >=1.33.0-0") {
		t.Errorf("the answer is %v", err)
	}
	for _, supported := range []string{"1.33.0", "1.34.4-gke.100", "1.36.1"} {
		if _, err := render(t, "--kube-version", supported); err != nil {
			t.Error(err)
		}
	}
}

func TestEveryCombinationIsWhatKubernetesTakesAndKeepsToGoodPractice(t *testing.T) {
	for name, file := range combinations(t) {
		t.Run(name, func(t *testing.T) {
			if out, err := run(t, "", plane.Helm(), "lint", "--strict", "--quiet", plane.Absolute(t, chart), "--values", file); err != nil {
				t.Fatal(err, out)
			}
			objects, err := render(t, "--values", file)
			if err != nil {
				t.Fatal(err)
			}
			checkSchemas(t, objects)
			checkPractice(t, objects)
		})
	}
}

func TestPodsAreMadeOnNodesOfLinuxThatTheValuesSelect(t *testing.T) {
	rendered, err := render(t, "--values", combinations(t)["nodes"])
	if err != nil {
		t.Fatal(err)
	}
	pods := 0
	for _, object := range objects(t, rendered) {
		spec, found, _ := unstructured.NestedMap(object.Object, "spec", "template", "spec")
		if !found {
			continue
		}
		pods++
		labels := field[map[string]any](t, spec, "nodeSelector")
		if len(labels) != 2 || labels["kubernetes.io/os"] != "linux" {
			t.Errorf("the nodes of %s %s are %v", object.GetKind(), object.GetName(), labels)
		}
	}
	if pods != 4 {
		t.Errorf("%d kinds of pods", pods)
	}
}

func TestAQuotaSpeaksOfTheSystemsClassesAndOfNoOther(t *testing.T) {
	for classes, want := range map[string]string{
		"": "[system-cluster-critical system-node-critical]",
		"agent.priorityClassName=system-cluster-critical":                "[system-cluster-critical]",
		"agent.priorityClassName=mine,controller.priorityClassName=":     "[]",
		"agent.priorityClassName=,controller.priorityClassName=system-a": "[system-a]",
	} {
		rendered, err := render(t, "--set", classes)
		if err != nil {
			t.Fatal(err)
		}
		found := []any{}
		for _, object := range objects(t, rendered) {
			if object.GetKind() != "ResourceQuota" {
				continue
			}
			selected, _, _ := unstructured.NestedSlice(object.Object, "spec", "scopeSelector", "matchExpressions")
			found = selected[0].(map[string]any)["values"].([]any)
		}
		if fmt.Sprint(found) != want {
			t.Errorf("%s: the quota speaks of %v, not of %s", classes, found, want)
		}
	}
}

func TestAnImageIsNamedByItsDigestOnly(t *testing.T) {
	objects, err := render(t, "--values", combinations(t)["everything"], "--set", "image.tag=latest")
	if err != nil {
		t.Fatal(err)
	}
	images := 0
	for _, line := range strings.Split(objects, "\n") {
		if image, found := strings.CutPrefix(strings.TrimSpace(line), "image: "); found {
			images++
			if !strings.HasPrefix(image, `"registry.example/plimsoll@sha256:0123456789abcdef`) {
				t.Errorf("the image is %s", image)
			}
		}
	}
	if images < 2 {
		t.Errorf("%d images", images)
	}
}
