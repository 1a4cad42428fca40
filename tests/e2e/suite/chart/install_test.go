//go:build e2e

package chart

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"plimsoll.dev/suite/plane"
)

// A cluster is an API server without nodes, and initially without our objects.
type cluster struct{ *plane.Plane }

// TestTheChartOnAnAPIServer spends most of its time waiting, so the other slow tests run in parallel with it.
func TestTheChartOnAnAPIServer(t *testing.T) {
	t.Parallel()
	c := cluster{plane.Start(t, nil)}
	c.namespace("plimsoll", "privileged")
	others := plane.CertManagerCRDFiles(t)
	c.ApplyCRDs(others)
	c.everyCombinationIsValid(t)
	for _, file := range others {
		c.Kubectl("delete", "-f", file)
	}
	c.removeCRDs()
	c.unusableClustersAreRejected(t)
	c.completeJobs()
	c.installCreatesCRDsAndPolicies(t)
	c.hooksAreValid(t)
	c.secondReleaseIsRejected(t)
	c.requestsHaveTheirPriorityLevels(t)
	c.objectsOfOtherWritersAreKept(t)
	c.presetChangesPolicies(t)
	c.upgradeChangesCRDsAndKeepsPolicies(t)
	c.uninstallKeepsCRDsAndPolicies(t)
	c.uninstallRemovesPoliciesOfFirstRevision(t)
}

func TestClusterWithoutMutatingPoliciesIsRejectedForPlacement(t *testing.T) {
	t.Parallel()
	off := "admissionregistration.k8s.io/v1/mutatingadmissionpolicies=false,admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings=false"
	c := cluster{plane.Start(t, []string{"--runtime-config=" + off, "--disable-admission-plugins=MutatingAdmissionPolicy"})}
	c.namespace("plimsoll", "privileged")
	_, err := c.helm("install", "plimsoll", "plimsoll", "--set", "placement.admissionPolicy.enabled=true")
	if err == nil || !strings.Contains(err.Error(), "this cluster does not serve MutatingAdmissionPolicies of admissionregistration.k8s.io. Kubernetes 1.36 does") {
		t.Errorf("helm install did not fail with the expected message: %v", err)
	}
}

func TestClusterWithoutAdmissionPoliciesIsRejected(t *testing.T) {
	t.Parallel()
	off := "admissionregistration.k8s.io/v1/validatingadmissionpolicies=false,admissionregistration.k8s.io/v1/validatingadmissionpolicybindings=false"
	c := cluster{plane.Start(t, []string{"--runtime-config=" + off, "--disable-admission-plugins=ValidatingAdmissionPolicy"})}
	c.namespace("plimsoll", "privileged")
	_, err := c.helm("install", "plimsoll", "plimsoll", "--take-ownership")
	if err == nil || !strings.Contains(err.Error(), "this cluster does not serve admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy, which restricts each agent to its own node") {
		t.Errorf("helm install did not fail with the expected message: %v", err)
	}
}

// removeCRDs deletes our CRDs and waits until they are not served any more.
func (c cluster) removeCRDs() {
	c.T.Helper()
	c.Kubectl("delete", "-f", plane.Absolute(c.T, "crds"))
	c.Eventually(time.Minute, "policies are no longer served", func() error {
		if found, err := c.TryKubectl("", "get", "--raw", "/apis/ensurance.crane.io/v1alpha1"); err == nil {
			return fmt.Errorf("the API is still served: %s", found)
		}
		return nil
	})
}

// completeJobs marks every Job of a release as complete until the test ends: no kubelet runs their pods here.
func (c cluster) completeJobs() {
	const complete = `{"status":{"startTime":"2026-01-01T00:00:00Z","completionTime":"2026-01-01T00:00:01Z","succeeded":1,
		"conditions":[{"type":"SuccessCriteriaMet","status":"True"},{"type":"Complete","status":"True"}]}}`
	done := make(chan struct{})
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			jobs, err := c.TryKubectl("", "get", "jobs", "-A", "-o", `jsonpath={range .items[*]}{.metadata.namespace} {.metadata.name}{"\n"}{end}`)
			for job := range strings.Lines(jobs) {
				if namespace, name, found := strings.Cut(strings.TrimSpace(job), " "); found && err == nil {
					c.TryKubectl("", "patch", "job", name, "-n", namespace, "--subresource=status", "--type=merge", "-p", complete)
				}
			}
			select {
			case <-done:
				return
			case <-time.After(500 * time.Millisecond):
			}
		}
	}()
	c.T.Cleanup(func() {
		close(done)
		<-stopped
	})
}

