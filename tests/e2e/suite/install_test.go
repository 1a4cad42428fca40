//go:build e2e

package suite

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestInstalledControllerLeadsAndIsLockedDown(t *testing.T) { // first, before tests restart the controller
	kubectl(t, "rollout", "status", "-n", namespace, "deployment/plimsoll-controller", "--timeout=30s")
	pods := componentPods(t, "controller")
	if len(pods) != 2 || (len(nodes) > 1 && pods[0].Spec.NodeName == pods[1].Spec.NodeName) {
		t.Errorf("two replicas on different nodes are expected: %v", podNames(pods))
	}
	for _, pod := range pods {
		// Other scenes kill replicas, or make their liveness probes fail.
		if last := pod.Status.ContainerStatuses[0].LastTerminationState.Terminated; last != nil && last.ExitCode != 137 {
			t.Errorf("%s exited by itself: %+v", pod.Name, last)
		}
	}
	leader := holder(t)
	if !strings.HasPrefix(leader, "plimsoll-controller-") {
		t.Errorf("the lease is held by %q", leader)
	}
	for _, pod := range pods {
		checkLocked(t, pod, "65532", "controller")
	}
}

func TestInstalledAgentIsLockedDown(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		shared(t, node) // the agent runs: scenes that remove it have the node to themselves
		pod, err := kube.CoreV1().Pods(namespace).Get(background, agentPod(node), metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		// Other scenes kill the agent.
		if last := pod.Status.ContainerStatuses[0].LastTerminationState.Terminated; last != nil && last.ExitCode != 137 {
			t.Errorf("%s exited by itself: %+v", pod.Name, last)
		}
		checkLocked(t, *pod, "0", "agent")
		mounts := onNode(t, node, "cat /proc/"+processOf(t, node, "agent")+"/mountinfo")
		for _, line := range strings.Split(mounts, "\n") {
			fields := strings.Fields(line)
			point, options := fields[4], fields[5]
			writable := strings.HasPrefix(options, "rw")
			pods := strings.HasPrefix(point, "/host/sys/fs/cgroup/") && strings.Contains(point, "kubepods")
			if strings.HasPrefix(point, "/host/") && writable != pods {
				t.Errorf("%s is mounted %s", point, options)
			}
			if root := fields[3]; strings.Contains(line, " - proc ") && root == "/" && point != "/proc" {
				t.Errorf("%s shows processes outside the container: %s", point, line)
			}
			if point == "/" && writable {
				t.Errorf("the root file system is writable")
			}
		}
	})
}

// checkLocked checks the privileges of a pod's processes in /proc on the node.
func checkLocked(t *testing.T, pod corev1.Pod, user, command string) {
	t.Helper()
	if pod.Spec.HostNetwork || pod.Spec.HostPID || pod.Spec.HostIPC {
		t.Errorf("%s uses the network, PID or IPC namespace of the node", pod.Name)
	}
	if pod.Annotations["plimsoll.dev/protected"] != "true" {
		t.Errorf("%s is not protected: a PodQOS that matches everything could have it throttled", pod.Name)
	}
	for _, pid := range processesOfPod(t, &pod, command) {
		status := onNode(t, pod.Spec.NodeName, "cat /proc/"+pid+"/status")
		for _, want := range []string{"Uid:\t" + user + "\t", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"} {
			if !strings.Contains(status, want) {
				t.Errorf("%s: %q is not in its status:\n%s", pod.Name, want, status)
			}
		}
	}
}

