//go:build e2e

package chart

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"plimsoll.dev/suite/plane"
)

// labelKey is the label of our objects that users' labels cannot replace.
const labelKey = "app.kubernetes.io/name"

// ofTheUser are the objects in extraObjects of ci/conventions-values.yaml.
var ofTheUser = []string{"plimsoll-of-the-user", "as-text"}

func TestUsersLabelsReplaceNoneOfOurs(t *testing.T) {
	byDefault, err := render(t, "--set", "placement.scheduler.enabled=true")
	if err != nil {
		t.Fatal(err)
	}
	ours := map[string]map[string]string{}
	for _, object := range objects(t, byDefault) {
		ours[object.GetKind()+object.GetName()] = object.GetLabels()
	}
	rendered, err := render(t, "--values", combinations(t)["conventions"])
	if err != nil {
		t.Fatal(err)
	}
	for _, object := range objects(t, rendered) {
		what := object.GetKind() + " " + object.GetName()
		if slices.Contains(ofTheUser, object.GetName()) {
			continue
		}
		labels, annotations := object.GetLabels(), object.GetAnnotations()
		if labels["team"] != "platform" || annotations["example.com/owner"] != "platform" {
			t.Errorf("%s lacks the common labels or annotations: %v, %v", what, labels, annotations)
		}
		for key, want := range ours[object.GetKind()+object.GetName()] {
			if labels[key] != want {
				t.Errorf("%s: a user's label makes %s %q instead of %q", what, key, labels[key], want)
			}
		}
		template, isWorkload, _ := unstructured.NestedMap(object.Object, "spec", "template", "metadata")
		if !isWorkload {
			continue
		}
		of := unstructured.Unstructured{Object: map[string]any{"metadata": template}}
		selector, _, _ := unstructured.NestedStringMap(object.Object, "spec", "selector", "matchLabels")
		for key, want := range selector {
			if of.GetLabels()[key] != want {
				t.Errorf("%s: its pods have %s=%s, but it selects %s", what, key, of.GetLabels()[key], want)
			}
		}
		if of.GetLabels()["team"] != "platform" || of.GetAnnotations()["plimsoll.dev/protected"] != "true" {
			t.Errorf("%s: unexpected metadata of its pods: %v", what, template)
		}
	}
}

func TestExtrasReachThePods(t *testing.T) {
	rendered, err := render(t, "--values", combinations(t)["conventions"])
	if err != nil {
		t.Fatal(err)
	}
	for name, spec := range podsOf(t, rendered) {
		if len(spec.ImagePullSecrets) != 2 {
			t.Errorf("%s has the pull secrets %v", name, spec.ImagePullSecrets)
		}
		if strings.HasSuffix(name, "-scheduler") {
			continue
		}
		container := spec.Containers[0]
		if last := container.Args[len(container.Args)-1]; last != "--dead-agent-after=7m" && last != "--sys-root=/sys" {
			t.Errorf("%s: the last argument is %s", name, last)
		}
		if !slices.Contains(container.Env, corev1.EnvVar{Name: "TZ", Value: "UTC"}) {
			t.Errorf("%s lacks an environment variable", name)
		}
		if !slices.ContainsFunc(container.VolumeMounts, func(it corev1.VolumeMount) bool { return it.MountPath == "/etc/ssl/certs" }) {
			t.Errorf("%s lacks a mount", name)
		}
		if !slices.ContainsFunc(spec.Volumes, func(it corev1.Volume) bool { return it.Name == "certificates" }) || *spec.TerminationGracePeriodSeconds != 45 {
			t.Errorf("%s lacks a volume, or its grace period is %d s", name, *spec.TerminationGracePeriodSeconds)
		}
	}
	for _, name := range ofTheUser {
		if object := one(t, rendered, "ConfigMap", name); field[string](t, object, "metadata", "namespace") != "plimsoll" {
			t.Errorf("the templates of %s are not evaluated: %v", name, object)
		}
	}
}

