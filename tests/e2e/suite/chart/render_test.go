//go:build e2e

// Package chart tests what the Helm chart renders and rejects, without a cluster, and its installation on an API server.
package chart

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"sigs.k8s.io/yaml"

	"plimsoll.dev/suite/plane"
)

const chart = "charts/plimsoll"

// run runs a program with this stdin and returns its output, and stderr as part of the error.
func run(t *testing.T, input, name string, args ...string) (string, error) {
	t.Helper()
	var out, stderr bytes.Buffer
	command := exec.Command(plane.Tool(t, name), args...)
	command.Env = append(os.Environ(), "HOME="+t.TempDir())
	command.Stdin, command.Stdout, command.Stderr = strings.NewReader(input), &out, &stderr
	if err := command.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w: %s%s", name, strings.Join(args, " "), err, stderr.String(), out.String())
	}
	return out.String(), nil
}

// render renders the chart as release plimsoll in namespace plimsoll.
func render(t *testing.T, args ...string) (string, error) {
	t.Helper()
	return run(t, "", plane.Helm(), append([]string{"template", "plimsoll", plane.Absolute(t, chart), "--namespace", "plimsoll"}, args...)...)
}

// combinations are the values files that the chart is checked with, by name.
func combinations(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob(plane.Absolute(t, chart+"/ci/*-values.yaml"))
	if err != nil || len(files) < 6 {
		t.Fatalf("unexpected values files: %v (%v)", files, err)
	}
	found := map[string]string{}
	for _, file := range files {
		found[strings.TrimSuffix(filepath.Base(file), "-values.yaml")] = file
	}
	return found
}

