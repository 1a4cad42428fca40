//go:build e2e

package chart

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"plimsoll.dev/suite/plane"
)

// TestAReleaseIsInstalledTestedUpgradedRolledBackAndRemoved: Helm waits for all of it, as kwok has the pods come up and end.
func TestAReleaseIsInstalledTestedUpgradedRolledBackAndRemoved(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute: make e2e-long")
	}
	config := plane.WriteFile(t, filepath.Join(t.TempDir(), "admission.json"), limited)
	c := cluster{plane.Start(t, []string{"--admission-control-config-file=" + config})}
	c.lacksDefinitions()
	c.nodes("one", "two")
	c.namespace("plimsoll", "privileged")
	c.takes("install", "--wait", "--timeout=3m", "--set", "policies.preset=conservative")
	c.ready("the release is installed")
	c.has("plimsoll-conservative", "with the release")

	c.passes()
	if out, err := c.ofRelease("test", "--timeout=3m"); err != nil || !strings.Contains(out, "Succeeded") {
		t.Errorf("helm test: %s (%v)", out, err)
	}
	logs := func(wanted string) {
		t.Helper()
		if level := c.Kubectl("get", "daemonset", "-n", "plimsoll", "plimsoll-agent-v2", "-o", "jsonpath={.spec.template.spec.containers[0].env[0].value}"); level != wanted {
			t.Errorf("agents log at level %s, not %s", level, wanted)
		}
	}
	// What only replicas write stays, whatever Helm does.
	c.Kubectl("patch", "apiservice", "v1alpha1.metrics.plimsoll.dev", "--type=merge", "-p", `{"spec":{"caBundle":"`+authority+`"}}`)
	c.takes("upgrade", "--reset-then-reuse-values", "--set=agent.log=debug", "--wait", "--timeout=3m")
	c.ready("it is upgraded")
	logs("debug")
	if _, err := c.ofRelease("rollback", "--wait", "--timeout=3m"); err != nil {
		t.Fatal(err)
	}
	c.ready("it is rolled back")
	logs("info")
	if left := c.Kubectl("get", "apiservice", "v1alpha1.metrics.plimsoll.dev", "-o", "jsonpath={.spec.caBundle}"); left != authority {
		t.Errorf("the authority is %q", left)
	}
	// Before all goes, the hook's Job has to end.
	if _, err := c.ofRelease("uninstall", "--wait", "--timeout=3m"); err != nil {
		t.Fatal(err)
	}
	if left := c.Kubectl("get", "deployments,daemonsets,jobs,services,configmaps", "-n", "plimsoll", "-l", "app.kubernetes.io/name=plimsoll", "-o", "name"); left != "" {
		t.Errorf("it left %s", left)
	}
	if left := c.Kubectl("get", "nodeqoss,podqoss,avoidanceactions", "-o", "name"); left != "" {
		t.Errorf("it left %s", left)
	}
}

// limited has an API server make no pod of the system's priority classes where no quota speaks of them, as GKE's do.
const limited = `{"apiVersion":"apiserver.config.k8s.io/v1","kind":"AdmissionConfiguration","plugins":[{"name":"ResourceQuota","configuration":
	{"apiVersion":"apiserver.config.k8s.io/v1","kind":"ResourceQuotaConfiguration","limitedResources":[{"resource":"pods","matchScopes":
	[{"scopeName":"PriorityClass","operator":"In","values":["system-cluster-critical","system-node-critical"]}]}]}}]}`

// authority is what stands for one, in base64.
const authority = "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCi0tLS0tRU5EIENFUlRJRklDQVRFLS0tLS0K"

// ofRelease runs what Helm does with the release alone.
func (c cluster) ofRelease(command string, args ...string) (string, error) {
	c.T.Helper()
	return run(c.T, "", plane.Helm(), append([]string{"--kubeconfig", c.Kubeconfig, command, "plimsoll", "--namespace", "plimsoll"}, args...)...)
}

// nodes are kwok's, and pods are made and placed as in any cluster.
func (c cluster) nodes(names ...string) {
	c.T.Helper()
	port := func() string { return fmt.Sprintf("--secure-port=%d", plane.FreePort(c.T)) }
	c.Run("kube-controller-manager", "--kubeconfig="+c.Kubeconfig, "--leader-elect=false", port(), "--cert-dir="+c.T.TempDir(),
		"--service-account-private-key-file="+c.SigningKey())
	c.Run("kube-scheduler", "--kubeconfig="+c.Kubeconfig, "--leader-elect=false", port(), "--cert-dir="+c.T.TempDir())
	c.Run("kwok", "--kubeconfig="+c.Kubeconfig, "--manage-all-nodes=true", "--node-lease-duration-seconds=200")
	for _, name := range names {
		c.Apply(fmt.Sprintf(`{"apiVersion":"v1","kind":"Node","metadata":{"name":%[1]q,"labels":{"kubernetes.io/os":"linux","kubernetes.io/arch":"amd64","kubernetes.io/hostname":%[1]q}}}`, name))
	}
}

// passes lets the next pod of the test end well: no program runs here that could tell.
func (c cluster) passes() {
	go func() {
		for begun := time.Now(); time.Since(begun) < 3*time.Minute; time.Sleep(500 * time.Millisecond) {
			ended := `{"status":{"phase":"Succeeded"}}`
			phase, err := c.TryKubectl("", "get", "pod", "-n", "plimsoll", "plimsoll-test", "-o", "jsonpath={.status.phase}")
			if err == nil && phase == "Running" {
				c.TryKubectl("", "patch", "pod", "-n", "plimsoll", "plimsoll-test", "--subresource=status", "--type=merge", "-p", ended)
				return
			}
		}
	}()
}

// ready fails the test unless all that was to run runs: Helm has waited for it.
func (c cluster) ready(what string) {
	c.T.Helper()
	const counts = "jsonpath={.status.readyReplicas} {.status.updatedReplicas}"
	if found := c.Kubectl("get", "deployment", "-n", "plimsoll", "plimsoll-controller", "-o", counts); found != "2 2" {
		c.T.Errorf("%s, and replicas that are ready and new are %s", what, found)
	}
	const agents = "jsonpath={.status.numberReady} {.status.desiredNumberScheduled}"
	if found := c.Kubectl("get", "daemonset", "-n", "plimsoll", "plimsoll-agent-v2", "-o", agents); found != "2 2" {
		c.T.Errorf("%s, and agents that are ready, of all, are %s", what, found)
	}
}