// TestSecurityContextsAndProbesAreMergedWithTheDefaults: what is not set stays as hardened as by default, and null removes it.
func TestSecurityContextsAndProbesAreMergedWithTheDefaults(t *testing.T) {
	byDefault, err := render(t, "--set", "placement.scheduler.enabled=true,restoreNode=worker-1")
	if err != nil {
		t.Fatal(err)
	}
	rendered, err := render(t, "--values", combinations(t)["conventions"], "--set", "restoreNode=worker-1,agent.securityContext.capabilities.add={SYS_NICE},controller.podSecurityContext.runAsUser=null")
	if err != nil {
		t.Fatal(err)
	}
	defaults, pods := podsOf(t, byDefault), podsOf(t, rendered)
	if len(pods) != 4 || len(defaults) != 4 {
		t.Fatalf("the chart renders %d kinds of pods, by default %d", len(pods), len(defaults))
	}
	for name, spec := range pods {
		pod, container := *defaults[name].SecurityContext.DeepCopy(), *defaults[name].Containers[0].SecurityContext.DeepCopy()
		runtimeDefault := corev1.AppArmorProfile{Type: corev1.AppArmorProfileTypeRuntimeDefault}
		pod.SupplementalGroups, pod.AppArmorProfile = []int64{4000}, &runtimeDefault
		container.SELinuxOptions = &corev1.SELinuxOptions{Level: "s0:c1,c2"}
		if strings.Contains(name, "-agent-") {
			container.Capabilities.Add = []corev1.Capability{"SYS_NICE"}
		} else {
			pod.RunAsUser = nil
		}
		if !equality.Semantic.DeepEqual(*spec.SecurityContext, pod) {
			t.Errorf("%s has the security context %+v, not %+v", name, *spec.SecurityContext, pod)
		}
		if found := *spec.Containers[0].SecurityContext; !equality.Semantic.DeepEqual(found, container) || !*found.ReadOnlyRootFilesystem || *found.AllowPrivilegeEscalation || len(found.Capabilities.Drop) != 1 {
			t.Errorf("the container of %s has the security context %+v, not %+v", name, found, container)
		}
		if container := spec.Containers[0]; container.Name == "agent" || container.Name == "controller" {
			alive, ready := defaults[name].Containers[0].LivenessProbe, defaults[name].Containers[0].ReadinessProbe
			alive.TimeoutSeconds, ready.FailureThreshold, ready.InitialDelaySeconds = 7, 4, 3
			if alive.PeriodSeconds == 0 || !equality.Semantic.DeepEqual(container.LivenessProbe, alive) || !equality.Semantic.DeepEqual(container.ReadinessProbe, ready) {
				t.Errorf("%s has the probes %+v and %+v, not %+v and %+v", name, container.LivenessProbe, container.ReadinessProbe, alive, ready)
			}
		}
	}
}

// TestAgentsTolerateWhatIsConfigured, and always our own taint.
func TestAgentsTolerateWhatIsConfigured(t *testing.T) {
	ours := corev1.Toleration{Key: "interference.crane.io", Operator: corev1.TolerationOpExists}
	batch := corev1.Toleration{Key: "dedicated", Operator: corev1.TolerationOpEqual, Value: "batch", Effect: corev1.TaintEffectNoSchedule}
	for json, want := range map[string][]corev1.Toleration{
		"":                     {{Operator: corev1.TolerationOpExists}},
		`agent.tolerations=[]`: {ours},
		`agent.tolerations=[{"key":"dedicated","operator":"Equal","value":"batch","effect":"NoSchedule"}]`: {ours, batch},
		`agent.tolerations=[{"operator":"Exists","effect":"NoExecute"}]`:                                   {ours, {Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}},
	} {
		rendered, err := render(t, "--set-json", json)
		if err != nil {
			t.Fatal(err)
		}
		if found := podsOf(t, rendered)["DaemonSet plimsoll-agent-v2"].Tolerations; !slices.Equal(found, want) {
			t.Errorf("%s: agents tolerate %v", json, found)
		}
	}
}