// rejected are invalid values, each with the expected message.
var rejected = []struct{ set, message string }{
	{"controller.replica=3", "at '/controller': additional properties 'replica' not allowed"},
	{"controller.replica=3", "invalid propertyName 'replica'\n  - at '': value must be 'controller.replicas'"},
	{"controller.Replicas=3", "value must be 'controller.replicas'"},
	{"controller.maxUnscheduleable=10%", "value must be 'controller.maxUnschedulable'"},
	{"controler.replicas=3", "invalid propertyName 'controler'\n  - at '': value must be 'controller'"},
	{"replicas=3", "invalid propertyName 'replicas'\n  - at '': value must be 'controller.replicas'"},
	{"resources.limits.cpu=1", "value must be one of 'agent.resources', 'controller.resources'"},
	{"imageTag=1", "value must be 'image'"},
	{"imagePullSecret=registry", "value must be 'imagePullSecrets'"},
	{"colour=red", "value must be one of 'agent', 'commonAnnotations', 'commonLabels', 'controller', 'crds',"},
	{"image.version=1", "value must be one of 'image.digest', 'image.pullPolicy', 'image.registry', 'image.repository', 'image.tag'"},
	{"metricsApi.enabled=false", "value must be 'metricsAPI'"},
	{"monitoring.alerts.label.release=a", "value must be 'monitoring.alerts.labels'"},
	{"agent.layouts[0].cgroups=v2,agent.layouts[0].name=a,agent.layouts[0].kubepods=b", "value must be 'agent.layouts[].cgroup'"},
	{"agent.resources.limit.memory=1Gi", "value must be 'limits'"},
	{"agent.seLinuxOptions.typ=spc_t", "value must be 'agent.seLinuxOptions.type'"},
	{"agent.selinuxOptions.type=spc_t", "value must be 'agent.seLinuxOptions'"},
	{"controller.tolerations[0].operater=Exists", "value must be 'operator'"},
	{"agent.tolerations[0].operater=Exists", "value must be 'operator'"},
	{"agent.securityContext.readonlyRootFilesystem=false", "value must be 'readOnlyRootFilesystem'"},
	{"controller.podSecurityContext.runAsUsr=1", "value must be 'runAsUser'"},
	{"securityContext.runAsUser=1", "value must be one of 'agent.securityContext', 'controller.securityContext'"},
	{"agent.securityContext.runAsUser=1000", "agents have to run as root, because cgroup files are root's: leave runAsUser 0, and runAsNonRoot unset"},
	{"agent.securityContext.runAsUser=null", "agents have to run as root"},
	{"agent.podSecurityContext.runAsNonRoot=true", "agents have to run as root"},
	{"agent.seLinuxOptions.type=spc_t,agent.securityContext.seLinuxOptions.level=s0", "agent.seLinuxOptions and agent.securityContext.seLinuxOptions are both set; they are the same: keep the second"},
	{"agent.livenessProbe.httpGet.path=/", "at '/agent/livenessProbe': additional properties 'httpGet' not allowed"},
	{"controller.readinessProbe.timeoutSecond=1", "value must be 'timeoutSeconds'"},
	{"controller.livenessProbe.periodSeconds=0", "at '/controller/livenessProbe/periodSeconds': minimum: got 0, want 1"},
	{"namespaceOverride=Mine", "at '/namespaceOverride': value must be 'a namespace: lower-case letters, digits and hyphens'"},
	{"metricsAPI.certmanager.enabled=true", "value must be 'metricsAPI.certManager'"},
	{"metricsAPI.certManager.issuer=a", "value must be 'metricsAPI.certManager.issuerRef'"},
	{"metricsAPI.certManager.issuerRef.kind=ClusterIssuer", "at '/metricsAPI/certManager/issuerRef': properties 'name' required, if 'kind' exists"},
	{"controller.replicas=two", "at '/controller/replicas': got string, want integer"},
	{"controller.replicas=0", "at '/controller/replicas': minimum: got 0, want 1"},
	{"controller.maxUnschedulable=101%", "at '/controller/maxUnschedulable': value must be 'a number from 1 to 100000, or a percentage such as 30%'"},
	{"controller.maxUnschedulable=0", "at '/controller/maxUnschedulable': value must be 'a number from 1"},
	{"agent.maxUnavailable=0", "at '/agent/maxUnavailable': value must be 'a number from 1, or a percentage such as 10%'"},
	{"agent.sampleInterval=fast", "at '/agent/sampleInterval': value must be 'a time, such as 500ms, 30s, 1m30s or 1h'"},
	{"agent.sampleInterval=0s", "at '/agent/sampleInterval': value must be 'a time,"},
	{"agent.sampleInterval=1s1m", "at '/agent/sampleInterval': value must be 'a time,"},
	{"agent.leaseRenewInterval=5s", "at '/agent/leaseRenewInterval': value must be 'a time from 10s to 2m, such as 60s or 1m30s'"},
	{"agent.leaseRenewInterval=121s", "at '/agent/leaseRenewInterval': value must be 'a time from"},
	{"agent.leaseRenewInterval=5m", "at '/agent/leaseRenewInterval': value must be 'a time from"},
	{"evictionBudget.fleet=1001/1m", "at '/evictionBudget/fleet': value must be 'a budget of at most 1000 evictions in 1s to 1h, such as 10/1m'"},
	{"evictionBudget.fleet=10/2h", "at '/evictionBudget/fleet': value must be 'a budget"},
	{"evictionBudget.zone=1/0s", "at '/evictionBudget/zone': value must be 'a budget"},
	{"evictionBudget.node=1/0m0s", "at '/evictionBudget/node': value must be 'a budget"},
	{"evictionBudget.namespace=1/3601s", "at '/evictionBudget/namespace': value must be 'a budget"},
	{"evictionBudget.owner=1/500ms", "at '/evictionBudget/owner': value must be 'a budget"},
	{"agent.resources.limits.memory=512MB", "at '/agent/resources/limits/memory': value must be 'a quantity, such as 100m, 1.5 or 512Mi'"},
	{"agent.resources.limits.memory=-1", "at '/agent/resources/limits/memory': value must be 'a quantity"},
	{"agent.resources.requests.cpu=10 m", "at '/agent/resources/requests/cpu': value must be 'a quantity"},
	{"controller.resources.requests.cpu=", "at '/controller/resources/requests/cpu': value must be 'a quantity"},
	{"placement.scheduler.resources.limits.memory=1Gb", "at '/placement/scheduler/resources/limits/memory': value must be 'a quantity"},
	{"controller.rolloutNodesPerSecond=0", "at '/controller/rolloutNodesPerSecond': exclusiveMinimum: got 0, want 0"},
	{"uninstall.timeoutSeconds=181", "at '/uninstall/timeoutSeconds': maximum: got 181, want 180"},
	{"agent.layouts[0].cgroup=v3,agent.layouts[0].name=a,agent.layouts[0].kubepods=b", "at '/agent/layouts/0/cgroup': value must be one of 'v1', 'v2'"},
	{"agent.layouts[0].cgroup=v2", "at '/agent/layouts/0': missing properties 'name', 'kubepods'"},
	{"image.digest=abc", "at '/image/digest': value must be 'a digest: sha256: and 64 hexadecimal digits'"},
	{"image.registry=https://registry.example", "at '/image/registry': value must be 'a registry, such as mirror.example:5000'"},
	{"imageRegistry=mirror.example", "value must be 'global.imageRegistry'"},
	{"podLabels.team=a", "value must be one of 'agent.podLabels', 'controller.podLabels'"},
	{"serviceAccount.name=a", "value must be one of 'agent.serviceAccount', 'controller.serviceAccount'"},
	{"fullnameOverride=Mine", "at '/fullnameOverride': value must be 'a name of at most 47 lower-case letters, digits and hyphens'"},
	{"controller.ports.http=80", "at '/controller/ports/http': value must be 'a port from 1024 to 65535'"},
	{"controller.ports.http=8443", "controller.ports.http and controller.ports.https are both 8443; each needs a port of its own"},
	{"controller.hostNetwork=true,controller.ports.http=10250", "controller.ports.http: 10250 is a port of kubelet or kube-proxy, and controller.hostNetwork=true makes controllers listen on their nodes"},
	{"controller.extraArgs[0]=log", "at '/controller/extraArgs/0': value must be 'an argument that begins with --, such as --flag=value'"},
	{"controller.podDisruptionBudget.maxUnavailable=all", "at '/controller/podDisruptionBudget/maxUnavailable': value must be 'a number from 1,"},
	{"agent.serviceAccount.create=false", "agent.serviceAccount.create=false: set agent.serviceAccount.name to the name of an existing ServiceAccount"},
	{"agent.serviceAccount.name=default", "agent.serviceAccount.name: every pod of the namespace that names no ServiceAccount has the account default"},
	{"agent.serviceAccount.name=a,controller.serviceAccount.name=a", "agent.serviceAccount.name and controller.serviceAccount.name are the same"},
	{"agent.updateStrategy.type=OnDelete", "agent.updateStrategy: with type OnDelete an upgrade replaces no agent"},
	{"monitoring.podMonitor.enabled=true,monitoring.serviceMonitor.enabled=true", "monitoring.podMonitor.enabled and monitoring.serviceMonitor.enabled are both true; everything would be scraped twice"},
	{"monitoring.podMonitor.scrapeTimeout=fast", "at '/monitoring/podMonitor/scrapeTimeout': value must be 'a time,"},
	{"monitoring.podMonitor.relabelings[0].sourceLabel=a", "value must be 'sourceLabels'"},
	{"monitoring.serviceMonitor.metricRelabeling=a", "value must be 'monitoring.serviceMonitor.metricRelabelings'"},
	{"monitoring.alerts.runbookURL=docs/runbook.md", "at '/monitoring/alerts/runbookURL': value must be 'the URL of a page, without #'"},
	{"logFormat=xml", "at '/logFormat': value must be one of 'text', 'json'"},
	{"image.pullPolicy=Sometimes", "value must be one of 'Always', 'IfNotPresent', 'Never'"},
	{"policies.preset=aggressive", "at '/policies/preset': value must be one of 'none', 'protect', 'standing', 'conservative', 'preview'"},
	{"placement.labels.enabled=false", "value must be 'placement.label'"},
	{"placement.scheduler.replicas=0", "at '/placement/scheduler/replicas': minimum: got 0, want 1"},
	{"placement.scheduler.image.digest=abc", "at '/placement/scheduler/image/digest': value must be 'a digest:"},
	{"placement.softTaint.enabled=maybe", "at '/placement/softTaint/enabled': got string, want boolean"},
	{"softTaint.enabled=true", "value must be 'placement.softTaint'"},
	{"agent=null", "missing property 'agent'"},
	{"leases.namespace=kube-node-lease", "leases.namespace: kube-node-lease belongs to Kubernetes; use another namespace"},
	{"agent.layouts[0].name=a,agent.layouts[0].cgroup=v2,agent.layouts[0].kubepods=b,agent.layouts[1].name=a,agent.layouts[1].cgroup=v1,agent.layouts[1].kubepods=b",
		"agent.layouts: two layouts are named a"},
	{"agent.layouts[1].name=v1,agent.layouts[1].cgroup=v1,agent.layouts[1].kubepods=kubepods,agent.layouts[1].nodeSelector.cgroup=v1," + v2,
		"agent.layouts: every node of layout v1 is in layout v2 too, but may have only one agent"},
	{"agent.layouts[1].name=v1,agent.layouts[1].cgroup=v1,agent.layouts[1].kubepods=kubepods,agent.layouts[1].nodeSelector.pool=a,agent.layouts[0].nodeSelector.pool=a," + v2,
		"agent.layouts: every node of layout v1 is in layout v2 too, but may have only one agent"},
	{"agent.distribution=minikube", "at '/agent/distribution': value must be one of '', 'kubeadm', 'kind', 'k3s', 'eks', 'gke', 'aks', 'openshift'"},
	{"agent.distribution=kind,agent.layouts[0].name=v2,agent.layouts[0].cgroup=v2,agent.layouts[0].kubepods=kubepods", "agent.distribution is kind, which stands for a layout, but agent.layouts is set too: remove one of them"},
	{"windows[0].name=a,windows[0].source=gpu_usage,windows[0].window=avg_5m", "at '/windows/0/source': value must be one of 'cpu_load_15_min',"},
	{"windows[0].name=a,windows[0].source=pod_cpu_delay,windows[0].window=avg_5m", "at '/windows/0/source': value must be one of"},
	{"windows[0].name=a,windows[0].source=disk_utilization,windows[0].window=avg_5m,windows[0].httpGet.port=1", "at '/windows/0/source': 'not' failed"},
	{"windows[0].name=a,windows[0].source=disk_utilization,windows[0].window=avg_2m", "at '/windows/0/window': 'avg_2m' does not match"},
	{"windows[0].name=cpu_usage_avg_5m,windows[0].source=disk_utilization,windows[0].window=avg_5m", "at '/windows/0/name': 'not' failed"},
	{"windows[0].name=plimsoll_a,windows[0].source=disk_utilization,windows[0].window=avg_5m", "at '/windows/0/name': 'not' failed"},
	{"windows[0].name=a,windows[0].source=disk_utilization,windows[0].windw=avg_5m", "value must be 'windows[].window'"},
	{"windows[0].name=a,windows[0].source=disk_utilization", "at '/windows/0': missing property 'window'"},
	{"windows[0].name=a,windows[0].source=disk_utilization,windows[0].window=avg_1m,windows[0].period=2m", "the period of a is 2m; write a time from 10s to the length of the window avg_1m"},
	{"windows[0].name=a,windows[0].source=disk_utilization,windows[0].window=avg_1m,windows[0].period=9s", "the period of a is 9s"},
	{"windows[0].name=a,windows[0].source=disk_utilization,windows[0].window=avg_5m,windows[1].name=a,windows[1].source=disk_read_iops,windows[1].window=avg_5m",
		"windows: two windows are named a"},
}