// namespace creates a namespace that enforces a Pod Security standard.
func (c cluster) namespace(name, standard string) {
	c.T.Helper()
	c.Apply(fmt.Sprintf("{apiVersion: v1, kind: Namespace, metadata: {name: %s, labels: {pod-security.kubernetes.io/enforce: %s}}}", name, standard))
}

// helm runs a Helm command with the chart.
func (c cluster) helm(command, release, namespace string, args ...string) (string, error) {
	c.T.Helper()
	return c.helmOf(plane.Absolute(c.T, chart), command, release, namespace, args...)
}

// helmOf does the same with the chart in this directory.
func (c cluster) helmOf(directory, command, release, namespace string, args ...string) (string, error) {
	c.T.Helper()
	return run(c.T, "", plane.Helm(), append([]string{"--kubeconfig", c.Kubeconfig, command, release, directory, "--namespace", namespace}, args...)...)
}

// olderChart is the directory of a chart whose NodeWatermark CRD has another column.
func olderChart(t *testing.T) string {
	t.Helper()
	directory := t.TempDir()
	if err := os.CopyFS(directory, os.DirFS(plane.Absolute(t, chart))); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(directory, "files/crds/plimsoll.dev_nodewatermarks.yaml")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	const columns = "additionalPrinterColumns:\n"
	changed := strings.Replace(string(text), columns, columns+"    - {name: Older, type: string, jsonPath: .metadata.name}\n", 1)
	if changed == string(text) {
		t.Fatal("the CustomResourceDefinition has no printer columns")
	}
	if err := os.WriteFile(file, []byte(changed), 0o600); err != nil {
		t.Fatal(err)
	}
	return directory
}

// mustHelm fails the test if Helm fails; it returns the output.
func (c cluster) mustHelm(command string, args ...string) string {
	c.T.Helper()
	out, err := c.helm(command, "plimsoll", "plimsoll", args...)
	if err != nil {
		c.T.Fatal(err)
	}
	return out
}

func (c cluster) everyCombinationIsValid(t *testing.T) {
	for _, namespace := range []string{"heartbeats", "qos-system"} {
		c.Apply("{apiVersion: v1, kind: Namespace, metadata: {name: " + namespace + "}}")
	}
	for name, file := range combinations(t) {
		// The Prometheus operator's CRDs are missing here: checkMonitoring validates these objects. MutatingAdmissionPolicies are not served
		// before Kubernetes 1.36: package placement installs one.
		rendered, err := render(t, "--kube-version", c.Version(), "--values", file, "--set", "leases.namespace=heartbeats,monitoring.podMonitor.enabled=false,monitoring.serviceMonitor.enabled=false,monitoring.alerts.enabled=false,placement.admissionPolicy.enabled=false")
		if err != nil {
			t.Fatal(err)
		}
		if out, err := c.TryKubectl(rendered, "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-"); err != nil {
			t.Errorf("%s: %v", name, err)
		} else if accepted := strings.Count(out, "serverside-applied"); accepted < 15 {
			t.Errorf("%s: only %d objects were accepted: %s", name, accepted, out)
		}
	}
}

func (c cluster) unusableClustersAreRejected(t *testing.T) {
	c.namespace("strict", "restricted")
	_, err := c.helm("install", "plimsoll", "strict")
	if err == nil || !strings.Contains(err.Error(), "kubectl label namespace strict pod-security.kubernetes.io/enforce=privileged --overwrite") {
		t.Errorf("helm install did not fail with the expected message: %v", err)
	}
	_, err = c.helm("install", "plimsoll", "plimsoll", "--set", "monitoring.podMonitor.enabled=true")
	if err == nil || !strings.Contains(err.Error(), "this cluster does not serve monitoring.coreos.com/v1/PodMonitor: install it, or do without it: --set monitoring.podMonitor.enabled=false") {
		t.Errorf("helm install did not fail with the expected message: %v", err)
	}
	_, err = c.helm("install", "plimsoll", "plimsoll", "--set", "metricsAPI.certManager.enabled=true")
	if err == nil || !strings.Contains(err.Error(), "this cluster does not serve cert-manager.io/v1/Certificate: install it, or do without it: --set metricsAPI.certManager.enabled=false") {
		t.Errorf("helm install did not fail with the expected message: %v", err)
	}
	_, err = c.helm("install", "plimsoll", "plimsoll", "--set", "policies.preset=preview,crds.install=false")
	if err == nil || !strings.Contains(err.Error(), "policies.preset=preview needs the CRDs of Plimsoll, which this cluster does not have: plimsoll crds") || !strings.Contains(err.Error(), " | kubectl apply") {
		t.Errorf("helm install did not fail with the expected message: %v", err)
	}
	_, err = c.helm("install", "plimsoll", "plimsoll", "--set", "namespaceOverride=nowhere")
	if err == nil || !strings.Contains(err.Error(), "namespaceOverride: there is no namespace nowhere, and Helm creates only that of the release: kubectl create namespace nowhere") {
		t.Errorf("helm install did not fail with the expected message: %v", err)
	}
	c.Apply("{apiVersion: v1, kind: Namespace, metadata: {name: plain}}")
	if notes, err := c.helm("install", "plimsoll", "plain", "--dry-run=server"); err != nil || !strings.Contains(notes, "kubectl label namespace plain") {
		t.Errorf("notes for a namespace without a Pod Security label: %s (%v)", notes, err)
	}
}

