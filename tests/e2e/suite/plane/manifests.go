//go:build e2e

package plane

import (
	"errors"
	"io"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// Objects decodes rendered manifests.
func Objects(manifests string) (found []unstructured.Unstructured, err error) {
	decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(manifests), 4096)
	for {
		var object unstructured.Unstructured
		err := decoder.Decode(&object.Object)
		if errors.Is(err, io.EOF) {
			return found, nil
		}
		if err != nil {
			return nil, err
		}
		if len(object.Object) > 0 {
			found = append(found, object)
		}
	}
}
