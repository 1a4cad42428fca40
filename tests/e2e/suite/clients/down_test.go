//go:build e2e

package clients

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
)

// Another aggregated API, without a backend.
const absentAPI = "absent.example.com"

// An outage has the error messages about an API without a backend; GROUP stands for its name.
type outage struct{ kubectl, aggregated, legacy, request, namespace string }

// TestOtherAPIsWorkWhileAllReplicasAreDown: all are killed, or stopped for a minute. The same requests fail as if the backend of any other
// aggregated API is down, with the same messages, and no others.
func TestOtherAPIsWorkWhileAllReplicasAreDown(t *testing.T) {
	s := open(t)
	s.runControllers("namespace-controller", "garbage-collector-controller")
	all := s.all()
	s.waitUpToDate(waitTimeout, all)
	complete, message := s.resources()
	if message != "" || !slices.Contains(complete, "nodemetrics."+nodemetrics.Group) {
		t.Fatalf("kubectl does not discover all resources: %v: %s", complete, message)
	}
	s.Aggregate(absentAPI, "v1alpha1", "absent")
	reference := s.checkOutage(absentAPI, "beside-another", complete)
	s.Kubectl("delete", "apiservice", "v1alpha1."+absentAPI)
	s.gone("beside-another", "the other API is removed")

	for _, r := range s.replicas {
		r.Kill()
	}
	s.checkSameOutage(reference, s.checkOutage(nodemetrics.Group, "all-killed", complete))
	for _, r := range s.replicas {
		s.restart(r)
	}
	s.waitRecovered("all-killed", complete, all)

	stopped := time.Now()
	for _, r := range s.replicas {
		r.Signal(syscall.SIGSTOP)
	}
	s.checkSameOutage(reference, s.checkOutage(nodemetrics.Group, "all-stopped", complete))
	// For longer than the liveness timeout of agents: a replica that was stopped must not report them as unresponsive.
	time.Sleep(time.Until(stopped.Add(time.Minute)))
	for _, r := range s.replicas {
		r.Signal(syscall.SIGCONT)
	}
	s.waitRecovered("all-stopped", complete, all)
}

// resources are the names of all resources that kubectl discovers, and its error message.
func (s *scene) resources() (names []string, message string) {
	out, _ := s.TryKubectl("", "api-resources", "--cached=false", "-o", "name")
	for line := range strings.Lines(out) {
		if line = strings.TrimSpace(line); strings.Contains(line, " ") {
			message += line
		} else {
			names = append(names, line)
		}
	}
	slices.Sort(names)
	return names, message
}

// checkOutage waits until the API server knows that an API is unavailable, and checks that everything else works meanwhile. A namespace that
// is deleted meanwhile still exists at the end.
func (s *scene) checkOutage(group, namespace string, complete []string) outage {
	s.T.Helper()
	of := func(names []string) []string {
		return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return strings.HasSuffix(name, "."+group) })
	}
	nodes := s.nodes()
	var seen outage
	s.Eventually(waitTimeout, "the API server knows that no backend serves "+group, func() error {
		var names []string
		// Every time, not only at the end.
		if names, seen.kubectl = s.resources(); !slices.Equal(of(names), of(complete)) {
			s.T.Errorf("while no backend serves %s, kubectl discovers %v, not %v", group, names, complete)
		}
		seen.aggregated = s.discoveryError(group, false)
		if seen.aggregated == "" {
			return fmt.Errorf("discovery still succeeds")
		}
		return s.isAvailable(group, "False")
	})
	seen.legacy = s.discoveryError(group, true)
	_, err := s.TryKubectl("", "get", "--raw", "/apis/"+group+"/v1alpha1/nodemetrics")
	seen.request = fmt.Sprint(err)
	seen.namespace = s.waitEmptied(namespace)
	s.checkOtherAPIs()
	if now := s.nodes(); now != nodes {
		s.T.Errorf("while no backend serves %s, Nodes changed from\n%s\nto\n%s", group, nodes, now)
	}
	for _, text := range []*string{&seen.kubectl, &seen.aggregated, &seen.legacy, &seen.request, &seen.namespace} {
		*text = strings.ReplaceAll(*text, group, "GROUP")
	}
	return seen
}

