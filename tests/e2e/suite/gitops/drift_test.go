//go:build e2e

package gitops

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"plimsoll.dev/suite/plane"
)

// run returns the objects that a tool of the test cluster prints.
func run(t *testing.T, name string, args ...string) []unstructured.Unstructured {
	t.Helper()
	command := exec.Command(plane.Tool(t, name), args...)
	command.Env = append(command.Environ(), "HOME="+t.TempDir())
	out, err := command.Output()
	if err != nil {
		t.Fatalf("%s %v: %v", name, args, err)
	}
	found, err := plane.Objects(string(out))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// rendered are the objects of the chart with one of its values files.
func rendered(t *testing.T, values string) []unstructured.Unstructured {
	t.Helper()
	directory := plane.Absolute(t, "charts/plimsoll")
	return run(t, plane.Helm(), "template", "plimsoll", directory, "--namespace", "plimsoll", "--values", filepath.Join(directory, "ci", values+"-values.yaml"))
}

// resource is the plural of a kind, for NodeQOS nodeqoss.
func resource(kind string) string {
	kind = strings.ToLower(kind)
	if strings.HasSuffix(kind, "policy") {
		return strings.TrimSuffix(kind, "y") + "ies"
	}
	return kind + "s"
}

// TestNothingOfOursWritesWhatTheChartRenders: otherwise Argo CD and Flux would report a difference, or revert it. The exception is a field that
// no manifest has: the caBundle of the APIService.
func TestNothingOfOursWritesWhatTheChartRenders(t *testing.T) {
	writes := []string{"create", "update", "patch", "delete", "deletecollection", "*"}
	roles := 0
	for _, values := range []string{"default", "conventions", "names", "everything", "cert-manager"} {
		all := rendered(t, values)
		for _, role := range all {
			component := role.GetLabels()["app.kubernetes.io/component"]
			if !strings.HasSuffix(role.GetKind(), "Role") || component != "agent" && component != "controller" {
				continue
			}
			roles++
			var read rbac.Role
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(role.Object, &read); err != nil {
				t.Fatal(err)
			}
			for _, rule := range read.Rules {
				if !slices.ContainsFunc(rule.Verbs, func(verb string) bool { return slices.Contains(writes, verb) }) {
					continue
				}
				for _, object := range all {
					if what := may(rule, role, object); what != "" && what != "apiservices v1alpha1.metrics.plimsoll.dev" {
						t.Errorf("%s: %s %s allows changes of %s, which the chart renders", values, role.GetKind(), role.GetName(), what)
					}
				}
			}
		}
		for _, object := range all {
			if _, found, _ := unstructured.NestedString(object.Object, "spec", "caBundle"); found {
				t.Errorf("%s %s has a caBundle", object.GetKind(), object.GetName())
			}
		}
	}
	if roles < 20 {
		t.Errorf("only %d roles were found", roles)
	}
}

// may is the resource and name of the object, if a rule of a role matches it.
func may(rule rbac.PolicyRule, role, object unstructured.Unstructured) string {
	group, _, hasGroup := strings.Cut(object.GetAPIVersion(), "/")
	if !hasGroup {
		group = ""
	}
	here := role.GetNamespace() == "" || role.GetNamespace() == object.GetNamespace()
	named := len(rule.ResourceNames) == 0 || slices.Contains(rule.ResourceNames, object.GetName())
	if plural := resource(object.GetKind()); here && named && slices.Contains(rule.APIGroups, group) && slices.Contains(rule.Resources, plural) {
		return fmt.Sprint(plural, " ", object.GetName())
	}
	return ""
}

// TestKustomizeBuildsTheChart: the base has the objects of the chart, the namespace, and the ConfigMap of the emergency stop, which with Helm
// a hook creates.
func TestKustomizeBuildsTheChart(t *testing.T) {
	names := func(objects []unstructured.Unstructured) (found []string) {
		for _, object := range objects {
			found = append(found, object.GetKind()+" "+object.GetNamespace()+"/"+object.GetName())
			if object.GetLabels()["app.kubernetes.io/managed-by"] == "Helm" {
				found = append(found, "managed by Helm: "+object.GetName())
			}
		}
		slices.Sort(found)
		return found
	}
	chart := rendered(t, "default")
	for i := range chart {
		labels := chart[i].GetLabels()
		delete(labels, "app.kubernetes.io/managed-by")
		chart[i].SetLabels(labels)
	}
	want := append(names(chart), "Namespace /plimsoll", "ConfigMap plimsoll-node-lease/plimsoll-stop")
	slices.Sort(want)
	for _, directory := range []string{"base", "example"} {
		if found := names(run(t, "kubectl", "kustomize", plane.Absolute(t, "deploy/kustomize/"+directory))); !slices.Equal(found, want) {
			t.Errorf("%s has\n%v\ninstead of\n%v", directory, found, want)
		}
	}
}

func TestTheExampleOverlayChangesTheBase(t *testing.T) {
	images := map[string]string{}
	for _, object := range run(t, "kubectl", "kustomize", plane.Absolute(t, "deploy/kustomize/example")) {
		containers, found, _ := unstructured.NestedSlice(object.Object, "spec", "template", "spec", "containers")
		if !found {
			continue
		}
		container := containers[0].(map[string]any)
		images[object.GetKind()] = fmt.Sprint(container["image"])
		switch limit, _, _ := unstructured.NestedString(container, "resources", "limits", "memory"); {
		case object.GetKind() == "Deployment" && limit != "1Gi":
			t.Errorf("the limit of the controller is %s", limit)
		case object.GetKind() == "DaemonSet" && !slices.Contains(container["args"].([]any), any("--pod-metrics")):
			t.Errorf("the arguments of the agent are %v", container["args"])
		}
		if selector, _, _ := unstructured.NestedStringMap(object.Object, "spec", "selector", "matchLabels"); selector["team"] != "" {
			t.Errorf("%s %s selects by a label of the overlay", object.GetKind(), object.GetName())
		}
	}
	const image = "registry.example/plimsoll:0.1.0"
	if images["Deployment"] != image || images["DaemonSet"] != image {
		t.Errorf("the images are %v", images)
	}
}

// TestTheExamplesOfThePageRender renders the chart with the values of the examples for Argo CD and Flux.
func TestTheExamplesOfThePageRender(t *testing.T) {
	page, err := os.ReadFile(plane.Absolute(t, "docs/gitops.md"))
	if err != nil {
		t.Fatal(err)
	}
	examples := strings.Split(string(page), "```yaml\n")[1:]
	for path, example := range map[string]string{"source.helm.valuesObject": examples[0], "values": examples[1]} {
		var object map[string]any
		text, _, _ := strings.Cut(example, "```")
		if err := yaml.UnmarshalStrict([]byte(text), &object); err != nil {
			t.Fatal(err)
		}
		values, found, err := unstructured.NestedMap(object, append([]string{"spec"}, strings.Split(path, ".")...)...)
		if err != nil || !found {
			t.Fatalf("no %s in %s", path, text)
		}
		written, err := yaml.Marshal(values)
		if err != nil {
			t.Fatal(err)
		}
		file := plane.WriteFile(t, filepath.Join(t.TempDir(), "values.yaml"), string(written))
		stops := 0
		for _, object := range run(t, plane.Helm(), "template", "plimsoll", plane.Absolute(t, "charts/plimsoll"), "--namespace", "plimsoll", "--values", file) {
			if object.GetKind() == "ConfigMap" && object.GetName() == "plimsoll-stop" {
				stops++
			}
		}
		// With Flux the chart's hook creates the ConfigMap of the emergency stop.
		if want := map[string]int{"source.helm.valuesObject": 1}[path]; stops != want || len(examples) != 2 {
			t.Errorf("%s: %d objects for the emergency stop, %d examples", path, stops, len(examples))
		}
	}
}