func (c cluster) installCreatesCRDsAndPolicies(t *testing.T) {
	notes := c.mustHelm("install", "--set", "policies.preset=preview")
	if !strings.Contains(notes, "The policies of preset preview are installed") || strings.Contains(notes, "kubectl label namespace") {
		t.Errorf("unexpected notes of the release: %s", notes)
	}
	for _, part := range []string{"helm test plimsoll -n plimsoll\n", "plimsoll doctor ", "plimsoll top ", "plimsoll stop --reason", "into its label plimsoll.dev/load",
		"may create tokens for the ServiceAccounts of agents and controller: only\n", "https://github.com/plimsoll/plimsoll/blob/main/docs/SUMMARY.md"} {
		if !strings.Contains(notes, part) {
			t.Errorf("the notes of the release lack %q: %s", part, notes)
		}
	}
	c.has("plimsoll-preview", "at the first installation")
	if found := c.Kubectl("get", "nodeqoss", "-o", "jsonpath={.items[*].spec.rules[*].strategy} {.items[*].spec.selector}"); strings.TrimSpace(found) != "Preview Preview Preview Preview" {
		t.Errorf("unexpected strategies or selectors of preset preview: %s", found)
	}
	// The hook that waited for the CRDs is gone.
	if left := c.Kubectl("get", "jobs,serviceaccounts", "-n", "plimsoll", "-l", "app.kubernetes.io/component=policies", "-o", "name"); left != "" {
		t.Errorf("not deleted: %s", left)
	}
}

// has fails the test unless all policies belong to this preset, with at least one of each kind.
func (c cluster) has(name, when string) {
	c.T.Helper()
	found := strings.Fields(c.Kubectl("get", "nodeqoss,podqoss,avoidanceactions", "-o", "name"))
	kinds := map[string]bool{}
	for _, policy := range found {
		kind, named, _ := strings.Cut(policy, "/")
		kinds[kind] = true
		if !strings.HasPrefix(named, name) {
			c.T.Errorf("%s: unexpected policy %s", when, policy)
		}
	}
	if len(kinds) != 3 {
		c.T.Errorf("%s: the policies are %v, not those of %s", when, found, name)
	}
}

// hooksAreValid validates the hooks, which `helm template` does not print.
func (c cluster) hooksAreValid(t *testing.T) {
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
	if kinds["Pod test"] != 1 || kinds["Job post-install,post-upgrade,post-rollback"] != 1 || kinds["Job pre-delete"] != 1 || kinds["Job post-install"] != 1 || kinds["NodeQOS post-install,post-rollback"] != 1 {
		t.Errorf("unexpected hooks: %v", kinds)
	}
	// Policies exist, created by hooks.
	if out, err := c.TryKubectl(hooks, "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-"); err != nil {
		t.Error(err, out)
	}
}

