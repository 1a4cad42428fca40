//go:build e2e

package chart

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"plimsoll.dev/suite/plane"
)

// A cluster is an API server without any node, and at first without anything of ours.
type cluster struct{ *plane.Plane }

func TestTheChartOnAnAPIServer(t *testing.T) {
	c := cluster{plane.Start(t, nil)}
	c.namespace("plimsoll", "privileged")
	others := plane.CertManagerDefinitions(t)
	c.Define(others)
	c.takesEveryCombination(t)
	for _, file := range append(others, plane.Absolute(t, "crds")) {
		c.Kubectl("delete", "-f", file)
	}
	c.refusesWhatCanNotWorkThere(t)
	c.installsAndSaysThatPoliciesComeLater(t)
	c.hasHooksThatKubernetesTakes(t)
	c.isTheOnlyReleaseInItsCluster(t)
	c.givesAgentsAPriorityLevelOfTheirOwn(t)
	c.bringsPoliciesOnceThereAreDefinitions(t)
	c.upgradesDefinitionsAndLeavesPoliciesAlone(t)
	c.leavesDefinitionsAndPoliciesWhenItGoes(t)
}

// namespace makes one that is held to a Pod Security standard.
func (c cluster) namespace(name, standard string) {
	c.T.Helper()
	c.Apply(fmt.Sprintf("{apiVersion: v1, kind: Namespace, metadata: {name: %s, labels: {pod-security.kubernetes.io/enforce: %s}}}", name, standard))
}

// helm runs a command of Helm's with the chart.
func (c cluster) helm(command, release, namespace string, args ...string) (string, error) {
	c.T.Helper()
	return c.helmOf(plane.Absolute(c.T, chart), command, release, namespace, args...)
}

// helmOf does the same with a chart of this folder.
func (c cluster) helmOf(folder, command, release, namespace string, args ...string) (string, error) {
	c.T.Helper()
	return run(c.T, "", plane.Helm(), append([]string{"--kubeconfig", c.Kubeconfig, command, release, folder, "--namespace", namespace}, args...)...)
}

// older is a chart whose definition of NodeWatermarks has another column.
func older(t *testing.T) string {
	t.Helper()
	folder := t.TempDir()
	if err := os.CopyFS(folder, os.DirFS(plane.Absolute(t, chart))); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(folder, "files/crds/plimsoll.dev_nodewatermarks.yaml")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	const columns = "additionalPrinterColumns:\n"
	changed := strings.Replace(string(text), columns, columns+"    - {name: Older, type: string, jsonPath: .metadata.name}\n", 1)
	if changed == string(text) {
		t.Fatal("the definition has no columns")
	}
	if err := os.WriteFile(file, []byte(changed), 0o600); err != nil {
		t.Fatal(err)
	}
	return folder
}

// takes fails the test where Helm does not do it; the answer is what it prints.
func (c cluster) takes(command string, args ...string) string {
	c.T.Helper()
	out, err := c.helm(command, "plimsoll", "plimsoll", args...)
	if err != nil {
		c.T.Fatal(err)
	}
	return out
}

func (c cluster) takesEveryCombination(t *testing.T) {
	c.Apply("{apiVersion: v1, kind: Namespace, metadata: {name: heartbeats}}")
	for name, file := range combinations(t) {
		// The Prometheus operator's definitions are not there: checkMonitoring reads these objects.
		rendered, err := render(t, "--values", file, "--set", "leases.namespace=heartbeats,monitoring.podMonitor.enabled=false,monitoring.alerts.enabled=false")
		if err != nil {
			t.Fatal(err)
		}
		if out, err := c.TryKubectl(rendered, "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-"); err != nil {
			t.Errorf("%s: %v", name, err)
		} else if taken := strings.Count(out, "serverside-applied"); taken < 15 {
			t.Errorf("%s: %d objects were taken: %s", name, taken, out)
		}
	}
}

