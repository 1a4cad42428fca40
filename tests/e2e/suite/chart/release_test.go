//go:build e2e

package chart

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"plimsoll.dev/suite/plane"
)

// 10 % of the nodes, rounded up, may be without a ready agent during an upgrade: more than one.
const workers, maxUnavailable = 12, 2

// TestReleaseLifecycle: Helm waits for everything; kwok starts and stops the pods.
func TestReleaseLifecycle(t *testing.T) {
	if testing.Short() {
		t.Skip("takes minutes: make e2e-long; by Helm 4, make helm4")
	}
	config := plane.WriteFile(t, filepath.Join(t.TempDir(), "admission.json"), limited)
	c := cluster{plane.Start(t, []string{"--admission-control-config-file=" + config})}
	c.removeCRDs()
	c.nodes(workers)
	c.namespace("plimsoll", "privileged")
	c.mustHelm("install", "--wait", "--timeout=3m", "--set", "policies.preset=conservative")
	c.ready("the release is installed")
	c.has("plimsoll-conservative", "with the release")

	c.completeTestPod()
	if out, err := c.ofRelease("test", "--timeout=3m"); err != nil || !strings.Contains(out, "Succeeded") {
		t.Errorf("helm test: %s (%v)", out, err)
	}
	logs := func(wanted string) {
		t.Helper()
		if level := c.Kubectl("get", "daemonset", "-n", "plimsoll", "plimsoll-agent-v2", "-o", "jsonpath={.spec.template.spec.containers[0].env[0].value}"); level != wanted {
			t.Errorf("agents log at level %s, not %s", level, wanted)
		}
	}
	// Data that only replicas write must survive an upgrade.
	c.Kubectl("patch", "apiservice", "v1alpha1.metrics.plimsoll.dev", "--type=merge", "-p", `{"spec":{"caBundle":"`+authority+`"}}`)
	waitRolledOut := c.watchRollout()
	c.mustHelm("upgrade", "--reset-then-reuse-values", "--set=image.tag=next,agent.log=debug", "--wait", "--timeout=3m")
	if unready := waitRolledOut(); unready < 1 || unready > maxUnavailable {
		t.Errorf("of %d agents up to %d were not ready at the same time, but only %d may be", workers, unready, maxUnavailable)
	}
	c.ready("it is upgraded")
	logs("debug")
	if _, err := c.ofRelease("rollback", "--wait", "--timeout=3m"); err != nil {
		t.Fatal(err)
	}
	c.ready("it is rolled back")
	logs("info")
	if left := c.Kubectl("get", "apiservice", "v1alpha1.metrics.plimsoll.dev", "-o", "jsonpath={.spec.caBundle}"); left != authority {
		t.Errorf("upgrade and rollback changed the caBundle of the APIService: %q", left)
	}
	// The hook's Job must complete before Helm removes the objects.
	if _, err := c.ofRelease("uninstall", "--wait", "--timeout=3m"); err != nil {
		t.Fatal(err)
	}
	if left := c.Kubectl("get", "deployments,daemonsets,jobs,services,configmaps", "-n", "plimsoll", "-l", "app.kubernetes.io/name=plimsoll", "-o", "name"); left != "" {
		t.Errorf("not deleted: %s", left)
	}
	if left := c.Kubectl("get", "nodeqoss,podqoss,avoidanceactions", "-o", "name"); left != "" {
		t.Errorf("not deleted: %s", left)
	}
}

// limited configures an API server like GKE's: pods of the system priority classes need a matching ResourceQuota.
const limited = `{"apiVersion":"apiserver.config.k8s.io/v1","kind":"AdmissionConfiguration","plugins":[{"name":"ResourceQuota","configuration":
	{"apiVersion":"apiserver.config.k8s.io/v1","kind":"ResourceQuotaConfiguration","limitedResources":[{"resource":"pods","matchScopes":
	[{"scopeName":"PriorityClass","operator":"In","values":["system-cluster-critical","system-node-critical"]}]}]}}]}`

// authority is a placeholder for a CA, in base64.
const authority = "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCi0tLS0tRU5EIENFUlRJRklDQVRFLS0tLS0K"

// ofRelease runs a Helm command that needs the release but no chart.
func (c cluster) ofRelease(command string, args ...string) (string, error) {
	c.T.Helper()
	return run(c.T, "", plane.Helm(), append([]string{"--kubeconfig", c.Kubeconfig, command, "plimsoll", "--namespace", "plimsoll"}, args...)...)
}

