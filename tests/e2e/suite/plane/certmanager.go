//go:build e2e

package plane

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
)

// Certificates is the resource of cert-manager.
var Certificates = schema.GroupVersionResource{Group: "cert-manager.io", Version: "v1", Resource: "certificates"}

// CertManagerCRDFiles are the CRD files in cert-manager's Go module.
func CertManagerCRDFiles(t *testing.T) []string {
	t.Helper()
	const module = "github.com/cert-manager/cert-manager"
	directory := Absolute(t, "tests/e2e/suite/cert-manager")
	sources, err := ModuleDirectory(directory, module)
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(sources, "deploy/crds/cert-manager.io_*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%s has no definitions (%v)", module, err)
	}
	return files
}

// CertManager runs cert-manager's controllers with this kubeconfig until the test ends.
func CertManager(t *testing.T, kubeconfig string) {
	t.Helper()
	launch(t, Tool(t, "cert-manager"), "--kubeconfig="+kubeconfig)
}

// Renew makes cert-manager renew a Certificate, as `cmctl renew` does. The returned function returns an error until that is done.
func Renew(client dynamic.ResourceInterface, name string) (renewed func() error, err error) {
	object, err := client.Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	before, _, _ := unstructured.NestedInt64(object.Object, "status", "revision")
	conditions, _, _ := unstructured.NestedSlice(object.Object, "status", "conditions")
	conditions = append(conditions, map[string]any{
		"type": "Issuing", "status": "True", "reason": "ManuallyTriggered", "message": "Certificate re-issuance manually triggered",
		"lastTransitionTime": time.Now().UTC().Format(time.RFC3339), "observedGeneration": object.GetGeneration(),
	})
	if err := unstructured.SetNestedSlice(object.Object, conditions, "status", "conditions"); err != nil {
		return nil, err
	}
	_, err = client.UpdateStatus(context.Background(), object, metav1.UpdateOptions{})
	return func() error {
		object, err := client.Get(context.Background(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if now, _, _ := unstructured.NestedInt64(object.Object, "status", "revision"); now <= before {
			return fmt.Errorf("Certificate %s still has revision %d", name, now)
		}
		return nil
	}, err
}