// processOf is the PID, on the node, of the only process that runs `plimsoll COMMAND` in a pod.
func processOf(t *testing.T, node, command string) string {
	t.Helper()
	needShell(t)
	pid, err := findProcess(node, command)
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// processOfPod is the PID of the only one in a certain pod.
func processOfPod(t *testing.T, pod *corev1.Pod, command string) string {
	t.Helper()
	pids := processesOfPod(t, pod, command)
	if len(pids) != 1 {
		t.Fatalf("expected one process of plimsoll %s in %s: %v", command, pod.Name, pids)
	}
	return pids[0]
}

// processesOfPod are the PIDs of all such processes in a pod, at least one.
func processesOfPod(t *testing.T, pod *corev1.Pod, command string) []string {
	t.Helper()
	needShell(t)
	pids, err := findProcesses(pod.Spec.NodeName, command, string(pod.UID))
	if err != nil || len(pids) == 0 {
		t.Fatalf("processes of plimsoll %s in %s: %v (%v)", command, pod.Name, pids, err)
	}
	return pids
}

// findProcess is the PID of the only such process on a node.
func findProcess(node, command string) (string, error) {
	pids, err := findProcesses(node, command, "")
	if err == nil && len(pids) != 1 {
		err = fmt.Errorf("processes of plimsoll %s on %s: %v", command, node, pids)
	}
	return strings.Join(pids, " "), err
}

// findProcesses finds the processes in the pod with this UID, or in all pods if it is empty.
func findProcesses(node, command, uid string) ([]string, error) {
	slice := strings.ReplaceAll(uid, "-", "_") // as the systemd driver names it
	out, err := tryOnNode(node, `for p in /proc/[0-9]*; do case "$(tr '\0' ' ' <$p/cmdline 2>/dev/null)" in "/bin/plimsoll"*" `+command+` "*) grep -q -e '`+uid+`' -e '`+slice+`' $p/cgroup && echo ${p#/proc/};; esac; done; true`)
	return strings.Fields(out), err
}

func componentPods(t *testing.T, component string) []corev1.Pod {
	t.Helper()
	list, err := kube.CoreV1().Pods(namespace).List(background, metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=" + component})
	if err != nil {
		t.Fatal(err)
	}
	var live []corev1.Pod
	for _, pod := range list.Items {
		if pod.DeletionTimestamp == nil {
			live = append(live, pod)
		}
	}
	return live
}

func podNames(pods []corev1.Pod) (names []string) {
	for _, pod := range pods {
		names = append(names, pod.Name+" on "+pod.Spec.NodeName)
	}
	return names
}

// manifests are the files of a directory of the repository.
func manifests(t *testing.T, directory string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(repository, directory, "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no manifests in %s (%v)", directory, err)
	}
	return files
}

// applyGuide applies the guide's three policies, each manifest changed by a function, with all nodes locked.
func applyGuide(t *testing.T, change func(string) string) {
	t.Helper()
	lockAllNodes(t) // its PodQOS would match the pods of other scenes
	for _, file := range manifests(t, "tests/guide") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { tryKubectl("", "delete", "-f", file, "--ignore-not-found") })
		if _, err := tryKubectl(change(string(text)), "apply", "--validate=strict", "-f", "-"); err != nil { // two of them contain the same PodQOS
			t.Fatal(err)
		}
	}
	for _, name := range []string{"watermark1", "watermark2", "watermark3"} {
		kubectl(t, "wait", "nodeqos/"+name, "--for=condition=Accepted", "--timeout=10s")
		kubectl(t, "wait", "nodeqos/"+name, "--for=condition=ActionsResolved", "--timeout=10s")
		// Skips the canary phase, which takes a minute.
		kubectl(t, "annotate", "nodeqos", name, "plimsoll.dev/rollout=immediate")
	}
	for _, name := range []string{"all-be-pods", "all-elastic-pods"} {
		kubectl(t, "annotate", "podqos", name, "plimsoll.dev/rollout=immediate")
	}
}