func (c cluster) refusesWhatCanNotWorkThere(t *testing.T) {
	c.namespace("strict", "restricted")
	_, err := c.helm("install", "plimsoll", "strict")
	if err == nil || !strings.Contains(err.Error(), "kubectl label namespace strict pod-security.kubernetes.io/enforce=privileged --overwrite") {
		t.Errorf("the answer is %v", err)
	}
	_, err = c.helm("install", "plimsoll", "plimsoll", "--set", "monitoring.podMonitor.enabled=true")
	if err == nil || !strings.Contains(err.Error(), "this cluster does not serve monitoring.coreos.com/v1/PodMonitor: have it served, or go without it: --set monitoring.podMonitor.enabled=false") {
		t.Errorf("the answer is %v", err)
	}
	_, err = c.helm("install", "plimsoll", "plimsoll", "--set", "metricsAPI.certManager.enabled=true")
	if err == nil || !strings.Contains(err.Error(), "this cluster does not serve cert-manager.io/v1/Certificate: have it served, or go without it: --set metricsAPI.certManager.enabled=false") {
		t.Errorf("the answer is %v", err)
	}
	_, err = c.helm("install", "plimsoll", "plimsoll", "--set", "restoreNode=worker-1")
	if err == nil || !strings.Contains(err.Error(), "restoreNode is for `helm template`, not for a release") {
		t.Errorf("the answer is %v", err)
	}
	c.Apply("{apiVersion: v1, kind: Namespace, metadata: {name: plain}}")
	if notes, err := c.helm("install", "plimsoll", "plain", "--dry-run=server"); err != nil || !strings.Contains(notes, "kubectl label namespace plain") {
		t.Errorf("the notes in a namespace that says nothing: %s (%v)", notes, err)
	}
}

func (c cluster) installsAndSaysThatPoliciesComeLater(t *testing.T) {
	notes := c.takes("install", "--set", "policies.preset=preview")
	if !strings.Contains(notes, "ARE NOT THERE YET") || strings.Contains(notes, "kubectl label namespace") {
		t.Errorf("the notes: %s", notes)
	}
}

// hasHooksThatKubernetesTakes looks at what `helm template` does not print.
func (c cluster) hasHooksThatKubernetesTakes(t *testing.T) {
	hooks, err := run(t, "", plane.Helm(), "--kubeconfig", c.Kubeconfig, "get", "hooks", "plimsoll", "--namespace", "plimsoll")
	if err != nil {
		t.Fatal(err)
	}
	checkSchemas(t, hooks)
	checkPractice(t, hooks)
	kinds := map[string]int{}
	for _, object := range objects(t, hooks) {
		kinds[object.GetKind()+" "+object.GetAnnotations()["helm.sh/hook"]]++
	}
	if kinds["Pod test"] != 1 || kinds["Job pre-delete"] != 1 {
		t.Errorf("the hooks are %v", kinds)
	}
	if out, err := c.TryKubectl(hooks, "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"); err != nil {
		t.Error(err, out)
	}
}

// givesAgentsAPriorityLevelOfTheirOwn asks as an agent does, and as any other account: the API server tells which schema took the request.
func (c cluster) givesAgentsAPriorityLevelOfTheirOwn(t *testing.T) {
	uid := func(kind string) string {
		return c.Kubectl("get", kind, "plimsoll-agent", "-o", "jsonpath={.metadata.uid}")
	}
	want := []string{"X-Kubernetes-Pf-Flowschema-Uid: " + uid("flowschema"), "X-Kubernetes-Pf-Prioritylevel-Uid: " + uid("prioritylevelconfiguration")}
	taken := func(account string) bool {
		// Whatever the answer is: kubectl prints the headers at this level.
		out, err := c.TryKubectl("", "get", "--raw", "/api/v1/nodes", "--as=system:serviceaccount:plimsoll:"+account, "-v=9")
		if err != nil {
			out = err.Error()
		}
		if !strings.Contains(out, "X-Kubernetes-Pf-Flowschema-Uid: ") {
			t.Fatalf("no schema took the request: %s", out)
		}
		return strings.Contains(out, want[0]) && strings.Contains(out, want[1])
	}
	c.Eventually(time.Minute, "requests of agents are taken by their own schema", func() error {
		if !taken("plimsoll-agent") {
			return errors.New("another took it")
		}
		return nil
	})
	if taken("default") {
		t.Error("the schema takes requests of others, too")
	}
}

