//go:build e2e

package clients

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// patiently runs kubectl until it succeeds: it does not ask again by itself when the API server picks a replica that is down.
func (s *scene) patiently(args ...string) string {
	s.T.Helper()
	var out string
	s.Eventually(soon, "kubectl "+strings.Join(args, " "), func() (err error) {
		out, err = s.TryKubectl("", args...)
		return err
	})
	return out
}

// kubectl asks all that kubectl can ask, and notes which of it was not answered right.
func (s *scene) kubectl() {
	s.T.Helper()
	expect := func(out, part string) {
		s.T.Helper()
		if !strings.Contains(out, part) {
			s.T.Errorf("%q is not in:\n%s", part, out)
		}
	}
	table := strings.Split(s.patiently("get", "nodemetrics", "--chunk-size=2"), "\n")
	header := []string{"NAME", "CPU", "CPU%", "MEMORY", "MEM%", "PRESSURE", "BREACHED", "AGENT", "AGE"}
	if !slices.Equal(strings.Fields(table[0]), header) || len(table) != 1+len(s.agents.nodes) {
		s.T.Errorf("the table is:\n%s", strings.Join(table, "\n"))
	}
	for index, line := range table[1:] {
		words := strings.Fields(line)
		if len(words) < 8 || words[0] != s.agents.nodes[index] || words[4] != "25%" || words[6] != "1" || words[7] != "Healthy" {
			s.T.Errorf("the line is %q", line)
		}
	}
	expect(s.patiently("get", "nm", "-o", "wide"), "REPORTED")
	expect(s.patiently("get", "nm", "node00", "-o", "yaml"), "kind: NodeMetric")
	expect(s.patiently("get", "nm", "-o", `jsonpath={.items[*].status.rules.breached}`), "1 1 1 1 1 1")
	expect(s.patiently("describe", "nm", "node00"), "AgentReporting")
	expect(s.patiently("explain", "nm.status.usage"), "KIND:       NodeMetric")
	s.patiently("wait", "--for=condition=Healthy", "nm", "--all", "--timeout=30s")
	var list struct {
		Kind  string
		Items []any
	}
	raw := s.patiently("get", "--raw", "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics?limit=4")
	if err := json.Unmarshal([]byte(raw), &list); err != nil || list.Kind != "NodeMetricList" || len(list.Items) != 4 {
		s.T.Errorf("%v: %s", err, raw)
	}
	s.apiResources()
}

// apiResources has to work at any time, and at once: kubectl asks for them before it does anything.
func (s *scene) apiResources() {
	s.T.Helper()
	out := s.patiently("api-resources", "--cached=false")
	for _, name := range []string{"nodemetrics", "nodewatermarks", "pods", "namespaces"} {
		if !strings.Contains(out, name) {
			s.T.Errorf("%s is not in:\n%s", name, out)
		}
	}
}

// namespace makes one with something in it and deletes it.
func (s *scene) namespace(name string) {
	s.T.Helper()
	s.agents.must(s.Kube.CoreV1().Namespaces().Create(background, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}))
	s.agents.must(s.Kube.CoreV1().ConfigMaps(name).Create(background, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "it"}}, metav1.CreateOptions{}))
	if err := s.Kube.CoreV1().Namespaces().Delete(background, name, metav1.DeleteOptions{}); err != nil {
		s.T.Fatal(err)
	}
}

// gone waits until a namespace is.
func (s *scene) gone(name, when string) {
	s.T.Helper()
	took := s.Eventually(3*time.Minute, name+" is gone", func() error {
		namespace, err := s.Kube.CoreV1().Namespaces().Get(background, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("%v %v", err, namespace.Status.Conditions)
	})
	s.T.Logf("%s: a namespace is gone after %s", when, took.Round(100*time.Millisecond))
}

// TestNamespacesAreDeletedWhicheverReplicaIsDown: and kubectl finds and asks all it could before.
func TestNamespacesAreDeletedWhicheverReplicaIsDown(t *testing.T) {
	s := open(t)
	s.Run("kube-controller-manager", "--kubeconfig="+s.Kubeconfig, "--controllers=namespace-controller", "--leader-elect=false", "--secure-port=0")
	s.kubectl()
	s.namespace("both")
	s.gone("both", "both replicas are up")
	for _, r := range s.replicas {
		r.Kill()
		s.apiResources()
		name := "without-" + r.name
		s.namespace(name)
		s.gone(name, r.name+" is down")
		s.again(r)
		s.leader()
	}
	s.kubectl()

	for _, r := range s.replicas {
		r.Kill()
	}
	s.Eventually(soon, "the API server knows that nobody serves the API", func() error {
		status := s.Kubectl("get", "apiservice", "v1alpha1.metrics.plimsoll.dev", "-o", `jsonpath={.status.conditions[?(@.type=="Available")].status}`)
		if status != "False" {
			return fmt.Errorf("Available is %q", status)
		}
		return nil
	})
	out, _ := s.TryKubectl("", "api-resources", "--cached=false")
	for _, name := range []string{"nodewatermarks", "pods", "namespaces"} {
		if !strings.Contains(out, name) {
			t.Errorf("nobody serves NodeMetrics, and %s is not in:\n%s", name, out)
		}
	}
	s.Kubectl("get", "nodes")
	s.namespace("without-both")
	s.again(s.replicas[0])
	s.gone("without-both", "one replica is back")
}