func TestGuidesPoliciesAreAcceptedUnchanged(t *testing.T) {
	t.Parallel()
	applyGuide(t, func(text string) string { return text })
	for _, node := range nodes {
		eventually(t, 20*time.Second, "node "+node+" enforces the three rules", func() error {
			now, err := watermarkOf(node)
			if err != nil {
				return err
			}
			var enforced []string
			for _, rule := range now.Status.Rules {
				enforced = append(enforced, rule.ID+" "+rule.State)
			}
			want := "watermark1/cpu-usage Normal, watermark2/cpu-usage Normal, watermark3/cpu-usage Normal"
			if strings.Join(enforced, ", ") != want || now.Spec.Hash != now.Status.ObservedHash {
				return fmt.Errorf("the agent enforces %v", enforced)
			}
			return nil
		})
	}
}

func TestGuidesPoliciesActWithThresholdsForTheNode(t *testing.T) {
	t.Parallel()
	scenes := map[string]*scene{}
	before := map[string]*victim{}
	elastic := map[string]string{}
	// A node with 2 CPUs never uses 4 or 6 of them, but any node with a busy pod uses more than 30m.
	small := strings.NewReplacer("value: 4000", "value: 30", "value: 6000", "value: 30")
	applyGuide(t, small.Replace)
	for _, node := range nodes {
		s := newScene(t, node)
		s.settleTimeout = 2 * time.Minute // the throttle of the guide is released in steps of 10 % per evaluation
		s.start(work{name: "besteffort", args: []string{"burn", "150"}}, work{name: "burstable", args: []string{"burn", "150"}, requests: "20m"})
		elastic[node] = s.owned(work{name: "elastic", args: []string{"burn", "50"}, requests: "20m", labels: map[string]string{"preemptible_job": "true"}})[0]
		scenes[node] = s
	}
	for _, s := range scenes {
		s.waitRunning("besteffort")
		s.waitRunning("burstable")
		before[s.node] = s.victim("burstable")
	}
	// The second breach acts.
	for node, s := range scenes {
		s.waitTaint(45*time.Second, corev1.TaintEffectNoSchedule)
		eventually(t, 60*time.Second, "the BestEffort pod on "+node+" is throttled", func() error {
			if reported := s.throttled("besteffort"); reported == nil || reported.Rule != "watermark2/cpu-usage" || reported.Ratio > 90 {
				return fmt.Errorf("the status reports %+v", reported)
			}
			return nil
		})
		// It has no limit of its own, and uses about 150m.
		if quota := s.settings(s.directory("besteffort")).millicores(); quota < 0 || quota > 400 {
			t.Errorf("the quota of the BestEffort pod is %dm", quota)
		}
		if err := checkRestored(before[node].before, s.settings(before[node].directory)); err != nil {
			t.Errorf("the Burstable pod was changed: %v", err)
		}
		eventually(t, 45*time.Second, "the third policy, a Preview, reports the pod that it would evict", func() error {
			now, err := watermarkOf(node)
			if err != nil {
				return err
			}
			for _, would := range now.Status.Would {
				if would.Rule == "watermark3/cpu-usage" && would.What == "evict" && would.Namespace == s.name && would.Pod == elastic[node] {
					return nil
				}
			}
			return fmt.Errorf("the Preview reports %+v", now.Status.Would)
		})
		if pod := s.pod(elastic[node]); pod.DeletionTimestamp != nil {
			t.Errorf("pod %s is being deleted although the rule is a Preview", pod.Name)
		}
	}
	for _, name := range []string{"watermark1", "watermark2", "watermark3"} {
		kubectl(t, "delete", "nodeqos", name)
	}
	for _, s := range scenes {
		s.waitNoTaint(30 * time.Second)
		// Compare with a new pod of the same kind: this one was throttled soon after it started.
		s.running(work{name: "like", args: []string{"pause"}})
		s.waitRestored(s.settleTimeout, s.directory("besteffort"), s.victim("like").before)
	}
}

func TestExamplesAreAccepted(t *testing.T) {
	t.Parallel()
	for _, file := range manifests(t, "examples/ensurance") {
		kubectl(t, "apply", "--dry-run=server", "--validate=strict", "-f", file)
	}
}