func (c cluster) isTheOnlyReleaseInItsCluster(t *testing.T) {
	c.namespace("other", "privileged")
	for _, other := range []struct{ name, namespace string }{{"plimsoll", "other"}, {"second", "plimsoll"}, {"second", "other"}} {
		for _, more := range [][]string{{}, {"--dry-run=server"}, {"--set", "crds.install=false,metricsAPI.enabled=false,evictionBudget.enabled=false,flowControl.enabled=false,leases.createNamespace=false"}} {
			_, err := c.helm("install", other.name, other.namespace, more...)
			if err == nil || !strings.Contains(err.Error(), "this cluster has Plimsoll already: release plimsoll in namespace plimsoll. Upgrade that one, or remove it first: helm uninstall plimsoll --namespace plimsoll") {
				t.Errorf("release %s in namespace %s %v: %v", other.name, other.namespace, more, err)
			}
		}
	}
}

func (c cluster) bringsPoliciesOnceThereAreDefinitions(t *testing.T) {
	if found := c.Kubectl("get", "nodeqoss", "-o", "name"); found != "" {
		t.Errorf("there are policies before their definitions: %s", found)
	}
	c.takes("upgrade", "--reset-then-reuse-values")
	if found := c.Kubectl("get", "nodeqoss", "-o", "jsonpath={.items[*].spec.rules[*].strategy}"); found != "Preview Preview Preview Preview" {
		t.Errorf("the strategies of preset preview: %s", found)
	}
	notes := c.takes("upgrade", "--set", "policies.preset=conservative")
	if found := c.Kubectl("get", "nodeqoss", "-o", "name"); found != "nodeqos.ensurance.crane.io/plimsoll-conservative" {
		t.Errorf("after another preset: %s", found)
	}
	if !strings.Contains(notes, "The policies of preset conservative are installed") {
		t.Errorf("the notes: %s", notes)
	}
	c.takes("upgrade", "--reset-values")
	if found := c.Kubectl("get", "nodeqoss,podqoss,avoidanceactions", "-o", "name"); found != "" {
		t.Errorf("without a preset: %s", found)
	}
}

func (c cluster) upgradesDefinitionsAndLeavesPoliciesAlone(t *testing.T) {
	c.Kubectl("apply", "-f", plane.Absolute(t, "examples/ensurance/throttle.yaml"))
	before := c.Kubectl("get", "nodeqos", "watermark2", "-o", "jsonpath={.metadata.uid} {.metadata.generation}")
	columns := func() string {
		return c.Kubectl("get", "crd", "nodewatermarks.plimsoll.dev", "-o", "jsonpath={.spec.versions[0].additionalPrinterColumns[*].name}")
	}
	now := columns()
	if _, err := c.helmOf(older(t), "upgrade", "plimsoll", "plimsoll"); err != nil {
		t.Fatal(err)
	}
	if before := columns(); before != "Older "+now {
		t.Errorf("the older chart's columns are %s", before)
	}
	c.takes("upgrade")
	if after := columns(); after != now {
		t.Errorf("columns are %s, not %s", after, now)
	}
	if after := c.Kubectl("get", "nodeqos", "watermark2", "-o", "jsonpath={.metadata.uid} {.metadata.generation}"); after != before {
		t.Errorf("a policy was %s and is %s", before, after)
	}
}

func (c cluster) leavesDefinitionsAndPoliciesWhenItGoes(t *testing.T) {
	if _, err := run(t, "", plane.Helm(), "--kubeconfig", c.Kubeconfig, "uninstall", "plimsoll", "--namespace", "plimsoll", "--no-hooks"); err != nil {
		t.Fatal(err)
	}
	if found := c.Kubectl("get", "nodeqoss", "-o", "name"); found != "nodeqos.ensurance.crane.io/watermark2" {
		t.Errorf("policies that are left: %q", found)
	}
	if found := c.Kubectl("get", "clusterrolebindings,clusterroles,flowschemas,prioritylevelconfigurations,apiservices", "-l", "app.kubernetes.io/name=plimsoll", "-o", "name"); found != "" {
		t.Errorf("it left %s", found)
	}
	// The next one may have the definitions, by whatever name. (Nobody is here who would end the deletion of a namespace.)
	if _, err := c.helm("install", "second", "other", "--take-ownership", "--set", "leases.namespace=heartbeats,leases.createNamespace=false"); err != nil {
		t.Error(err)
	}
}