// discoveryError is client-go's discovery error, aggregated or per version. Only this API may be missing.
func (s *scene) discoveryError(group string, legacy bool) string {
	s.T.Helper()
	client := discovery.NewDiscoveryClientForConfigOrDie(s.Config())
	client.UseLegacyDiscovery = legacy
	_, err := client.ServerPreferredResources()
	if err == nil {
		return ""
	}
	failed, _ := discovery.GroupDiscoveryFailedErrorGroups(err)
	if _, known := failed[schema.GroupVersion{Group: group, Version: "v1alpha1"}]; !known || len(failed) != 1 {
		s.T.Errorf("while %s is unavailable, client-go returns: %v", group, err)
	}
	return err.Error()
}

// checkSameOutage fails the test if an outage differs from the reference.
func (s *scene) checkSameOutage(reference, now outage) {
	s.T.Helper()
	if now != reference {
		s.T.Errorf("the errors are:\n%q\nand those of another API:\n%q", now, reference)
	}
	s.T.Logf("%q", now)
}

// waitRecovered waits until everything works again, and the pending namespace is gone.
func (s *scene) waitRecovered(namespace string, complete []string, all []*ledger) {
	s.T.Helper()
	s.gone(namespace, "replicas are back")
	s.Eventually(waitTimeout, "kubectl discovers all resources as before", func() error {
		names, message := s.resources()
		if message != "" || !slices.Equal(names, complete) {
			return fmt.Errorf("%skubectl discovers %v, not %v", message, names, complete)
		}
		return nil
	})
	s.logUpToDate("replicas are back: all clients", all)
}

// nodes are all Nodes with their resource versions, which show any write.
func (s *scene) nodes() string {
	s.T.Helper()
	return s.Kubectl("get", "nodes", "-o", "custom-columns=:.metadata.name,:.metadata.resourceVersion")
}

// waitEmptied deletes a namespace. Its content must be deleted, and it waits for the condition that says why the namespace itself remains.
func (s *scene) waitEmptied(name string) (why string) {
	s.T.Helper()
	s.namespace(name)
	s.Eventually(waitTimeout, name+" is empty, and its conditions say why it still exists", func() error {
		if _, err := s.Kube.CoreV1().ConfigMaps(name).Get(background, "it", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the namespace is not empty: %v", err)
		}
		namespace, err := s.Kube.CoreV1().Namespaces().Get(background, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		why = ""
		for _, condition := range namespace.Status.Conditions {
			if condition.Status == corev1.ConditionTrue {
				why += fmt.Sprintf("%s: %s: %s\n", condition.Type, condition.Reason, condition.Message)
			}
		}
		if !strings.Contains(why, string(corev1.NamespaceDeletionDiscoveryFailure)) {
			return fmt.Errorf("the namespace's conditions are %q", why)
		}
		return nil
	})
	return why
}

// checkOtherAPIs checks what uses discovery and OpenAPI: kubectl explain, validation, and garbage collection.
func (s *scene) checkOtherAPIs() {
	s.T.Helper()
	started := time.Now()
	if out := s.Kubectl("explain", "pods.spec.containers"); !strings.Contains(out, "VERSION:    v1") {
		s.T.Error(out)
	}
	s.Apply(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"owner","namespace":"default"}}`)
	if _, err := s.TryKubectl(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"wrong","namespace":"default"},"dta":{}}`, "apply", "-f", "-"); err == nil {
		s.T.Error("kubectl does not report that field dta does not exist")
	}
	s.T.Logf("kubectl explained, applied and validated within %s", time.Since(started).Round(100*time.Millisecond))
	maps := s.Kube.CoreV1().ConfigMaps("default")
	owner, err := maps.Get(background, "owner", metav1.GetOptions{})
	s.agents.must(nil, err)
	s.agents.must(maps.Create(background, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "owned", OwnerReferences: []metav1.OwnerReference{
		{APIVersion: "v1", Kind: "ConfigMap", Name: owner.Name, UID: owner.UID},
	}}}, metav1.CreateOptions{}))
	s.agents.must(nil, maps.Delete(background, owner.Name, metav1.DeleteOptions{}))
	s.Eventually(waitTimeout, "the object of a deleted owner is deleted", func() error {
		_, err := maps.Get(background, "owned", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it still exists: %v", err)
	})
}
