//go:build e2e

package chart

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"plimsoll.dev/suite/plane"
)

// objects decodes the rendered manifests.
func objects(t *testing.T, rendered string) (found []unstructured.Unstructured) {
	t.Helper()
	found, err := plane.Objects(rendered)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// definitions are the OpenAPI definitions in Kubernetes' Go module.
var definitions = sync.OnceValues(func() (map[string]map[string]any, error) {
	module, err := plane.ModuleDirectory(filepath.Join("..", "..", "cluster"), "k8s.io/kubernetes")
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(module, "api", "openapi-spec", "swagger.json"))
	if err != nil {
		return nil, err
	}
	var specification struct{ Definitions map[string]map[string]any }
	if err := json.Unmarshal(text, &specification); err != nil {
		return nil, err
	}
	for name, definition := range specification.Definitions {
		seal(definition)
		switch name { // the specification says string, but the API server also accepts numbers
		case "io.k8s.apimachinery.pkg.util.intstr.IntOrString", "io.k8s.apimachinery.pkg.api.resource.Quantity":
			specification.Definitions[name] = map[string]any{"type": []string{"string", "number"}}
		}
	}
	return specification.Definitions, nil
})

// seal forbids fields that are not in the schema.
func seal(schema any) {
	switch schema := schema.(type) {
	case map[string]any:
		if _, lists := schema["properties"].(map[string]any); lists && schema["additionalProperties"] == nil && schema["x-kubernetes-preserve-unknown-fields"] == nil {
			schema["additionalProperties"] = false
		}
		for _, inner := range schema {
			seal(inner)
		}
	case []any:
		for _, inner := range schema {
			seal(inner)
		}
	}
}

// addReferenced adds the definitions that a schema refers to, directly or through others.
func addReferenced(all map[string]map[string]any, schema any, set map[string]any) {
	switch schema := schema.(type) {
	case map[string]any:
		reference, _ := schema["$ref"].(string)
		if name, found := strings.CutPrefix(reference, "#/definitions/"); found && set[name] == nil {
			set[name] = all[name]
			addReferenced(all, all[name], set)
		}
		for _, inner := range schema {
			addReferenced(all, inner, set)
		}
	case []any:
		for _, inner := range schema {
			addReferenced(all, inner, set)
		}
	}
}

// schemas writes a schema for each kind of Kubernetes, cert-manager and ours, in the file layout of kubeconform.
func schemas(t *testing.T) string {
	t.Helper()
	directory := t.TempDir()
	write := func(group, version, kind string, schema map[string]any) {
		name := strings.ToLower(kind)
		if group != "" {
			name += "-" + strings.Split(group, ".")[0]
		}
		text, err := json.Marshal(schema)
		if err == nil {
			err = os.WriteFile(filepath.Join(directory, name+"-"+version+".json"), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	all, err := definitions()
	if err != nil {
		t.Fatal(err)
	}
	for name, definition := range all {
		kinds, _ := definition["x-kubernetes-group-version-kind"].([]any)
		if len(kinds) != 1 {
			continue // a kind of every group, such as DeleteOptions
		}
		kind := kinds[0].(map[string]any)
		set := map[string]any{name: definition}
		addReferenced(all, definition, set)
		write(kind["group"].(string), kind["version"].(string), kind["kind"].(string),
			map[string]any{"allOf": []any{map[string]any{"$ref": "#/definitions/" + name}}, "definitions": set})
	}
	for _, definition := range append(ownCRDs(t), certManagerCRDs(t)...) {
		names, _, _ := unstructured.NestedString(definition.Object, "spec", "names", "kind")
		group, _, _ := unstructured.NestedString(definition.Object, "spec", "group")
		versions, _, _ := unstructured.NestedSlice(definition.Object, "spec", "versions")
		version := versions[0].(map[string]any)
		schema, _, _ := unstructured.NestedMap(version, "schema", "openAPIV3Schema")
		fields := schema["properties"].(map[string]any)
		fields["apiVersion"], fields["kind"], fields["metadata"] = map[string]any{}, map[string]any{}, map[string]any{}
		seal(schema)
		write(group, version["name"].(string), names, schema)
	}
	return directory
}

// ownCRDs are the project's CRDs.
func ownCRDs(t *testing.T) (found []unstructured.Unstructured) {
	t.Helper()
	files, err := filepath.Glob(plane.Absolute(t, "crds/*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no CustomResourceDefinitions found (%v)", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, objects(t, string(text))...)
	}
	return found
}

// certManagerCRDs are the CRDs of cert-manager.
func certManagerCRDs(t *testing.T) (found []unstructured.Unstructured) {
	t.Helper()
	for _, file := range plane.CertManagerCRDFiles(t) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, objects(t, string(text))...)
	}
	return found
}

// checkSchemas runs kubeconform on every object; kinds of the Prometheus operator are decoded as its types.
func checkSchemas(t *testing.T, rendered string) {
	t.Helper()
	location := filepath.Join(schemas(t), "{{.ResourceKind}}{{.KindSuffix}}.json")
	out, err := run(t, rendered, "kubeconform", "-strict", "-output", "json", "-summary", "-schema-location", location,
		"-skip", "monitoring.coreos.com/v1/PodMonitor,monitoring.coreos.com/v1/ServiceMonitor,monitoring.coreos.com/v1/PrometheusRule", "-")
	if err != nil {
		t.Fatal(err)
	}
	var result struct {
		Summary struct{ Valid, Invalid, Errors, Skipped int }
	}
	if err := json.Unmarshal([]byte(out), &result); err != nil {
		t.Fatal(err, out)
	}
	if result.Summary.Valid < 15 || result.Summary.Skipped > 2 {
		t.Errorf("kubeconform checked too few objects: %s", out)
	}
	for _, object := range objects(t, rendered) {
		checkMonitoring(t, object)
	}
}

// strict decodes JSON and rejects unknown fields.
func strict(text []byte, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	return decoder.Decode(into)
}