func TestImagesComeFromTheConfiguredRegistry(t *testing.T) {
	for _, c := range []struct{ set, image, scheduler string }{
		{"", "ghcr.io/plimsoll/plimsoll:0.1.0", "registry.k8s.io/kube-scheduler:v1"},
		{"image.repository=registry.example/plimsoll,image.tag=v1", "registry.example/plimsoll:v1", ""},
		{"image.repository=plimsoll,image.tag=v1", "plimsoll:v1", ""},
		{"image.registry=registry.example:5000,image.tag=v1", "registry.example:5000/plimsoll/plimsoll:v1", "registry.k8s.io/kube-scheduler:v1"},
		{"image.registry=registry.example,image.repository=team/plimsoll,image.tag=v1", "registry.example/team/plimsoll:v1", ""},
		{"image.registry=registry.example,image.repository=localhost/plimsoll,image.tag=v1", "registry.example/plimsoll:v1", ""},
		{"global.imageRegistry=mirror.example/proxy,image.registry=registry.example,image.tag=v1", "mirror.example/proxy/plimsoll/plimsoll:v1", "mirror.example/proxy/kube-scheduler:v1"},
		{"placement.scheduler.image.registry=mirror.example", "", "mirror.example/kube-scheduler:v1"},
	} {
		rendered, err := render(t, "--set", "placement.scheduler.enabled=true,"+c.set)
		if err != nil {
			t.Error(err)
			continue
		}
		pods := podsOf(t, rendered)
		for name, want := range map[string]string{"Deployment plimsoll-controller": c.image, "DaemonSet plimsoll-agent-v2": c.image, "Deployment plimsoll-scheduler": c.scheduler} {
			if image := pods[name].Containers[0].Image; !strings.HasPrefix(image, want) {
				t.Errorf("%s: the image of %s is %s, not %s", c.set, name, image, want)
			}
		}
	}
}

// renamed are ways to rename objects and accounts, which must still refer to each other.
var renamed = map[string][]string{
	"default":       nil,
	"nameOverride":  {"--set", "nameOverride=qos,metricsAPI.certManager.enabled=true"},
	"full":          {"--set", "fullnameOverride=qos,placement.scheduler.enabled=true,metricsAPI.certManager.enabled=true", "--api-versions", "security.openshift.io/v1"},
	"long":          {"--set", "fullnameOverride=" + strings.Repeat("a", 47) + ",monitoring.serviceMonitor.enabled=true,placement.schedulerAPI.enabled=true"},
	"accounts":      {"--set", "agent.serviceAccount.name=one,controller.serviceAccount.name=two"},
	"given account": {"--set", "agent.serviceAccount.name=one,agent.serviceAccount.create=false"},
}

func TestRenamedObjectsReferToEachOther(t *testing.T) {
	for name, args := range renamed {
		t.Run(name, func(t *testing.T) {
			rendered, err := render(t, append([]string{"--set", "restoreNode=worker-1"}, args...)...)
			if err != nil {
				t.Fatal(err)
			}
			checkReferences(t, rendered)
		})
	}
	for name, file := range combinations(t) {
		t.Run(name, func(t *testing.T) {
			rendered, err := render(t, "--values", file)
			if err != nil {
				t.Fatal(err)
			}
			checkReferences(t, rendered)
		})
	}
}

// accounts are the ServiceAccounts of the pods of agents and controller.
func accounts(t *testing.T, rendered string) (agent, controller string) {
	t.Helper()
	for name, spec := range podsOf(t, rendered) {
		switch container := spec.Containers[0].Name; {
		case container == "agent":
			agent = spec.ServiceAccountName
		case container == "controller":
			controller = spec.ServiceAccountName
		case container == "restore" && !strings.Contains(name, "-agent-restore-"):
			t.Errorf("unexpected name: %s", name)
		}
	}
	return agent, controller
}