// requestsHaveTheirPriorityLevels sends requests as agents, controllers and other accounts: the API server's response headers name the flow
// schema of the request.
func (c cluster) requestsHaveTheirPriorityLevels(t *testing.T) {
	const leases = "/apis/coordination.k8s.io/v1/namespaces/%s/leases/it"
	heartbeat, election := fmt.Sprintf(leases, "plimsoll-node-lease"), fmt.Sprintf(leases, "plimsoll")
	usesSchema := func(schema, account, path string) bool {
		uid := func(kind string) string {
			return c.Kubectl("get", kind, schema, "-o", "jsonpath={.metadata.uid}")
		}
		// At this log level kubectl prints the headers of any response.
		out, err := c.TryKubectl("", "get", "--raw", path, "--as=system:serviceaccount:plimsoll:"+account, "-v=9")
		if err != nil {
			out = err.Error()
		}
		if !strings.Contains(out, "X-Kubernetes-Pf-Flowschema-Uid: ") {
			t.Fatalf("the response names no flow schema: %s", out)
		}
		return strings.Contains(out, "X-Kubernetes-Pf-Flowschema-Uid: "+uid("flowschema")) &&
			strings.Contains(out, "X-Kubernetes-Pf-Prioritylevel-Uid: "+uid("prioritylevelconfiguration"))
	}
	for _, kind := range []struct{ schema, account, path string }{
		{"plimsoll-agent", "plimsoll-agent", "/api/v1/nodes"},
		{"plimsoll-agent", "plimsoll-agent", "/version"}, // probes have a schema of Kubernetes' own
		{"plimsoll-agent-leases", "plimsoll-agent", heartbeat},
		{"plimsoll-agent", "plimsoll-agent", election},
		{"plimsoll-controller-election", "plimsoll-controller", election},
		{"service-accounts", "plimsoll-controller", heartbeat},
		{"service-accounts", "default", "/api/v1/nodes"},
	} {
		if kind.schema == "service-accounts" { // whose level has another name
			if usesSchema("plimsoll-agent", kind.account, kind.path) || usesSchema("plimsoll-controller-election", kind.account, kind.path) {
				t.Errorf("a flow schema of ours matches %s of %s", kind.path, kind.account)
			}
			continue
		}
		c.Eventually(time.Minute, kind.schema+" matches "+kind.path, func() error {
			if !usesSchema(kind.schema, kind.account, kind.path) {
				return fmt.Errorf("another flow schema matches %s of %s", kind.path, kind.account)
			}
			return nil
		})
	}
}

// objectsOfOtherWritersAreKept replaces all objects of the release (helm upgrade --force), which drops fields that are in no manifest: the
// emergency stop, the CA of the replicas and the record of evictions must survive.
func (c cluster) objectsOfOtherWritersAreKept(t *testing.T) {
	stop := func(change string) {
		c.Kubectl("annotate", "configmap", "plimsoll-stop", "-n", "plimsoll-node-lease", "plimsoll.dev/stop"+change)
	}
	stop("=why")
	// As controllers create them.
	for _, object := range []string{"configmap plimsoll-report-ca", "configmap plimsoll-evictions", "secret generic plimsoll-metrics-ca"} {
		c.Kubectl(append(append([]string{"create"}, strings.Fields(object)...), "-n", "plimsoll", "--from-literal=it=is")...)
	}
	read := func() string {
		return c.Kubectl("get", "configmap", "plimsoll-stop", "-n", "plimsoll-node-lease", "-o", "jsonpath={.metadata.uid} {.metadata.annotations}") + "\n" +
			c.Kubectl("get", "-n", "plimsoll", "configmap/plimsoll-report-ca", "configmap/plimsoll-evictions", "secret/plimsoll-metrics-ca", "-o",
				`jsonpath={range .items[*]}{.metadata.uid} {.data}{"\n"}{end}`)
	}
	before := read()
	if !strings.Contains(before, `"plimsoll.dev/stop":"why"`) || strings.Count(before, `"it":`) != 3 {
		t.Fatalf("unexpected objects before the upgrade: %s", before)
	}
	same := func(after string) {
		t.Helper()
		if now := read(); now != before {
			t.Errorf("%s changed the objects to\n%sfrom\n%s", after, now, before)
		}
	}
	force := []string{"--force"}
	if plane.Helm() != "helm" { // Helm 4
		force = []string{"--force-replace", "--server-side=false"}
	}
	c.mustHelm("upgrade", append(force, "--reset-then-reuse-values")...)
	same("an upgrade with --force")
	manifest, err := run(t, "", plane.Helm(), "--kubeconfig", c.Kubeconfig, "get", "manifest", "plimsoll", "--namespace", "plimsoll")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.TryKubectl(manifest, "replace", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	same("a replacement of all objects")
	if _, err := c.ofRelease("rollback", force...); err != nil {
		t.Fatal(err)
	}
	same("a rollback with --force")
	c.objectsOfOlderChartsAreKept(same)
	stop("-")
}

// objectsOfOlderChartsAreKept upgrades twice from a release whose chart contained one of these objects.
func (c cluster) objectsOfOlderChartsAreKept(same func(after string)) {
	c.T.Helper()
	directory := c.T.TempDir()
	if err := os.CopyFS(directory, os.DirFS(plane.Absolute(c.T, chart))); err != nil {
		c.T.Fatal(err)
	}
	const object = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: plimsoll-report-ca, namespace: plimsoll}\n"
	if err := os.WriteFile(filepath.Join(directory, "templates/before.yaml"), []byte(object), 0o600); err != nil {
		c.T.Fatal(err)
	}
	if _, err := c.helmOf(directory, "upgrade", "plimsoll", "plimsoll", "--reset-then-reuse-values", "--take-ownership"); err != nil {
		c.T.Fatal(err)
	}
	for _, which := range []string{"first", "second"} {
		c.mustHelm("upgrade", "--reset-then-reuse-values")
		same("the " + which + " upgrade from a chart that contained the object")
	}
}

