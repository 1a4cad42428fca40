//go:build e2e

package clients

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"plimsoll.dev/suite/plane"
)

// kubectlWithRetries runs kubectl until it succeeds: kubectl does not retry if the API server picked a replica that is down.
func (s *scene) kubectlWithRetries(args ...string) string {
	s.T.Helper()
	var out string
	s.Eventually(waitTimeout, "kubectl "+strings.Join(args, " "), func() (err error) {
		out, err = s.TryKubectl("", args...)
		return err
	})
	return out
}

// kubectl checks all kinds of kubectl commands.
func (s *scene) kubectl() {
	s.T.Helper()
	expect := func(out, part string) {
		s.T.Helper()
		if !strings.Contains(out, part) {
			s.T.Errorf("%q is not in:\n%s", part, out)
		}
	}
	table := strings.Split(s.kubectlWithRetries("get", "nodemetrics", "--chunk-size=2"), "\n")
	header := []string{"NAME", "CPU", "CPU%", "MEMORY", "MEM%", "LOAD", "PRESSURE", "BREACHED", "AGENT", "AGE"}
	if !slices.Equal(strings.Fields(table[0]), header) || len(table) != 1+len(s.agents.nodes) {
		s.T.Errorf("the table is:\n%s", strings.Join(table, "\n"))
	}
	for index, line := range table[1:] {
		words := strings.Fields(line)
		if len(words) < 9 || words[0] != s.agents.nodes[index] || words[4] != "25%" || words[7] != "1" || words[8] != "Healthy" {
			s.T.Errorf("the line is %q", line)
		}
	}
	expect(s.kubectlWithRetries("get", "nm", "-o", "wide"), "REPORTED")
	expect(s.kubectlWithRetries("get", "nm", "node00", "-o", "yaml"), "kind: NodeMetric")
	expect(s.kubectlWithRetries("get", "nm", "-o", `jsonpath={.items[*].status.rules.breached}`), "1 1 1 1 1 1")
	expect(s.kubectlWithRetries("describe", "nm", "node00"), "AgentReporting")
	expect(s.kubectlWithRetries("explain", "nm.status.usage"), "KIND:       NodeMetric")
	s.kubectlWithRetries("wait", "--for=condition=Healthy", "nm", "--all", "--timeout=30s")
	var list struct {
		Kind  string
		Items []any
	}
	raw := s.kubectlWithRetries("get", "--raw", "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics?limit=4")
	if err := json.Unmarshal([]byte(raw), &list); err != nil || list.Kind != "NodeMetricList" || len(list.Items) != 4 {
		s.T.Errorf("%v: %s", err, raw)
	}
	s.apiResources("nodewatermarks")
}

// apiResources checks `kubectl api-resources`, which must always work: kubectl needs discovery for everything.
func (s *scene) apiResources(more ...string) {
	s.T.Helper()
	out := s.kubectlWithRetries("api-resources", "--cached=false")
	for _, name := range append(more, "nodemetrics", "pods", "namespaces") {
		if !strings.Contains(out, name) {
			s.T.Errorf("%s is not in:\n%s", name, out)
		}
	}
}

// namespace creates a namespace with an object in it and deletes it.
func (s *scene) namespace(name string) {
	s.T.Helper()
	s.agents.must(s.Kube.CoreV1().Namespaces().Create(background, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}))
	s.agents.must(s.Kube.CoreV1().ConfigMaps(name).Create(background, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "it"}}, metav1.CreateOptions{}))
	if err := s.Kube.CoreV1().Namespaces().Delete(background, name, metav1.DeleteOptions{}); err != nil {
		s.T.Fatal(err)
	}
}

// gone waits until a namespace is deleted.
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

// deleteNamespaces runs the namespace controller, which needs complete discovery.
func (s *scene) deleteNamespaces() { s.runControllers("namespace-controller") }

// runControllers runs some controllers of kube-controller-manager.
func (s *scene) runControllers(controllers ...string) {
	s.Run("kube-controller-manager", "--kubeconfig="+s.Kubeconfig, "--controllers="+strings.Join(controllers, ","), "--leader-elect=false", "--secure-port=0")
}

// isAvailable returns an error unless the APIService's Available condition is as wanted.
func (s *scene) isAvailable(group, wanted string) error {
	status, err := s.TryKubectl("", "get", "apiservice", "v1alpha1."+group, "-o", `jsonpath={.status.conditions[?(@.type=="Available")].status}`)
	if err == nil && status != wanted {
		err = fmt.Errorf("%s is available: %s", group, status)
	}
	return err
}

// TestNamespacesAreDeletedWithEitherReplicaDown, and kubectl works as before.
func TestNamespacesAreDeletedWithEitherReplicaDown(t *testing.T) {
	s := open(t)
	s.deleteNamespaces()
	s.kubectl()
	s.namespace("both")
	s.gone("both", "both replicas are up")
	for _, r := range s.replicas {
		r.Kill()
		s.apiResources("nodewatermarks")
		name := "without-" + r.name
		s.namespace(name)
		s.gone(name, r.name+" is down")
		s.restart(r)
		s.leader()
	}
	for _, r := range s.replicas {
		r.Signal(syscall.SIGSTOP)
		s.apiResources("nodewatermarks")
		name := "beside-" + r.name
		s.namespace(name)
		s.gone(name, r.name+" is stopped")
		s.waitEndpoint(r, false)
		r.Signal(syscall.SIGCONT)
		s.waitEndpoint(r, true)
		s.leader()
	}
	s.kubectl()
}

// TestUnreadyReplicasServeDiscoveryIfNoneIsReady, but leave the endpoints to a replica that was ready once.
func TestUnreadyReplicasServeDiscoveryIfNoneIsReady(t *testing.T) {
	s := open(t)
	s.deleteNamespaces()
	definition := "nodewatermarks.plimsoll.dev"
	s.Kubectl("delete", "crd", definition)
	first, second := s.replicas[0], s.replicas[1]
	// A replica that was ready once stays an endpoint.
	s.Eventually(waitTimeout, "both lack the CustomResourceDefinition", func() error {
		for _, r := range s.replicas {
			if get(plane.Local("http", r.metrics)+"/readyz") == nil {
				return fmt.Errorf("%s is ready", r.name)
			}
		}
		return nil
	})
	s.waitEndpoint(first, true)
	s.waitEndpoint(second, true)
	first.Kill()
	s.waitEndpoint(first, false)
	first.Start()
	// By then it has checked more than once.
	time.Sleep(20 * time.Second)
	s.waitEndpoint(first, false)
	s.namespace("one-lacks")
	s.gone("one-lacks", "one replica lacks the definition and was restarted")

	second.Kill()
	s.waitEndpoint(first, true)
	s.Eventually(waitTimeout, "the API is available", func() error { return s.isAvailable(nodemetrics.Group, "True") })
	s.namespace("all-lack")
	s.gone("all-lack", "the only replica lacks the definition")
	s.apiResources()
	s.Kubectl("apply", "--server-side", "-f", plane.Absolute(t, "crds/plimsoll.dev_nodewatermarks.yaml"))
	second.Start()
	s.waitReady(first)
	s.waitReady(second)
	s.waitEndpoint(second, true)
	s.edits()
	s.Eventually(waitTimeout, "a replica writes again", func() error {
		list, err := s.Objects.Resource(watermarks).List(background, metav1.ListOptions{})
		if err == nil && len(list.Items) < len(s.agents.nodes) {
			err = fmt.Errorf("there are %d NodeWatermarks", len(list.Items))
		}
		return err
	})
}