// checkReferences checks that roles, accounts, Services, and the objects named in flags exist, and that admission policies and flow schemas
// match the accounts of the pods.
func checkReferences(t *testing.T, rendered string) {
	t.Helper()
	agent, controller := accounts(t, rendered)
	exists, namespace := map[string]bool{}, ""
	for _, object := range objects(t, rendered) {
		exists[object.GetKind()+" "+object.GetName()] = true
		if object.GetKind() == "DaemonSet" {
			namespace = object.GetNamespace()
		}
	}
	// Also the accounts of hooks, and one that the user creates.
	known := func(account string) bool {
		return exists["ServiceAccount "+account] || account == agent || slices.ContainsFunc([]string{"-test", "-uninstall", "-policies"}, func(it string) bool { return strings.HasSuffix(account, it) })
	}
	users, about := map[string]bool{}, ""
	for _, object := range objects(t, rendered) {
		what := object.GetKind() + " " + object.GetName()
		if kind, found, _ := unstructured.NestedString(object.Object, "roleRef", "kind"); found {
			role, _, _ := unstructured.NestedString(object.Object, "roleRef", "name")
			if !exists[kind+" "+role] && !strings.HasPrefix(role, "system:") && role != "extension-apiserver-authentication-reader" {
				t.Errorf("%s refers to %s %s, which does not exist", what, kind, role)
			}
			for _, subject := range object.Object["subjects"].([]any) {
				if account := subject.(map[string]any)["name"].(string); !known(account) {
					t.Errorf("%s binds ServiceAccount %s, which does not exist", what, account)
				}
				if of := subject.(map[string]any)["namespace"]; of != namespace {
					t.Errorf("%s binds an account of namespace %v, not %s", what, of, namespace)
				}
			}
		}
		if policy, found, _ := unstructured.NestedString(object.Object, "spec", "policyName"); found && !exists[strings.TrimSuffix(object.GetKind(), "Binding")+" "+policy] {
			t.Errorf("%s refers to policy %s, which does not exist", what, policy)
		}
		if level, found, _ := unstructured.NestedString(object.Object, "spec", "priorityLevelConfiguration", "name"); found && !exists["PriorityLevelConfiguration "+level] {
			t.Errorf("%s refers to priority level %s, which does not exist", what, level)
		}
		if service, found, _ := unstructured.NestedString(object.Object, "spec", "service", "name"); found && !exists["Service "+service] {
			t.Errorf("%s refers to Service %s, which does not exist", what, service)
		}
		if object.GetKind() == "ValidatingAdmissionPolicy" || object.GetKind() == "FlowSchema" {
			about += fmt.Sprint(object.Object["spec"])
			users[object.GetName()] = true
		}
	}
	for _, account := range []string{agent, controller} {
		if !strings.Contains(about, "request.userInfo.username == 'system:serviceaccount:"+namespace+":"+account+"'") || !strings.Contains(about, "request.name == '"+account+"'") {
			t.Errorf("no admission policy matches requests of %s", account)
		}
		if !users[account+"-node"] || !users[account+"-token"] { // where plimsoll doctor expects them
			t.Errorf("the admission policies are %v", slices.Sorted(maps.Keys(users)))
		}
	}
	for name, spec := range podsOf(t, rendered) {
		if !known(spec.ServiceAccountName) {
			t.Errorf("%s runs as ServiceAccount %s, which does not exist", name, spec.ServiceAccountName)
		}
		checkFlags(t, name, spec, exists, agent)
	}
}

// TestNamespaceOverrideHoldsForEverything: with an override the output is that of a release in this namespace, hooks included.
func TestNamespaceOverrideHoldsForEverything(t *testing.T) {
	withHooks := t.TempDir()
	if err := os.CopyFS(withHooks, os.DirFS(plane.Absolute(t, chart))); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"test", "uninstall", "emergency-stop"} {
		file := filepath.Join(withHooks, "templates", name+".yaml")
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		// Without a cluster the chart renders no hooks.
		always := strings.Replace(string(text), `if include "plimsoll.asksCluster" .`, "if true", 1)
		if err := os.WriteFile(file, []byte(always), 0o600); err != nil || always == string(text) {
			t.Fatalf("%s has no such condition (%v)", file, err)
		}
	}
	in := func(namespace string, args ...string) string {
		t.Helper()
		args = append([]string{"template", "plimsoll", withHooks, "--namespace", namespace, "--values", combinations(t)["namespace"], "--set", "restoreNode=worker-1",
			"--api-versions", "security.openshift.io/v1"}, args...)
		rendered, err := run(t, "", plane.Helm(), args...)
		if err != nil {
			t.Fatal(err)
		}
		return rendered
	}
	overridden := in("plimsoll")
	if overridden != in("qos-system", "--set", "namespaceOverride=") {
		t.Error("namespaceOverride=qos-system and a release in qos-system render different objects")
	}
	if !strings.Contains(overridden, "helm.sh/hook: pre-delete") {
		t.Error("the hooks are not rendered")
	}
}

// checkFlags checks the names in the flags of agents and controller.
func checkFlags(t *testing.T, name string, spec corev1.PodSpec, exists map[string]bool, agent string) {
	t.Helper()
	for _, argument := range spec.Containers[0].Args {
		flag, value, _ := strings.Cut(argument, "=")
		switch flag {
		case "--report-service", "--metrics-api-service":
			// The Service of the API exists only if the API is served, but its name is in the certificate in any case.
			if served := slices.ContainsFunc(spec.Containers[0].Args, func(it string) bool { return strings.HasPrefix(it, "--metrics-api-listen") }); !exists["Service "+value] && (served || flag == "--report-service") {
				t.Errorf("%s: there is no Service for %s", name, argument)
			}
		case "--report-account":
			if value != agent {
				t.Errorf("%s has %s, but agents run as %s", name, argument, agent)
			}
		case "--lease-name":
			if !exists["Deployment "+value] {
				t.Errorf("%s: the Lease %s is not named for the Deployment", name, value)
			}
		}
	}
	for _, volume := range spec.Volumes {
		if volume.ConfigMap != nil && volume.Name != "certificates" && !exists["ConfigMap "+volume.ConfigMap.Name] {
			t.Errorf("%s mounts ConfigMap %s, which does not exist", name, volume.ConfigMap.Name)
		}
	}
}