func (c cluster) secondReleaseIsRejected(t *testing.T) {
	c.namespace("other", "privileged")
	for _, other := range []struct{ name, namespace string }{{"plimsoll", "other"}, {"second", "plimsoll"}, {"second", "other"}} {
		for _, more := range [][]string{{}, {"--dry-run=server"}, {"--set", "crds.install=false,metricsAPI.enabled=false,evictionBudget.enabled=false,flowControl.enabled=false,leases.createNamespace=false"}} {
			_, err := c.helm("install", other.name, other.namespace, more...)
			if err == nil || !strings.Contains(err.Error(), "this cluster has Plimsoll already: release plimsoll in namespace plimsoll. Upgrade that one, or remove it first: helm uninstall plimsoll --namespace plimsoll") {
				t.Errorf("release %s in namespace %s %v: %v", other.name, other.namespace, more, err)
			}
		}
	}
	if _, err := c.helm("upgrade", "plimsoll", "plimsoll", "--set", "namespaceOverride=other"); err == nil ||
		!strings.Contains(err.Error(), "namespaceOverride: the objects of release plimsoll are in namespace plimsoll; an upgrade cannot move them to other") {
		t.Errorf("the release may move: %v", err)
	}
}

// strategies are those of rules, and of policies on pods that only report.
func (c cluster) strategies() string {
	return c.Kubectl("get", "nodeqoss,podqoss", "-o", `jsonpath={.items[*].spec.rules[*].strategy} {.items[*].metadata.annotations.plimsoll\.dev/strategy}`)
}

// presetChangesPolicies starts with the policies that a hook created for the first revision.
func (c cluster) presetChangesPolicies(t *testing.T) {
	policy := func() string { return c.Kubectl("get", "nodeqoss", "-o", "jsonpath={.items[*].metadata.uid}") }
	first := policy()
	c.mustHelm("upgrade", "--reset-then-reuse-values")
	if now := policy(); now != first {
		t.Errorf("the upgrade created the policies again: UIDs are %s, were %s", now, first)
	}
	c.has("plimsoll-preview", "after an upgrade")
	if _, err := c.ofRelease("rollback", "1"); err != nil {
		t.Error(err)
	}
	c.has("plimsoll-preview", "rolled back to the first revision")
	notes := c.mustHelm("upgrade", "--set", "policies.preset=conservative")
	c.has("plimsoll-conservative", "after another preset")
	if !strings.Contains(notes, "The policies of preset conservative are installed") || !strings.Contains(notes, "--set policies.mode=Enforce") {
		t.Errorf("unexpected notes of the release: %s", notes)
	}
	c.mustHelm("upgrade", "--set", "policies.preset=protect")
	c.has("plimsoll-protect", "after another preset")
	if found := c.strategies(); found != "Preview Preview Preview" {
		t.Errorf("strategies of preset protect: %q", found)
	}
	if notes := c.mustHelm("upgrade", "--reset-then-reuse-values", "--set", "policies.mode=Enforce"); strings.Contains(notes, "only report") {
		t.Errorf("unexpected notes of mode Enforce: %s", notes)
	}
	if found := c.strategies(); found != "Enforce" {
		t.Errorf("strategies of preset protect in mode Enforce: %q", found)
	}
	c.mustHelm("upgrade", "--reset-values")
	if found := c.Kubectl("get", "nodeqoss,podqoss,avoidanceactions", "-o", "name"); found != "" {
		t.Errorf("policies exist although no preset is set: %s", found)
	}
}

