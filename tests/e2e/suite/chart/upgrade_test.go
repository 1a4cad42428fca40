//go:build e2e

package chart

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// valuesChangeInUpgrades upgrades from the default to each values file and back: no field that they change is immutable, and after both no object of
// the other is left.
func (c cluster) valuesChangeInUpgrades(t *testing.T) {
	// This API server serves neither kinds of other projects, nor, before 1.36, MutatingAdmissionPolicies; no controller removes a namespace.
	const here = elsewhere + ",metricsAPI.certManager.enabled=false,monitoring.podMonitor.enabled=false,monitoring.serviceMonitor.enabled=false," +
		"monitoring.alerts.enabled=false,placement.admissionPolicy.enabled=false"
	inCluster := func() string {
		return c.Kubectl("get", "deployments,daemonsets,services,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings,poddisruptionbudgets,"+
			"validatingadmissionpolicies,validatingadmissionpolicybindings,flowschemas,prioritylevelconfigurations,apiservices,resourcequotas,networkpolicies",
			"-A", "-l", labelKey+"=plimsoll", "-o", "name")
	}
	c.mustHelm("upgrade", "--reset-values", "--set", here)
	before := inCluster()
	for name, file := range combinations(t) {
		if name == "restore" || name == "default" {
			continue
		}
		c.mustHelm("upgrade", "--reset-values", "--values", file, "--set", here)
		if name == "names" {
			c.admissionPoliciesAreAboutTheAccounts(t)
		}
		c.mustHelm("upgrade", "--reset-values", "--set", here)
		if after := inCluster(); after != before {
			t.Errorf("after %s and back there are\n%s\ninstead of\n%s", name, after, before)
		}
	}
}

// admissionPoliciesAreAboutTheAccounts tries what the policies have to refuse, as the accounts of ci/names-values.yaml.
func (c cluster) admissionPoliciesAreAboutTheAccounts(t *testing.T) {
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
