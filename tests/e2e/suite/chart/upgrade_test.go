//go:build e2e

package chart

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"

	"plimsoll.dev/suite/plane"
)

// TestValuesChangeOnAnAPIServer upgrades from the default to five values files, which together set every value, and back: no field that they
// change may be immutable, and no object of the earlier values may be left.
func TestValuesChangeOnAnAPIServer(t *testing.T) {
	t.Parallel()
	c := cluster{plane.Start(t, nil)}
	c.namespace("plimsoll", "privileged")
	c.Apply("{apiVersion: v1, kind: Namespace, metadata: {name: heartbeats}}")
	c.kustomizeBaseIsValid(t)
	c.completeJobs()
	// This API server serves neither kinds of other projects, nor, before 1.36, MutatingAdmissionPolicies; no controller removes a namespace.
	const here = elsewhere + ",metricsAPI.certManager.enabled=false,monitoring.podMonitor.enabled=false,monitoring.serviceMonitor.enabled=false," +
		"monitoring.alerts.enabled=false,placement.admissionPolicy.enabled=false"
	inCluster := func() string {
		return c.Kubectl("get", "deployments,daemonsets,services,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings,poddisruptionbudgets,"+
			"validatingadmissionpolicies,validatingadmissionpolicybindings,flowschemas,prioritylevelconfigurations,apiservices,resourcequotas,networkpolicies",
			"-A", "-l", labelKey+"=plimsoll", "-o", "name")
	}
	c.mustHelm("install", "--take-ownership", "--set", here)
	before := inCluster()
	for _, name := range []string{"conventions", "names", "nodes", "least", "everything"} {
		to, back := []string{"--reset-values", "--values", combinations(t)[name], "--set", here}, []string{"--reset-values", "--set", here}
		if name != "names" { // one time is enough for the Jobs of the hooks
			to, back = append(to, "--no-hooks"), append(back, "--no-hooks")
		}
		c.mustHelm("upgrade", to...)
		if name == "names" {
			c.admissionPoliciesMatchTheAccounts(t)
		}
		if name == "everything" {
			c.policiesAreStoredAsTheChartWritesThem(t)
		}
		c.mustHelm("upgrade", back...)
		if after := inCluster(); after != before {
			t.Errorf("after %s and back there are\n%s\ninstead of\n%s", name, after, before)
		}
	}
}

// admissionPoliciesMatchTheAccounts sends requests that the policies must reject, as the accounts of ci/names-values.yaml.
func (c cluster) admissionPoliciesMatchTheAccounts(t *testing.T) {
	t.Helper()
	c.Apply("{apiVersion: v1, kind: Node, metadata: {name: it}}")
	for account, refusal := range map[string]string{
		"qos-node":   "the token is not bound to a node; an agent must use the token that the kubelet issued for its pod",
		"qos-leader": "the controller may change only our taints, the label plimsoll.dev/load and the condition InterferenceIdentified of Nodes",
	} {
		c.Eventually(time.Minute, "the policies of "+account+" are in force", func() error {
			_, err := c.TryKubectl("", "label", "node", "it", "a=b", "--as=system:serviceaccount:plimsoll:"+account)
			if err == nil {
				c.Kubectl("label", "node", "it", "a-")
				return fmt.Errorf("%s may label a node", account)
			}
			if !strings.Contains(err.Error(), refusal) {
				return err
			}
			return nil
		})
	}
}

// policiesAreStoredAsTheChartWritesThem: Argo CD compares lists of custom resources as a whole, so a default that the API server adds to an
// item would be a difference.
func (c cluster) policiesAreStoredAsTheChartWritesThem(t *testing.T) {
	t.Helper()
	rendered, err := render(t, "--values", combinations(t)["everything"])
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, object := range objects(t, rendered) {
		if object.GroupVersionKind().Group != "ensurance.crane.io" {
			continue
		}
		found++
		stored := objects(t, c.Kubectl("get", strings.ToLower(object.GetKind()), object.GetName(), "-o", "yaml"))[0]
		if path := differs(object.Object["spec"], stored.Object["spec"]); path != "" {
			t.Errorf("%s %s: spec%s is stored differently", object.GetKind(), object.GetName(), path)
		}
	}
	if found < 4 {
		t.Errorf("only %d policies were found", found)
	}
}

// differs is the path of a value that is stored differently than it was written, empty if there is none. A stored map may have more keys,
// except in a list.
func differs(written, stored any) string {
	switch written := written.(type) {
	case map[string]any:
		stored, _ := stored.(map[string]any)
		for key, value := range written {
			if path := differs(value, stored[key]); path != "" || stored[key] == nil {
				return "." + key + path
			}
		}
	default:
		if !equality.Semantic.DeepEqual(written, stored) {
			return ": " + fmt.Sprint(stored)
		}
	}
	return ""
}

// kustomizeBaseIsValid applies the kustomize base in a dry run. It is for Kubernetes 1.34 or later.
func (c cluster) kustomizeBaseIsValid(t *testing.T) {
	t.Helper()
	if strings.HasPrefix(c.Version(), "v1.33.") {
		return
	}
	c.Apply("{apiVersion: v1, kind: Namespace, metadata: {name: plimsoll-node-lease}}")
	out, err := c.TryKubectl("", "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-k", plane.Absolute(t, "deploy/kustomize/example"))
	if accepted := strings.Count(out, "serverside-applied"); err != nil || accepted < 50 {
		t.Errorf("of the kustomize base %d objects were accepted: %s (%v)", accepted, out, err)
	}
	c.Kubectl("delete", "namespace", "plimsoll-node-lease", "--wait=false")
}