// nodes creates kwok nodes, and starts the controller manager and the scheduler.
func (c cluster) nodes(count int) {
	c.T.Helper()
	port := func() string { return fmt.Sprintf("--secure-port=%d", plane.FreePort(c.T)) }
	c.Run("kube-controller-manager", "--kubeconfig="+c.Kubeconfig, "--leader-elect=false", port(), "--cert-dir="+c.T.TempDir(),
		"--service-account-private-key-file="+c.SigningKey())
	c.Run("kube-scheduler", "--kubeconfig="+c.Kubeconfig, "--leader-elect=false", port(), "--cert-dir="+c.T.TempDir())
	c.Run("kwok", "--kubeconfig="+c.Kubeconfig, "--manage-all-nodes=true", "--node-lease-duration-seconds=200")
	const node = `{"apiVersion":"v1","kind":"Node","metadata":{"name":"worker-%[1]d","labels":{"kubernetes.io/os":"linux","kubernetes.io/arch":"amd64","kubernetes.io/hostname":"worker-%[1]d"}}}`
	var all []string
	for i := range count {
		all = append(all, fmt.Sprintf(node, i))
	}
	c.Apply(`{"apiVersion":"v1","kind":"List","items":[` + strings.Join(all, ",") + `]}`)
}

// watchRollout follows the agents, all of which are ready, by watching their pods. The returned function waits until all of them have
// been replaced, and returns the maximum number that were not ready at a time.
func (c cluster) watchRollout() (waitRolledOut func() int) {
	c.T.Helper()
	pods := kubernetes.NewForConfigOrDie(c.Config()).CoreV1().Pods("plimsoll") // without a timeout, which would end a watch too
	agents := metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=agent"}
	old, err := pods.List(context.Background(), agents)
	if err != nil {
		c.T.Fatal(err)
	}
	ready := map[string]bool{}
	for _, pod := range old.Items {
		ready[pod.Name] = true
	}
	agents.ResourceVersion = old.ResourceVersion
	changes, err := pods.Watch(context.Background(), agents)
	if err != nil {
		c.T.Fatal(err)
	}
	c.T.Cleanup(changes.Stop)
	maxUnready, deleted, done := 0, 0, make(chan bool, 1)
	go func() {
		for change := range changes.ResultChan() {
			pod, is := change.Object.(*corev1.Pod)
			if !is { // the watch is over
				break
			}
			delete(ready, pod.Name)
			if change.Type == watch.Deleted {
				deleted++
			} else if plane.IsReady(pod) {
				ready[pod.Name] = true
			}
			maxUnready = max(maxUnready, len(old.Items)-len(ready))
			if deleted == len(old.Items) && len(ready) == deleted {
				done <- true
				return
			}
		}
		done <- false
	}()
	return func() int {
		c.T.Helper()
		select {
		case complete := <-done:
			if !complete {
				c.T.Fatal("the watch of the agents ended before their rollout")
			}
		case <-time.After(3 * time.Minute):
			c.T.Fatal("the agents were not all replaced")
		}
		return maxUnready
	}
}

// completeTestPod marks the next test pod as succeeded: no program runs here.
func (c cluster) completeTestPod() {
	go func() {
		for started := time.Now(); time.Since(started) < 3*time.Minute; time.Sleep(500 * time.Millisecond) {
			succeeded := `{"status":{"phase":"Succeeded"}}`
			phase, err := c.TryKubectl("", "get", "pod", "-n", "plimsoll", "plimsoll-test", "-o", "jsonpath={.status.phase}")
			if err == nil && phase == "Running" {
				c.TryKubectl("", "patch", "pod", "-n", "plimsoll", "plimsoll-test", "--subresource=status", "--type=merge", "-p", succeeded)
				return
			}
		}
	}()
}

// ready fails the test unless everything runs. Helm 3 waits neither for the agents that an upgrade may replace at
// once nor for old replicas to terminate.
func (c cluster) ready(what string) {
	c.T.Helper()
	c.Eventually(time.Minute, what+", and all is ready", func() error {
		replicas := c.Kubectl("get", "deployment", "-n", "plimsoll", "plimsoll-controller", "-o", "jsonpath={.status.readyReplicas} {.status.updatedReplicas}")
		agents := c.Kubectl("get", "daemonset", "-n", "plimsoll", "plimsoll-agent-v2", "-o",
			"jsonpath={.status.numberReady} {.status.updatedNumberScheduled} {.status.desiredNumberScheduled}")
		if replicas != "2 2" || agents != fmt.Sprintf("%[1]d %[1]d %[1]d", workers) {
			return fmt.Errorf("ready and updated replicas: %s; ready, updated and desired agents: %s", replicas, agents)
		}
		return nil
	})
}