// TestSelectorsAreTheSameWithAllValues: a change would make an upgrade fail, because selectors are immutable.
func TestSelectorsAreTheSameWithAllValues(t *testing.T) {
	found := map[string]string{}
	for name, file := range combinations(t) {
		rendered, err := render(t, "--values", file)
		if err != nil {
			t.Fatal(err)
		}
		for _, object := range objects(t, rendered) {
			selector, isWorkload, _ := unstructured.NestedMap(object.Object, "spec", "selector", "matchLabels")
			if !isWorkload || object.GetKind() == "PodMonitor" {
				continue
			}
			key, is := object.GetKind()+" "+object.GetName(), fmt.Sprint(selector)
			if before, known := found[key]; known && before != is {
				t.Errorf("%s: %s selects %s instead of %s", name, key, is, before)
			}
			if found[key] = is; selector[labelKey] != "plimsoll" {
				t.Errorf("%s: %s selects %s", name, key, is)
			}
		}
	}
}

func TestControllersOnTheHostNetwork(t *testing.T) {
	rendered, err := render(t, "--values", combinations(t)["names"])
	if err != nil {
		t.Fatal(err)
	}
	spec := podsOf(t, rendered)["Deployment qos-controller"]
	if !spec.HostNetwork || spec.DNSPolicy != corev1.DNSClusterFirstWithHostNet {
		t.Errorf("hostNetwork is %t, the DNS policy is %s", spec.HostNetwork, spec.DNSPolicy)
	}
	ports := map[int32]bool{}
	for _, port := range spec.Containers[0].Ports {
		ports[port.ContainerPort] = true
	}
	listens := 0
	for _, argument := range spec.Containers[0].Args {
		if flag, port, found := strings.Cut(argument, "listen=[::]:"); found {
			listens++
			if !slices.Contains([]string{"18080", "18443", "18444", "18085"}, port) {
				t.Errorf("unexpected port: %s %s", flag, port)
			}
		}
	}
	if listens != 4 || len(ports) != 4 || !ports[18443] {
		t.Errorf("%d flags for ports, and the ports of the container are %v", listens, ports)
	}
	if constraints := spec.TopologySpreadConstraints; len(constraints) != 2 || constraints[0].LabelSelector.MatchLabels[labelKey] != "plimsoll" || len(constraints[1].LabelSelector.MatchLabels) != 1 {
		t.Errorf("unexpected constraints: %v", constraints)
	}
	surge := func(set string) string {
		rendered, err := render(t, "--set", set)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(field[map[string]any](t, one(t, rendered, "Deployment", "plimsoll-controller"), "spec", "strategy", "rollingUpdate"))
	}
	// With as many nodes as replicas, no node has the ports free for one more.
	if is := surge("controller.hostNetwork=true"); is != "map[maxSurge:0 maxUnavailable:1]" {
		t.Errorf("with hostNetwork the strategy is %s", is)
	}
	if is := surge("controller.hostNetwork=false"); is != "map[maxSurge:1 maxUnavailable:0]" {
		t.Errorf("without hostNetwork the strategy is %s", is)
	}
}

func TestHostNetworkIsRejectedOnOpenShift(t *testing.T) {
	_, err := render(t, "--set", "controller.hostNetwork=true", "--api-versions", "security.openshift.io/v1")
	if err == nil || !strings.Contains(err.Error(), "controller.hostNetwork: on OpenShift API servers reach pods") {
		t.Errorf("not rejected as expected: %v", err)
	}
}

// TestOtherChartsMayContainThisOne: the chart must accept global values that are meant for other charts.
func TestOtherChartsMayContainThisOne(t *testing.T) {
	if _, err := render(t, "--set", "global.storageClass=fast,global.imagePullSecrets[0]=mirror,global.imagePullSecrets[1].name=other"); err != nil {
		t.Error(err)
	}
}