// v2 is the default layout.
const v2 = "agent.layouts[0].name=v2,agent.layouts[0].cgroup=v2,agent.layouts[0].kubepods=kubepods.slice"

func TestUnknownValuesAreRejectedWithSuggestions(t *testing.T) {
	t.Parallel()
	for _, value := range rejected {
		_, err := render(t, "--set", value.set)
		if err == nil {
			t.Errorf("%s is accepted", value.set)
		} else if !strings.Contains(err.Error(), value.message) {
			t.Errorf("%s: the error does not contain %q: %v", value.set, value.message, err)
		}
	}
}

// TestNoDefaultCanBeRemoved: Helm removes a default if a user sets null, which would leave a flag empty.
func TestNoDefaultCanBeRemoved(t *testing.T) {
	text, err := os.ReadFile(plane.Absolute(t, chart+"/values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var defaults map[string]any
	if err := yaml.Unmarshal(text, &defaults); err != nil {
		t.Fatal(err)
	}
	outers, inners := []string{}, []string{}
	for outer, value := range defaults {
		outers = append(outers, outer+"=null")
		inner, _ := value.(map[string]any)
		for name := range inner {
			inners = append(inners, outer+"."+name+"=null")
		}
	}
	if len(outers) < 10 || len(inners) < 40 {
		t.Fatalf("too few defaults found: %v and %v", outers, inners)
	}
	for _, removed := range [][]string{outers, inners} {
		_, err := render(t, "--set", strings.Join(removed, ","))
		if err == nil {
			t.Fatalf("%v is accepted", removed)
		}
		for _, value := range removed {
			object, name, isInner := strings.Cut(strings.TrimSuffix(value, "=null"), ".")
			if !isInner {
				object, name = "", object
			}
			if !missing(err.Error(), object, name) {
				t.Errorf("%s: the error does not name it: %v", value, err)
			}
		}
	}
}

// missing reports whether a message says that an object lacks this property.
func missing(message, object, name string) bool {
	at := "- at '" + strings.TrimSuffix("/"+object, "/") + "': missing propert"
	for line := range strings.Lines(message) {
		if strings.HasPrefix(strings.TrimSpace(line), at) && strings.Contains(line, "'"+name+"'") {
			return true
		}
	}
	return false
}

func TestBoundaryValuesAreAcceptedAndReachTheirFlags(t *testing.T) {
	flags := map[string]string{
		"agent.sampleInterval": "--sample-interval", "agent.evaluationPeriod": "--evaluation-period", "agent.leaseRenewInterval": "--lease-renew-interval", "leases.namespace": "--lease-namespace",
		"controller.maxUnschedulable": "--max-unschedulable", "controller.rolloutNodesPerSecond": "--rollout-nodes-per-second",
		"evictionBudget.fleet": "--eviction-budget-fleet", "evictionBudget.zone": "--eviction-budget-zone", "evictionBudget.node": "--eviction-budget-node",
		"evictionBudget.namespace": "--eviction-budget-namespace", "evictionBudget.owner": "--eviction-budget-owner",
	}
	for _, values := range []string{
		"agent.sampleInterval=1ms,agent.evaluationPeriod=100ms,agent.leaseRenewInterval=10s,controller.maxUnschedulable=1%,controller.rolloutNodesPerSecond=1",
		"agent.sampleInterval=1m30s,agent.leaseRenewInterval=120s,controller.maxUnschedulable=100%,leases.namespace=heartbeats",
		"controller.maxUnschedulable=3,agent.leaseRenewInterval=1m59s,evictionBudget.fleet=1000/1h,evictionBudget.zone=0/1s,evictionBudget.node=9/3600s",
		"agent.leaseRenewInterval=2m,evictionBudget.namespace=8/60m,evictionBudget.owner=7/59m59s,evictionBudget.fleet=6/1m0s",
	} {
		rendered, err := render(t, "--set", values)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, value := range strings.Split(values, ",") {
			name, wanted, _ := strings.Cut(value, "=")
			if flag := flags[name] + "=" + wanted; !strings.Contains(rendered, "- "+flag+"\n") {
				t.Errorf("%s: flag %s is missing", value, flag)
			}
		}
	}
}

func TestAgentExposesPodMetricsOnlyIfConfigured(t *testing.T) {
	for set, want := range map[string][]string{
		"agent.podMetrics=false":    nil,
		"agent.podMetrics=true":     {"--pod-metrics"},
		"agent.openNodeMetric=true": {"--open-node-metric"},
	} {
		rendered, err := render(t, "--set", set)
		if err != nil {
			t.Fatal(err)
		}
		args := podsOf(t, rendered)["DaemonSet plimsoll-agent-v2"].Containers[0].Args
		for _, flag := range []string{"--pod-metrics", "--open-node-metric"} {
			if slices.Contains(args, flag) != slices.Contains(want, flag) {
				t.Errorf("%s: agents run with %v", set, args)
			}
		}
	}
}

func TestLogsHaveTheConfiguredFormat(t *testing.T) {
	for set, want := range map[string]bool{"logFormat=text": false, "logFormat=json": true} {
		rendered, err := render(t, "--set", set)
		if err != nil {
			t.Fatal(err)
		}
		for name, spec := range podsOf(t, rendered) {
			if slices.Contains(spec.Containers[0].Args, "--log-format=json") != want {
				t.Errorf("%s: %s runs with %v", set, name, spec.Containers[0].Args)
			}
		}
	}
}

func TestOldKubernetesIsRejected(t *testing.T) {
	_, err := render(t, "--kube-version", "1.32.9")
	if err == nil || !strings.Contains(err.Error(), "chart requires kubeVersion: >=1.33.0-0") {
		t.Errorf("the unsupported version is not rejected as expected: %v", err)
	}
	for _, supported := range []string{"1.33.0", "1.34.4-gke.100", "1.36.1"} {
		if _, err := render(t, "--kube-version", supported); err != nil {
			t.Error(err)
		}
	}
}

func TestOlderClustersGetACompatibleCRD(t *testing.T) {
	for version, costly := range map[string]bool{"1.33.13": false, "v1.33.4-eks-1": false, "1.34.0-rc.1": true, "1.34.0": true, "1.37.2": true} {
		rendered, err := render(t, "--kube-version", version)
		if err != nil {
			t.Fatal(err)
		}
		definition := one(t, rendered, "CustomResourceDefinition", "nodeqoss.ensurance.crane.io")
		if strings.Contains(fmt.Sprint(definition), "quantity(") != costly {
			t.Errorf("%s: the CustomResourceDefinition validates quantities: %v", version, !costly)
		}
	}
}

func TestEveryCombinationIsValidAndFollowsGoodPractice(t *testing.T) {
	t.Parallel()
	for name, file := range combinations(t) {
		t.Run(name, func(t *testing.T) {
			if out, err := run(t, "", plane.Helm(), "lint", "--strict", "--quiet", plane.Absolute(t, chart), "--values", file); err != nil {
				t.Fatal(err, out)
			}
			objects, err := render(t, "--values", file)
			if err != nil {
				t.Fatal(err)
			}
			checkSchemas(t, objects)
			checkPractice(t, objects)
		})
	}
}

func TestPodsSelectLinuxNodesOfTheValues(t *testing.T) {
	rendered, err := render(t, "--values", combinations(t)["nodes"])
	if err != nil {
		t.Fatal(err)
	}
	pods := 0
	for _, object := range objects(t, rendered) {
		spec, found, _ := unstructured.NestedMap(object.Object, "spec", "template", "spec")
		if !found {
			continue
		}
		pods++
		labels := field[map[string]any](t, spec, "nodeSelector")
		if len(labels) != 2 || labels["kubernetes.io/os"] != "linux" {
			t.Errorf("%s %s has the node selector %v", object.GetKind(), object.GetName(), labels)
		}
	}
	if pods != 4 {
		t.Errorf("the chart renders %d kinds of pods, not 4", pods)
	}
}

// TestAgentCanWriteOnlyBelowKubepods: a path that leads out of it would expose the whole tree.
func TestAgentCanWriteOnlyBelowKubepods(t *testing.T) {
	layout := func(kubepods string) string {
		return fmt.Sprintf(`agent.layouts=[{"name":"v2","cgroup":"v2","kubepods":%q}]`, kubepods)
	}
	for _, kubepods := range []string{"", "/", "//", ".", "..", "./", "/..", "kubepods/..", "./kubepods", "../kubepods", "a/./b", "a/../b", "a//b", "kubepods//", ".. ", "..,x"} {
		_, err := render(t, "--set-json", layout(kubepods))
		if err == nil || !strings.Contains(err.Error(), "at '/agent/layouts/0/kubepods'") {
			t.Errorf("kubepods %q is not rejected as expected: %v", kubepods, err)
		}
	}
	for _, kubepods := range []string{"kubepods", "/kubepods.slice/", "kubelet.slice/kubelet-kubepods.slice", "a..b/kubepods", `a\x2db.slice`, "user@1000.service/kubepods"} {
		rendered, err := render(t, "--set-json", layout(kubepods))
		if path := "{path: /sys/fs/cgroup/" + strings.Trim(kubepods, "/") + ", type: Directory}"; err != nil || !strings.Contains(rendered, path) {
			t.Errorf("kubepods %q does not become %s (%v)", kubepods, path, err)
		}
	}
}

// TestDistributionsHaveTheLayoutsOfTheGuide compares agent.distribution with the table of docs/install.md.
func TestDistributionsHaveTheLayoutsOfTheGuide(t *testing.T) {
	guide, err := os.ReadFile(plane.Absolute(t, "docs/install.md"))
	if err != nil {
		t.Fatal(err)
	}
	known := 0
	for line := range strings.Lines(string(guide)) {
		cells := strings.Split(line, "|")
		if len(cells) != 6 || strings.Contains(line, "`agent.distribution`") {
			continue
		}
		names, layout := strings.Split(cells[2], "`"), strings.Split(cells[3], "`")
		for i := 1; i < len(names); i += 2 {
			known++
			for _, release := range [][]string{nil, {"--set", "restoreNode=worker-1"}} {
				rendered, err := render(t, append(release, "--set", "agent.distribution="+names[i])...)
				if err != nil {
					t.Fatal(err)
				}
				for name, spec := range podsOf(t, rendered) {
					if strings.Contains(name, "-agent-") && !slices.Contains(hostPaths(spec), "/sys/fs/cgroup/"+layout[1]+" w") {
						t.Errorf("%s: %s mounts %v, and docs/install.md has %s", names[i], name, hostPaths(spec), layout[1])
					}
				}
			}
		}
	}
	if known != 7 {
		t.Errorf("the table of docs/install.md has %d distributions", known)
	}
}

// TestLongReleaseNamesStayUnique: two accounts with the same name would be one, with the permissions of both.
func TestLongReleaseNamesStayUnique(t *testing.T) {
	named := func(release string) map[string]bool {
		t.Helper()
		rendered, err := run(t, "", plane.Helm(), "template", release, plane.Absolute(t, chart), "--namespace", "plimsoll", "--values", combinations(t)["everything"])
		if err != nil {
			t.Fatal(err)
		}
		found := map[string]bool{}
		for _, object := range objects(t, rendered) {
			found[object.GetKind()+" "+object.GetNamespace()+"/"+object.GetName()] = true
			if kind := object.GetKind(); (kind == "Service" || kind == "Job") && len(object.GetName()) > 63 {
				t.Errorf("the name of %s %s is too long", kind, object.GetName())
			}
		}
		return found
	}
	wanted := len(named("plimsoll"))
	const word = "abcdefghijklmnopqrstuvwxyz"
	for _, release := range []string{word + "-" + word, word + "plimsoll-" + word[:18], word + word[:16]} {
		if found := named(release); len(found) != wanted {
			t.Errorf("release %s: %d different names for %d objects: %v", release, len(found), wanted, slices.Sorted(maps.Keys(found)))
		}
	}
}

func TestLayoutsCanTargetArchitectures(t *testing.T) {
	const amd = "agent.layouts[0].nodeSelector.kubernetes\\.io/arch=amd64"
	const arm = "agent.layouts[1].name=arm,agent.layouts[1].cgroup=v2,agent.layouts[1].kubepods=kubepods.slice,agent.layouts[1].nodeSelector.kubernetes\\.io/arch=arm64"
	var found []any
	for _, spec := range specs(t, "DaemonSet", "--set", v2+","+amd+","+arm) {
		found = append(found, field[map[string]any](t, spec, "nodeSelector")["kubernetes.io/arch"])
	}
	if fmt.Sprint(found) != "[amd64 arm64]" {
		t.Errorf("unexpected architectures: %v", found)
	}
}

// specs are the pod specs of objects of this kind.
func specs(t *testing.T, kind string, args ...string) []map[string]any {
	t.Helper()
	rendered, err := render(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	var found []map[string]any
	for _, object := range objects(t, rendered) {
		if spec, is, _ := unstructured.NestedMap(object.Object, "spec", "template", "spec"); is && object.GetKind() == kind {
			found = append(found, spec)
		}
	}
	if len(found) == 0 {
		t.Fatalf("the chart renders no %s", kind)
	}
	return found
}

// TestAgentsAreNotScheduledWhereTheyCannotRun evaluates the node selectors of the agents' pods like the DaemonSet controller.
func TestAgentsAreNotScheduledWhereTheyCannotRun(t *testing.T) {
	pools := `agent.affinity={"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"pool","operator":"In","values":["batch"]}]}]}}}`
	byDefault, batch := specs(t, "DaemonSet"), specs(t, "DaemonSet", "--set-json", pools)
	for _, node := range []struct {
		label, value string
		specs        []map[string]any
		runs         bool
	}{
		{"pool", "batch", byDefault, true},
		{"type", "bare-metal", byDefault, true},
		{"type", "virtual-kubelet", byDefault, false},
		{"eks.amazonaws.com/compute-type", "ec2", byDefault, true},
		{"eks.amazonaws.com/compute-type", "fargate", byDefault, false},
		{"kubernetes.io/arch", "arm64", byDefault, true},
		{"kubernetes.io/arch", "s390x", byDefault, false},
		{"kubernetes.io/os", "windows", byDefault, false},
		{"pool", "batch", batch, true},
		{"pool", "web", batch, false},
	} {
		labels := map[string]string{"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
		labels[node.label] = node.value
		for _, spec := range node.specs {
			pod := &core.Pod{}
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(spec, &pod.Spec); err != nil {
				t.Fatal(err)
			}
			runs, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(&core.Node{ObjectMeta: meta.ObjectMeta{Name: "it", Labels: labels}})
			if err != nil || runs != node.runs {
				t.Errorf("an agent runs on a node with %s=%s: %t (%v)", node.label, node.value, runs, err)
			}
		}
	}
}

func TestUpgradeRespectsMaxUnavailable(t *testing.T) {
	for wanted, args := range map[string][]string{"10%": nil, "3": {"--set", "agent.maxUnavailable=3"}, "25%": {"--set", "agent.maxUnavailable=25%"}} {
		rendered, err := render(t, args...)
		if err != nil {
			t.Fatal(err)
		}
		found := []any{}
		for _, object := range objects(t, rendered) {
			if object.GetKind() == "DaemonSet" {
				most, _, _ := unstructured.NestedFieldNoCopy(object.Object, "spec", "updateStrategy", "rollingUpdate", "maxUnavailable")
				found = append(found, most)
			}
		}
		if fmt.Sprint(found) != "["+wanted+"]" {
			t.Errorf("maxUnavailable is %v, not %s", found, wanted)
		}
	}
}

func TestEvictionBudgetsBecomeControllerFlags(t *testing.T) {
	budgets := map[string]string{"fleet": "11/1m", "zone": "7/2m", "node": "5/3m", "namespace": "3/4m", "owner": "2/5m"}
	set := []string{}
	for scope, budget := range budgets {
		set = append(set, "evictionBudget."+scope+"="+budget)
	}
	found := map[string]string{}
	for _, spec := range specs(t, "Deployment", "--set", strings.Join(set, ",")) {
		container := field[[]any](t, spec, "containers")[0].(map[string]any)
		for _, arg := range field[[]any](t, container, "args") {
			if budget, is := strings.CutPrefix(arg.(string), "--eviction-budget-"); is {
				scope, size, _ := strings.Cut(budget, "=")
				found[scope] = size
			}
		}
	}
	if !maps.Equal(found, budgets) {
		t.Errorf("the controller's budgets are %v, not %v", found, budgets)
	}
}

func TestResourceQuotaMatchesSystemPriorityClassesOnly(t *testing.T) {
	for classes, want := range map[string]string{
		"": "[system-cluster-critical system-node-critical]",
		"agent.priorityClassName=system-cluster-critical":                "[system-cluster-critical]",
		"agent.priorityClassName=mine,controller.priorityClassName=":     "[]",
		"agent.priorityClassName=,controller.priorityClassName=system-a": "[system-a]",
	} {
		rendered, err := render(t, "--set", classes)
		if err != nil {
			t.Fatal(err)
		}
		found := []any{}
		for _, object := range objects(t, rendered) {
			if object.GetKind() != "ResourceQuota" {
				continue
			}
			selected, _, _ := unstructured.NestedSlice(object.Object, "spec", "scopeSelector", "matchExpressions")
			found = selected[0].(map[string]any)["values"].([]any)
		}
		if fmt.Sprint(found) != want {
			t.Errorf("%s: the quota matches %v, not %s", classes, found, want)
		}
	}
}

func TestImagesAreReferencedByDigestOnly(t *testing.T) {
	objects, err := render(t, "--values", combinations(t)["everything"], "--set", "image.tag=latest")
	if err != nil {
		t.Fatal(err)
	}
	images := 0
	for _, line := range strings.Split(objects, "\n") {
		if image, found := strings.CutPrefix(strings.TrimSpace(line), "image: "); found {
			images++
			if !strings.HasPrefix(image, `"registry.example/`) || !strings.Contains(image, "@sha256:0123456789abcdef") {
				t.Errorf("an image is not referenced by digest: %s", image)
			}
		}
	}
	if images < 2 {
		t.Errorf("only %d images found", images)
	}
}