func TestExamplesAreEnforcedTogether(t *testing.T) {
	needShell(t) // on a shared cluster they could act on other pods
	t.Parallel()
	lockAllNodes(t) // their PodQOS would match the pods of other scenes
	directory := absolute("examples/ensurance")
	t.Cleanup(func() {
		tryKubectl("", "delete", "-f", directory, "--ignore-not-found")
		for _, node := range nodes {
			eventually(t, time.Minute, "node "+node+" has no rules left", func() error { return checkNoRules(node) })
		}
	})
	kubectl(t, "apply", "--validate=strict", "-f", directory)
	kubectl(t, "wait", "-f", directory, "--for=condition=Accepted", "--timeout=20s")
	kubectl(t, "annotate", "-f", directory, "plimsoll.dev/rollout=immediate", "--overwrite")
	for _, name := range []string{"cpu-pressure", "disk", "memory", "temperature", "watermark1", "watermark2", "watermark3"} {
		kubectl(t, "wait", "nodeqos/"+name, "--for=condition=ActionsResolved", "--timeout=10s")
	}
	for _, node := range nodes {
		eventually(t, 30*time.Second, "node "+node+" enforces the rules that select it", func() error {
			return checkRulesEnforced(node, "watermark1/cpu-usage", "watermark2/cpu-usage", "watermark3/cpu-usage")
		})
	}
}

// checkRulesEnforced checks that a node enforces these rules, among others.
func checkRulesEnforced(node string, ids ...string) error {
	now, err := watermarkOf(node)
	if err != nil {
		return err
	}
	enforced := map[string]bool{}
	for _, rule := range now.Status.Rules {
		enforced[rule.ID] = true
	}
	for _, id := range ids {
		if !enforced[id] {
			return fmt.Errorf("the agent enforces %v", enforced)
		}
	}
	return nil
}

// checkNoRules checks that a node has neither rules nor our taint.
func checkNoRules(node string) error {
	now, err := watermarkOf(node)
	if err != nil {
		return err
	}
	if found, err := taint(node); err != nil || found != nil || len(now.Status.Rules) > 0 {
		return fmt.Errorf("rules are %v, the taint is %v (%v)", now.Status.Rules, found, err)
	}
	return nil
}