func (c cluster) upgradeChangesCRDsAndKeepsPolicies(t *testing.T) {
	c.Kubectl("apply", "-f", plane.Absolute(t, "examples/ensurance/throttle.yaml"))
	before := c.Kubectl("get", "nodeqos", "watermark2", "-o", "jsonpath={.metadata.uid} {.metadata.generation}")
	columns := func() string {
		return c.Kubectl("get", "crd", "nodewatermarks.plimsoll.dev", "-o", "jsonpath={.spec.versions[0].additionalPrinterColumns[*].name}")
	}
	now := columns()
	if _, err := c.helmOf(olderChart(t), "upgrade", "plimsoll", "plimsoll"); err != nil {
		t.Fatal(err)
	}
	if before := columns(); before != "Older "+now {
		t.Errorf("unexpected columns from the older chart: %s", before)
	}
	c.mustHelm("upgrade")
	if after := columns(); after != now {
		t.Errorf("columns after the upgrade are %s, not %s", after, now)
	}
	if after := c.Kubectl("get", "nodeqos", "watermark2", "-o", "jsonpath={.metadata.uid} {.metadata.generation}"); after != before {
		t.Errorf("the upgrade changed a policy from %s to %s", before, after)
	}
}

func (c cluster) uninstallKeepsCRDsAndPolicies(t *testing.T) {
	if _, err := run(t, "", plane.Helm(), "--kubeconfig", c.Kubeconfig, "uninstall", "plimsoll", "--namespace", "plimsoll", "--no-hooks"); err != nil {
		t.Fatal(err)
	}
	if found := c.Kubectl("get", "nodeqoss", "-o", "name"); found != "nodeqos.ensurance.crane.io/watermark2" {
		t.Errorf("unexpected policies after the uninstall: %q", found)
	}
	if found := c.Kubectl("get", "clusterrolebindings,clusterroles,flowschemas,prioritylevelconfigurations,apiservices", "-l", "app.kubernetes.io/name=plimsoll", "-o", "name"); found != "" {
		t.Errorf("not deleted: %s", found)
	}
	// The next release may own the CRDs, whatever its name, and have its objects in another namespace.
	for _, command := range []string{"install", "upgrade"} {
		if _, err := c.helm(command, "second", "other", "--take-ownership", "--set", elsewhere+",namespaceOverride=plain"); err != nil {
			t.Error(err)
		}
	}
	if found := c.Kubectl("get", "deployments,daemonsets", "-A", "-o", "jsonpath={.items[*].metadata.namespace}"); found != "plain plain" {
		t.Errorf("with namespaceOverride the workloads are in %q", found)
	}
	if _, err := run(t, "", plane.Helm(), "--kubeconfig", c.Kubeconfig, "uninstall", "second", "--namespace", "other", "--no-hooks"); err != nil {
		t.Error(err)
	}
}

// elsewhere is the Lease namespace for a release while an earlier namespace is terminating: no namespace controller runs here.
const elsewhere = "leases.namespace=heartbeats,leases.createNamespace=false"

func (c cluster) uninstallRemovesPoliciesOfFirstRevision(t *testing.T) {
	c.removeCRDs()
	c.mustHelm("install", "--set", "policies.preset=protect,"+elsewhere)
	c.has("plimsoll-protect", "at another first installation")
	uids := func() string {
		return c.Kubectl("get", "nodeqoss,podqoss", "-o", "jsonpath={.items[*].metadata.uid}")
	}
	// Hooks created them, and Helm changes nothing of what it adopts.
	for _, mode := range []string{"Enforce", "Enforce", "Preview"} {
		before, other := uids(), c.strategies()
		c.mustHelm("upgrade", "--reset-then-reuse-values", "--set", "policies.mode="+mode)
		expected := map[string]string{"Enforce": "Enforce", "Preview": "Preview Preview Preview"}[mode]
		if found := c.strategies(); found != expected {
			t.Errorf("strategies of preset protect in mode %s: %q", mode, found)
		}
		if now := uids(); other == expected && now != before {
			t.Errorf("an upgrade that changed nothing created the policies again: UIDs are %s, were %s", now, before)
		}
	}
	c.mustHelm("upgrade", "--reset-then-reuse-values", "--set", "policies.preset=conservative")
	c.has("plimsoll-conservative", "after another preset")
	if _, err := c.ofRelease("uninstall"); err != nil {
		t.Error(err)
	}
	if left := c.Kubectl("get", "nodeqoss,podqoss,avoidanceactions", "-o", "name"); left != "" {
		t.Errorf("not deleted: %s", left)
	}
}
