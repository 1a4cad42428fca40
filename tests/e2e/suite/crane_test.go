//go:build e2e

package suite

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"plimsoll.dev/suite/pages"
	"plimsoll.dev/suite/plane"
)

// craneChart imitates crane's chart: CRDs in the directory that Helm never upgrades, without status subresource and with little validation,
// and an agent that does nothing. It maps file names to contents.
func craneChart() map[string]string {
	files := map[string]string{
		"Chart.yaml": "{apiVersion: v2, name: crane, version: 0.11.0}",
		"templates/agent.yaml": fmt.Sprintf(`apiVersion: apps/v1
kind: DaemonSet
metadata: {name: crane-agent, namespace: {{ .Release.Namespace }}}
spec:
  selector: {matchLabels: {app: crane-agent}}
  template:
    metadata: {labels: {app: crane-agent}}
    spec:
      tolerations: [{operator: Exists}]
      terminationGracePeriodSeconds: 1
      containers: [{name: crane-agent, image: %q, imagePullPolicy: IfNotPresent, args: [pause]}]
`, toolsImage),
	}
	loose := "{type: object, x-kubernetes-preserve-unknown-fields: true}"
	rules := `{type: object, properties: {rules: {type: array, items: {type: object, required: [actionName], x-kubernetes-preserve-unknown-fields: true, properties: {
      actionName: {type: string}, strategy: {type: string, enum: [None, Preview], default: None}}}}}, x-kubernetes-preserve-unknown-fields: true}`
	for _, kind := range []struct{ name, plural, short, spec string }{
		{"NodeQOS", "nodeqoss", "nq", rules}, {"PodQOS", "podqoss", "pq", loose}, {"AvoidanceAction", "avoidanceactions", "avoid", loose},
	} {
		files["crds/"+kind.plural+".yaml"] = fmt.Sprintf(`apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: %[1]s.ensurance.crane.io}
spec:
  group: ensurance.crane.io
  scope: Cluster
  names: {kind: %[2]s, listKind: %[2]sList, plural: %[1]s, singular: %[3]s, shortNames: [%[4]s]}
  versions:
  - name: v1alpha1
    served: true
    storage: true
    schema:
      openAPIV3Schema: {type: object, required: [spec], properties: {spec: %[5]s, status: {type: object}}}
`, kind.plural, kind.name, strings.ToLower(kind.name), kind.short, kind.spec)
	}
	return files
}

// cranePolicies look like the guide's, for this node and with a test metric; crane accepts the last one, Plimsoll does not.
const cranePolicies = `
{apiVersion: ensurance.crane.io/v1alpha1, kind: AvoidanceAction, metadata: {name: throttle}, spec: {coolDownSeconds: 2, throttle: {cpuThrottle: {minCPURatio: 50, stepCPURatio: 25}}}}
---
{apiVersion: ensurance.crane.io/v1alpha1, kind: PodQOS, metadata: {name: all-be-pods}, spec: {allowedActions: [throttle],
  scopeSelector: {matchExpressions: [{operator: In, scopeName: Namespace, values: [%[1]s]}]}}}
---
{apiVersion: ensurance.crane.io/v1alpha1, kind: NodeQOS, metadata: {name: watermark2}, spec: {selector: {matchLabels: {kubernetes.io/hostname: %[2]s}},
  nodeQualityProbe: {timeoutSeconds: 2, httpGet: {scheme: HTTP, host: %[3]s, port: 80, path: /metrics}},
  rules: [{name: cpu-usage, avoidanceThreshold: 2, restoreThreshold: 2, actionName: throttle, strategy: "None", metricRule: {name: %[4]s, value: %[5]d}}]}}
---
{apiVersion: ensurance.crane.io/v1alpha1, kind: NodeQOS, metadata: {name: accepted-by-crane}, spec: {rules: [{name: nothing, actionName: throttle}]}}
`