// invalid are manifests, each with the field and the fix that the error must name.
var invalid = []struct{ name, kind, spec, field, fix string }{
	{"a step of 0", "AvoidanceAction", "{throttle: {cpuThrottle: {stepCPURatio: 0}}}", "spec.throttle.cpuThrottle.stepCPURatio", "greater than or equal to 1"},
	{"a floor above 100", "AvoidanceAction", "{throttle: {cpuThrottle: {minCPURatio: 101}}}", "spec.throttle.cpuThrottle.minCPURatio", "less than or equal to 100"},
	{"an empty throttle", "AvoidanceAction", "{throttle: {}}", "spec.throttle", "write cpuThrottle"},
	{"a negative grace period", "AvoidanceAction", "{eviction: {terminationGracePeriodSeconds: -1}}", "spec.eviction.terminationGracePeriodSeconds", "greater than or equal to 0"},
	{"a cool-down of 0", "AvoidanceAction", "{coolDownSeconds: 0}", "spec.coolDownSeconds", "greater than or equal to 1"},
	{"an effect that is not ours", "AvoidanceAction", "{disableScheduling: {effect: NoExecute}}", "spec.disableScheduling.effect", `"NoSchedule", "PreferNoSchedule"`},
	{"no rules", "NodeQOS", "{rules: []}", "spec.rules", "at least 1"},
	{"a rule without a metric", "NodeQOS", "{rules: [{name: a, actionName: b}]}", "spec.rules[0].metricRule", "Required"},
	{"a value of 0", "NodeQOS", "{rules: [{name: a, actionName: b, metricRule: {name: cpu_total_usage, value: 0}}]}", "spec.rules[0].metricRule.value", "write for example 4000"},
	{"a fraction that is no text", "NodeQOS", "{rules: [{name: a, actionName: b, metricRule: {name: cpu_total_usage, value: 0.5}}]}", "spec.rules[0].metricRule.value", "integer,string"},
	{"two rules with one name", "NodeQOS", "{rules: [{name: a, actionName: b, metricRule: {name: cpu_total_usage, value: 1}}, {name: a, actionName: b, metricRule: {name: cpu_total_usage, value: 1}}]}", "spec.rules[1]", "Duplicate"},
	{"two restore thresholds that differ", "NodeQOS", "{rules: [{name: a, actionName: b, restoreThreshold: 1, restoredThreshold: 2, metricRule: {name: cpu_total_usage, value: 1}}]}", "spec.rules[0]", "restoredThreshold"},
	{"a low threshold above the high one", "NodeQOS", "{rules: [{name: a, actionName: b, restoreValue: 2, metricRule: {name: cpu_total_usage, value: 1}}]}", "spec.rules[0]", "restoreValue"},
	{"an unknown strategy", "NodeQOS", "{rules: [{name: a, actionName: b, strategy: Maybe, metricRule: {name: cpu_total_usage, value: 1}}]}", "spec.rules[0].strategy", `"Enforce", "Preview"`},
	{"a threshold of 0", "NodeQOS", "{rules: [{name: a, actionName: b, avoidanceThreshold: 0, metricRule: {name: cpu_total_usage, value: 1}}]}", "spec.rules[0].avoidanceThreshold", "greater than or equal to 1"},
	{"an unknown scope", "PodQOS", "{allowedActions: [throttle], scopeSelector: {matchExpressions: [{scopeName: Colour, operator: In, values: [red]}]}}", "spec.scopeSelector.matchExpressions[0].scopeName", "QOSClass"},
	{"In without values", "PodQOS", "{allowedActions: [throttle], scopeSelector: {matchExpressions: [{scopeName: Namespace, operator: In}]}}", "spec.scopeSelector.matchExpressions[0]", "values"},
	{"a priority that is no number", "PodQOS", "{allowedActions: [throttle], scopeSelector: {matchExpressions: [{scopeName: Priority, operator: In, values: [high]}]}}", "spec.scopeSelector.matchExpressions[0]", "-100"},
}

func TestInvalidManifestsAreRejectedWithFieldAndFix(t *testing.T) {
	t.Parallel()
	for _, c := range invalid {
		t.Run(c.name, func(t *testing.T) {
			manifest := fmt.Sprintf("apiVersion: ensurance.crane.io/v1alpha1\nkind: %s\nmetadata: {name: bad}\nspec: %s\n", c.kind, c.spec)
			_, err := tryKubectl(manifest, "apply", "-f", "-")
			if err == nil {
				kubectl(t, "delete", strings.ToLower(c.kind), "bad")
				t.Fatal("the invalid policy was accepted")
			}
			if !strings.Contains(err.Error(), c.field) || !strings.Contains(err.Error(), c.fix) {
				t.Errorf("the error does not name both %q and %q: %v", c.field, c.fix, err)
			}
		})
	}
}

func TestKubectlShowsTheColumnsOfNodeWatermarks(t *testing.T) {
	t.Parallel()
	header := strings.Fields(strings.SplitN(kubectl(t, "get", "nodewatermarks"), "\n", 2)[0])
	want := "NAME RULES BREACHED SCHEDULING THROTTLED EVICTED(1H) WOULD(24H) STOPPED AGENT AGE"
	if strings.Join(header, " ") != want {
		t.Errorf("columns are %v", header)
	}
	if text := kubectl(t, "explain", "nodewatermark.status.throttled"); !strings.Contains(text, "ratio") {
		t.Error(text)
	}
}
