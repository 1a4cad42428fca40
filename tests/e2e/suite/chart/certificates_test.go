//go:build e2e

package chart

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// one returns the only object of this kind and name.
func one(t *testing.T, rendered, kind, name string) map[string]any {
	t.Helper()
	all := objects(t, rendered)
	is := func(object unstructured.Unstructured) bool {
		return object.GetKind() == kind && object.GetName() == name
	}
	found := slices.IndexFunc(all, is)
	if found < 0 {
		t.Fatalf("the chart renders no %s %s", kind, name)
	}
	return all[found].Object
}

// field returns a field of an object; a missing field fails the test.
func field[T any](t *testing.T, object map[string]any, fields ...string) T {
	t.Helper()
	value, _, err := unstructured.NestedFieldNoCopy(object, fields...)
	typed, isType := value.(T)
	if err != nil || !isType {
		t.Fatalf("%s is %v (%v)", strings.Join(fields, "."), value, err)
	}
	return typed
}

// option is the value of a container's flag, empty if the flag is not set.
func option(container map[string]any, name string) string {
	for _, argument := range container["args"].([]any) {
		if value, found := strings.CutPrefix(argument.(string), "--"+name+"="); found {
			return value
		}
	}
	return ""
}

func TestCertManagerIssuesTheControllersSecret(t *testing.T) {
	rendered, err := render(t, "--values", combinations(t)["cert-manager"])
	if err != nil {
		t.Fatal(err)
	}
	certificate := one(t, rendered, "Certificate", "plimsoll-metrics")
	pod := field[map[string]any](t, one(t, rendered, "Deployment", "plimsoll-controller"), "spec", "template", "spec")
	container := field[[]any](t, pod, "containers")[0].(map[string]any)
	volume := field[[]any](t, pod, "volumes")[0].(map[string]any)
	if made, read := field[string](t, certificate, "spec", "secretName"), field[string](t, volume, "secret", "secretName"); made != read {
		t.Errorf("the Certificate creates Secret %s, but the pod mounts %s", made, read)
	}
	mount := field[[]any](t, container, "volumeMounts")[0].(map[string]any)
	if mount["name"] != volume["name"] {
		t.Errorf("the container mounts volume %v instead of the certificate's", mount["name"])
	}
	for flag, file := range map[string]string{"tls-cert-file": "tls.crt", "tls-private-key-file": "tls.key", "tls-ca-file": "ca.crt"} {
		if value := option(container, flag); value != path.Join(mount["mountPath"].(string), file) {
			t.Errorf("--%s is %q", flag, value)
		}
	}
	if secret := option(container, "metrics-api-secret"); secret != "" {
		t.Errorf("--metrics-api-secret is set to %s although cert-manager issues the certificate", secret)
	}
	names := []any{}
	for _, service := range []string{"metrics-api-service", "report-service"} {
		names = append(names, option(container, service)+".plimsoll.svc")
	}
	if dnsNames := field[[]any](t, certificate, "spec", "dnsNames"); !slices.Equal(dnsNames, names) {
		t.Errorf("the certificate is for %v, but the Services are %v", dnsNames, names)
	}
	if usages := field[[]any](t, certificate, "spec", "usages"); !slices.Contains(usages, any("server auth")) || !slices.Contains(usages, any("client auth")) {
		t.Errorf("the certificate lacks a usage: %v", usages)
	}
	issuer := one(t, rendered, "Issuer", field[string](t, certificate, "spec", "issuerRef", "name"))
	authority := one(t, rendered, "Certificate", "plimsoll-metrics-authority")
	if signs, made := field[string](t, issuer, "spec", "ca", "secretName"), field[string](t, authority, "spec", "secretName"); signs != made {
		t.Errorf("the issuer signs with Secret %s, but the authority is in Secret %s", signs, made)
	}
	one(t, rendered, "Issuer", field[string](t, authority, "spec", "issuerRef", "name"))
}

func TestControllerCannotReadSecretsWithCertManager(t *testing.T) {
	rights := func(values string) (found int) {
		rendered, err := render(t, "--values", combinations(t)[values])
		if err != nil {
			t.Fatal(err)
		}
		for _, object := range objects(t, rendered) {
			rules, _, _ := unstructured.NestedSlice(object.Object, "rules")
			for _, rule := range rules {
				if resources, _ := rule.(map[string]any)["resources"].([]any); slices.Contains(resources, any("secrets")) {
					found++
				}
			}
			if object.GetKind() == "Secret" {
				found++
			}
		}
		return found
	}
	if found := rights("default"); found != 1 {
		t.Errorf("by default: %d Secrets and rules for Secrets, not 1", found)
	}
	for _, values := range []string{"cert-manager", "everything"} {
		if found := rights(values); found != 0 {
			t.Errorf("%s: %d Secrets and rules for Secrets, not 0", values, found)
		}
	}
}

func TestOwnIssuerSignsWithAndWithoutMetricsAPI(t *testing.T) {
	kinds := func(args ...string) (found []string) {
		rendered, err := render(t, args...)
		if err != nil {
			t.Fatal(err)
		}
		for _, object := range objects(t, rendered) {
			if strings.HasPrefix(object.GetAPIVersion(), "cert-manager.io/") {
				found = append(found, object.GetKind()+" "+object.GetName())
			}
		}
		return found
	}
	if found := kinds("--values", combinations(t)["everything"]); fmt.Sprint(found) != "[Certificate plimsoll-metrics]" {
		t.Errorf("with an issuer of the user the chart renders %v", found)
	}
	// The report port has the same certificate.
	signed := []string{"--values", combinations(t)["least"], "--set", "metricsAPI.certManager.enabled=true,metricsAPI.certManager.issuerRef.name=internal"}
	if found := kinds(signed...); fmt.Sprint(found) != "[Certificate plimsoll-metrics]" {
		t.Errorf("without the metrics API the chart renders %v", found)
	}
}