// TestMigrationFromCraneFollowsTheDocs has the cluster to itself, and starts without Plimsoll.
func TestMigrationFromCraneFollowsTheDocs(t *testing.T) {
	needShell(t)
	file := filepath.Join(t.TempDir(), "values.yaml")
	page := pages.Read(t, absolute("."), "docs/migrating-from-crane.md", binary(), "KUBECONFIG="+absolute("target/e2e/kubeconfig"))
	page.Helm(plane.Tool(t, plane.Helm()), file)
	repository, tag, err := image()
	if err != nil {
		t.Fatal(err)
	}
	(&release{values: file}).setValues(t, repository, tag, generousBudgets)
	t.Cleanup(func() {
		if t.Failed() { // in whatever state
			tryKubectl("", "delete", "crd", "nodeqoss.ensurance.crane.io", "podqoss.ensurance.crane.io", "avoidanceactions.ensurance.crane.io", "--ignore-not-found")
			if err := install(); err != nil {
				t.Error(err)
			}
		}
	})
	guide := pages.Read(t, absolute("."), "docs/install.md", binary(), "KUBECONFIG="+absolute("target/e2e/kubeconfig"))
	guide.Run(t, "Uninstall")
	guide.Run(t, "Remove the rest")

	s := &scene{T: t, node: nodes[0], name: "from-crane", settleTimeout: time.Minute}
	kubectl(t, "create", "namespace", s.name)
	t.Cleanup(func() { kubectl(t, "delete", "namespace", s.name, "--wait=false") })
	s.set(cold)
	t.Cleanup(func() { s.set(0) })
	s.running(work{name: "limited", args: []string{"burn"}, limits: "100m", requests: "10m"})
	limited := s.victim("limited")
	installCrane(t)
	apply(t, fmt.Sprintf(cranePolicies, s.name, s.node, gaugeAddress, s.metric(), threshold))
	t.Cleanup(func() {
		kubectl(t, "delete", "nodeqos/watermark2", "nodeqos/accepted-by-crane", "podqos/all-be-pods", "avoidanceaction/throttle", "--ignore-not-found")
		s.waitRestored(time.Minute, limited.directory, limited.before)
	})
	kubectl(t, "taint", "node", s.node, taintKey+":PreferNoSchedule")
	before := policyUIDs(t)
	s.set(hot)

	if out, err := page.Try("Back up your policies"); err == nil || !strings.Contains(out, "metricRule") {
		t.Errorf("plimsoll check does not report the rule without a metric: %s", out)
	}
	page.Run(t, "Switch every rule to Preview")
	page.Run(t, "Remove crane-agent")
	page.Run(t, "Install Plimsoll")
	if now := policyUIDs(t); now != before {
		t.Errorf("the policies changed from %s to %s", before, now)
	}
	s.waitNoTaint(30 * time.Second)
	eventually(t, time.Minute, "the agent reports what it would do", func() error {
		now, err := watermarkOf(s.node)
		if err == nil && len(now.Status.Would) == 0 {
			err = fmt.Errorf("its rules are %+v", now.Status.Rules)
		}
		return err
	})
	// The invalid policy is found and has no effect.
	if out, err := page.Try("Check what they would do"); err == nil || !strings.Contains(out, "accepted-by-crane") {
		t.Errorf("plimsoll doctor does not report the rule without a metric: %s (%v)", out, err)
	}
	if err := checkRestored(limited.before, s.settings(limited.directory)); err != nil {
		t.Errorf("in Preview: %v", err)
	}

	page.Run(t, "Enforce them", "NAME", "watermark2")
	kubectl(t, "annotate", "nodeqos", "watermark2", "plimsoll.dev/rollout=immediate")
	s.waitRatio(time.Minute, limited, 50)
	if found, err := taint(s.node); err != nil || found != nil {
		t.Errorf("an action that only throttles closes the node: %v (%v)", found, err)
	}
	s.set(cold)
	s.waitRestored(time.Minute, limited.directory, limited.before)
	page.CheckAllRun()
}

// installCrane installs the imitation of crane.
func installCrane(t *testing.T) {
	t.Helper()
	directory := t.TempDir()
	for name, text := range craneChart() {
		path := filepath.Join(directory, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := helm("", "install", "crane", directory, "--namespace", "crane-system", "--create-namespace", "--wait"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		helm("", "uninstall", "crane", "--namespace", "crane-system", "--ignore-not-found")
		kubectl(t, "delete", "namespace", "crane-system", "--wait=false")
	})
}

// policyUIDs lists the UIDs of the policies.
func policyUIDs(t *testing.T) string {
	t.Helper()
	return kubectl(t, "get", "nodeqoss,podqoss,avoidanceactions", "-o", `jsonpath={range .items[*]}{.kind}/{.metadata.name} {.metadata.uid}{"\n"}{end}`)
}
