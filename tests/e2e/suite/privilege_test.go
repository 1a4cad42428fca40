//go:build e2e

package suite

import (
	"cmp"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"plimsoll.dev/suite/plane"
	"plimsoll.dev/suite/report"
)

// escape is a shell script that runs in the agent's place: it reports each attempt that left its container, and whether it can still
// do the agent's job. $TREES are the cgroup trees that it may read, $PODS the parts that it may write. Another pod on the node is also root
// without capabilities: the kernel separates the two only because neither sees the other's processes.
// It only counts the blocked attempts: a termination message is limited to 4096 bytes.
const escape = `
b=/bin/busybox
blocked=0
try() { what=$1; shift; if "$@" >/dev/null 2>&1; then echo "left: $what"; else blocked=$((blocked + 1)); fi; }
write() { echo "$1" >"$2"; }
again() { write "$(cat "$1")" "$1"; }
own() { : >/var/lib/plimsoll/left; "$@" /var/lib/plimsoll/left; code=$?; $b rm -f /var/lib/plimsoll/left; return $code; }
procs=$($b awk '/ - proc /{print $5}' /proc/self/mountinfo)
environment() { for proc in $procs; do [ -z "$($b grep -l PLIMSOLL_E2E_VICTIM $proc/[0-9]*/environ)" ] || return 0; done; return 1; }
files() { for proc in $procs; do [ -z "$(ls $proc/[0-9]*/root/tmp/victim)" ] || return 0; done; return 1; }
another() { process=$1; shift; ! [ $process/root -ef / ] && "$@"; } # the same for its own process is no escape
see() { ls $1/root/; }
sees() { for proc in $procs; do for process in $proc/[0-9]*; do ! another $process see $process || return 0; done; done; return 1; }
opens() { (: <$1); }
reads() { [ -n "$(head -c 1 $1)" ]; }
reclaim() { for file in $1/*/*pod*/memory.reclaim; do ! write 0 $file || return 0; done; return 1; } # of any pod, since some may be gone by then
device() { $b mknod /var/lib/plimsoll/left c 1 3 || return 1; $b rm -f /var/lib/plimsoll/left; }
try "write to the image" write x /bin/left
for tree in $TREES; do
  try "make a cgroup in $tree" mkdir $tree/left
  try "join the node's own cgroup in $tree" write 0 $tree/cgroup.procs
  try "have the kernel run a program through $tree" write /bin/true $tree/release_agent
  try "mount $tree to write" $b mount -o remount,bind,rw $tree
done
for sys in /proc/sys /host/proc/sys; do
  try "set a kernel parameter in $sys" again $sys/vm/swappiness
  try "set the handler of core dumps in $sys" again $sys/kernel/core_pattern
done
for point in $($b awk '$5 ~ "^/host/" && $6 ~ "^rw" {print $5}' /proc/self/mountinfo); do # as binfmt_misc is, below a /proc
  case " $PODS " in *" $point "*) ;; *) echo "left: write to $point";; esac
done
try "read the environment of another pod that is root" environment
try "read the files of another pod that is root" files
try "see the files of any other process" sees
try "mount a file system" $b mount -t tmpfs none /tmp
try "mount the root to write" $b mount -o remount,rw /
try "unmount" $b umount -l /host/proc/1/net/dev
try "be root of a user namespace" $b unshare -U true
try "get a mount namespace" $b unshare -m true
try "get a network namespace" $b unshare -n true
for proc in /proc /host/proc; do # where a pod with hostPID would see the node's processes, and where a mount of the node's /proc would show them
  try "trigger sysrq by $proc" write h $proc/sysrq-trigger
  try "enter the mounts of the node's first process by $proc" $b nsenter --mount=$proc/1/ns/mnt true
  try "enter the network of the node's first process by $proc" $b nsenter --net=$proc/1/ns/net true
  try "see the files of the node's first process by $proc" another $proc/1 see $proc/1
  try "see what the node's first process has open by $proc" another $proc/1 $b readlink $proc/1/fd/0
  try "read the environment of the node's first process by $proc" another $proc/1 cat $proc/1/environ
  try "open the memory of the node's first process by $proc" another $proc/1 opens $proc/1/mem
  try "read the memory of the node by $proc" reads $proc/kcore
done
try "change its root" $b chroot / /bin/true
try "make a device" device
try "change the owner of a file" own $b chown 1000
try "set the node's host name" $b hostname left
try "load a module" $b insmod /bin/busybox
for socket in /run/containerd /run/crio /run/docker.sock /var/run/docker.sock; do
  try "find a runtime's socket at $socket" ls $socket
done
for pods in $PODS; do
  for file in $pods/cpu.weight $pods/cpu.shares; do
    [ ! -e $file ] || if again $file; then echo "able: set $file"; else echo "unable: set $file"; fi
  done
  [ ! -e $pods/memory.reclaim ] || if reclaim $pods; then echo "able: reclaim in $pods"; else echo "unable: reclaim in $pods"; fi
done
echo "$blocked attempts were blocked"
echo end
`

func TestCompromisedAgentCannotLeaveItsContainer(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		needShell(t) // and the tools' image
		s := shared(t, node)
		s.startUnprivileged("victim")
		agent, err := kube.CoreV1().Pods(namespace).Get(background, agentPod(node), metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "compromised-" + node, Namespace: namespace, Annotations: map[string]string{"plimsoll.dev/protected": "true"}},
			Spec:       compromisedAgent(agent.Spec),
		}
		if _, err := kube.CoreV1().Pods(namespace).Create(background, pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			kube.CoreV1().Pods(namespace).Delete(background, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))})
		})
		output := ""
		eventually(t, time.Minute, "the attempts on "+node+" are over", func() error {
			now, err := kube.CoreV1().Pods(namespace).Get(background, pod.Name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if len(now.Status.ContainerStatuses) == 0 || now.Status.ContainerStatuses[0].State.Terminated == nil {
				return fmt.Errorf("its pod is %s %v", now.Status.Phase, now.Status.ContainerStatuses)
			}
			output = now.Status.ContainerStatuses[0].State.Terminated.Message
			return nil
		})
		if !strings.HasSuffix(strings.TrimSpace(output), "end") || !strings.Contains(output, "able: set") {
			t.Errorf("not every access was tried:\n%s", output)
		}
		if node == "v2" && !strings.Contains(output, "able: reclaim") {
			t.Errorf("no page cache of a pod was reclaimed:\n%s", output)
		}
		for _, line := range strings.Split(output, "\n") {
			if strings.HasPrefix(line, "left: ") || strings.HasPrefix(line, "unable: ") {
				t.Error(line)
			}
		}
	})
}

// TestAgentDoesNotExposePodsToRemoteClients: the API server's proxy connects from outside, like any pod of the cluster. That the
// chart's agents omit per-pod series is tested in package chart.
func TestAgentDoesNotExposePodsToRemoteClients(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		path := "/api/v1/namespaces/" + namespace + "/pods/" + agentPod(node) + ":8080/proxy/v1/node-metric"
		response, err := kube.CoreV1().RESTClient().Get().AbsPath(path).DoRaw(background)
		if !apierrors.IsForbidden(err) || !strings.Contains(string(response), "connect over loopback (kubectl port-forward)") {
			t.Errorf("a remote client got %s (%v)", response, err)
		}
		if _, measured := agentMetrics(t, node)[`node_cpu_usage_cores{part="node"}`]; !measured {
			t.Error("the agent does not report the CPU usage of its node")
		}
	})
}

// TestLockedAgentReclaimsPageCache is for cgroup v2: v1 has no memory.reclaim.
func TestLockedAgentReclaimsPageCache(t *testing.T) {
	t.Parallel()
	const node, mib = "v2", 1 << 20
	if !slices.Contains(nodes, node) {
		t.Skip("needs node " + node)
	}
	s := shared(t, node)
	s.running(work{name: "cache", args: []string{"pause"}})
	directory := s.directory("cache")
	// Dirty pages cannot be reclaimed.
	kubectl(t, "exec", "-n", s.name, "cache", "--", "/bin/busybox", "dd", "if=/dev/zero", "of=/tmp/file", "bs=1M", "count=24", "conv=fsync")
	cached := func() int {
		t.Helper()
		bytes, err := strconv.Atoi(strings.TrimSpace(onNode(t, node, "sed -n 's/^file //p' "+directory+"/memory.stat")))
		if err != nil {
			t.Fatal(err)
		}
		return bytes
	}
	if before := cached(); before < 20*mib {
		t.Fatalf("the pod has only %d bytes of page cache", before)
	}
	s.action(s.name, "{coolDownSeconds: 2, throttle: {memoryThrottle: {forceGC: true}}}")
	s.allow(s.name, "", s.name)
	s.rule(s.name, rule{action: s.name})
	s.waitRulesEnforced(s.name)
	const done = `actions_total{action="reclaim",strategy="Enforce"}`
	earlier := agentMetrics(t, node)[done]
	s.set(hot)
	eventually(t, time.Minute, "its page cache is reclaimed", func() error {
		if now := cached(); now > 8*mib {
			return fmt.Errorf("it still has %d bytes of page cache", now)
		}
		return nil
	})
	eventually(t, 20*time.Second, "the agent counts it", func() error {
		if now := agentMetrics(t, node)[done]; now <= earlier {
			return fmt.Errorf("%s is %.0f, was %.0f", done, now, earlier)
		}
		return nil
	})
	s.set(cold)
}

// TestLockedAgentSetsPodIdleClass has the idle class restored in two ways: the rule ends, and its policies are deleted. A Guaranteed pod, whose
// cgroup is beside those of the other classes, keeps its quota: its request is its limit.
func TestLockedAgentSetsPodIdleClass(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := shared(t, node)
		s.running(
			work{name: "free", args: []string{"burn", "200"}},
			work{name: "guaranteed", args: []string{"burn", "50"}, requests: "100m", limits: "100m"},
		)
		free, guaranteed := s.victim("free"), s.victim("guaranteed")
		if class := s.pod("guaranteed").Status.QOSClass; class != corev1.PodQOSGuaranteed {
			t.Fatalf("its QoS class is %s", class)
		}
		class, has := free.before["pod/cpu.idle"]
		if !has {
			t.Skip("the kernel of " + node + " has no cpu.idle")
		}
		if class != "0" {
			t.Fatalf("its cpu.idle is %s while nothing is in force", class)
		}
		s.action(s.name, "{coolDownSeconds: 2, throttle: {cpuThrottle: {idle: true, stepCPURatio: 25, minCPURatio: 50}}}")
		classAlone := s.name + "-class" // the idle class without a quota
		s.action(classAlone, "{coolDownSeconds: 2, throttle: {cpuThrottle: {idle: true, minCPURatio: 100}}}")
		for action, app := range map[string]string{s.name: "free", classAlone: "guaranteed"} {
			s.allow(action, app, action)
			s.rule(action, rule{action: action})
			s.waitRulesEnforced(action)
		}

		s.set(hot)
		s.waitIdleClass(free)
		s.waitIdleClass(guaranteed)
		if original, now := guaranteed.before.millicores(), s.settings(guaranteed.directory).millicores(); now != original {
			t.Errorf("the quota of the Guaranteed pod is %dm, not %dm", now, original)
		}
		eventually(t, 20*time.Second, "the status shows that it is throttled", func() error {
			// How far its quota is lowered after that depends on the CPU that other pods leave it.
			reported := s.throttled(free.name)
			if reported == nil || reported.Rule != s.name+"/hot" || reported.Ratio < 50 || reported.FromMillicores != nil {
				return fmt.Errorf("the status reports %+v", reported)
			}
			return nil
		})
		eventually(t, 20*time.Second, "an event reports that the class came before any quota", func() error {
			all := events(t, "Pod", s.name, free.name)
			if !slices.ContainsFunc(all, func(reported string) bool {
				return strings.HasPrefix(reported, "PodThrottled: "+s.name+"/hot") && strings.HasSuffix(reported, "; CPU unlimited, idle class")
			}) {
				return fmt.Errorf("its events are:\n%s", strings.Join(all, "\n"))
			}
			return nil
		})

		// The kernel resets the weight to its default when a cgroup leaves the idle class: this pod has another weight.
		s.set(cold)
		s.waitRestored(30*time.Second, free.directory, free.before)
		s.waitRestored(30*time.Second, guaranteed.directory, guaranteed.before)
		s.set(hot)
		s.waitIdleClass(free)
		s.waitIdleClass(guaranteed)
		s.noPolicies()
		s.waitRestored(30*time.Second, free.directory, free.before)
		s.waitRestored(30*time.Second, guaranteed.directory, guaranteed.before)
	})
}

// waitIdleClass waits until a pod's cgroup is in the kernel's idle class.
func (s *scene) waitIdleClass(v *victim) {
	s.Helper()
	eventually(s, 30*time.Second, v.name+" is in the idle class", func() error {
		read, err := readSettings(s.node, v.directory)
		if err != nil {
			return err
		}
		if class := read["pod/cpu.idle"]; class != "1" {
			return fmt.Errorf("its cpu.idle is %s", class)
		}
		return nil
	})
}

// startUnprivileged runs a pod that is root without capabilities, with a variable and a file that another pod must not see.
func (s *scene) startUnprivileged(name string) {
	s.Helper()
	template := s.template(work{name: name})
	template.Name = name
	container := &template.Spec.Containers[0]
	container.Command = []string{"/bin/sh", "-c", ": >/tmp/victim && exec sleep 3600"}
	container.Env = []corev1.EnvVar{{Name: "PLIMSOLL_E2E_VICTIM", Value: "yes"}}
	container.SecurityContext = &corev1.SecurityContext{
		RunAsUser: ptr.To(int64(0)), AllowPrivilegeEscalation: ptr.To(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
	}
	pod := &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
	if _, err := kube.CoreV1().Pods(s.name).Create(background, pod, metav1.CreateOptions{}); err != nil {
		s.Fatal(err)
	}
	s.waitRunning(name)
}

// compromisedAgent is the agent's pod with a shell instead of the agent: the same user, capabilities, filters, mounts and token.
func compromisedAgent(spec corev1.PodSpec) corev1.PodSpec {
	spec = *spec.DeepCopy()
	spec.RestartPolicy, spec.TerminationGracePeriodSeconds = corev1.RestartPolicyNever, ptr.To(int64(1))
	var trees, pods []string
	container := &spec.Containers[0]
	for _, mount := range container.VolumeMounts {
		if strings.HasPrefix(mount.MountPath, "/host/sys/fs/cgroup") {
			if mount.ReadOnly {
				trees = append(trees, mount.MountPath)
			} else {
				pods = append(pods, mount.MountPath)
			}
		}
	}
	container.Image, container.ImagePullPolicy = toolsImage, corev1.PullIfNotPresent
	container.Command, container.Args = []string{"/bin/sh", "-c", "(" + escape + ") >/dev/termination-log"}, nil
	container.Env = []corev1.EnvVar{{Name: "TREES", Value: strings.Join(trees, " ")}, {Name: "PODS", Value: strings.Join(pods, " ")}}
	container.Ports, container.LivenessProbe, container.ReadinessProbe, container.StartupProbe = nil, nil, nil, nil
	container.Resources = corev1.ResourceRequirements{}
	return spec
}

func TestLockedAgentMeasuresNodeNotContainer(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := shared(t, node)
		names := "sed -n 's/^ *\\([^: ]*\\):.*/\\1/p' "
		agents := "/proc/" + processOf(t, node, "agent") + "/root/host/proc/1/net/dev"
		eventually(t, time.Minute, "the agent sees the interfaces of "+node, func() error { // those of pods come and go
			both, err := tryOnNode(node, names+"/proc/1/net/dev; echo =; "+names+agents)
			nodes, seen, _ := strings.Cut(both, "=")
			if err != nil || strings.TrimSpace(nodes) != strings.TrimSpace(seen) || len(strings.Fields(seen)) < 2 {
				return fmt.Errorf("the agent sees interfaces %s of %s (%v)", strings.Fields(seen), strings.Fields(nodes), err)
			}
			return nil
		})

		action := s.name + "-none"
		s.action(action, "{}")
		// Other processes are not visible: metrics that need them are unknown, not 0.
		unknown := s.name + "-queue/hot"
		rules := map[string]rule{ // whose thresholds are never reached
			"load":  {metric: "cpu_load_1_min", threshold: 1_000_000},
			"net":   {metric: "network_receive_pckps", threshold: 1_000_000_000},
			"queue": {metric: "container_sched_run_queue_time", threshold: 1_000_000_000},
		}
		if onNode(t, node, "cat /proc/pressure/memory || true") != "" {
			rules["psi"] = rule{metric: "memory_pressure_some_avg10", threshold: 99}
		}
		for what, r := range rules {
			r.action, r.strategy = action, "Preview"
			s.rule(s.name+"-"+what, r)
		}
		eventually(t, time.Minute, "metrics that can be measured have a value, and the other is unknown", func() error {
			values := agentMetrics(t, node)
			for what, r := range rules {
				series := fmt.Sprintf(`rule_value{rule="%s-%s/hot",metric="%s"}`, s.name, what, r.metric)
				if value, has := values[series]; (has && !math.IsNaN(value)) != (what != "queue") {
					return fmt.Errorf("%s is %v (present: %v)", series, value, has)
				}
			}
			now, err := watermarkOf(node)
			if err != nil {
				return err
			}
			for _, rule := range now.Status.Rules {
				if rule.ID == unknown && rule.Unknown == "no sample" {
					return nil
				}
			}
			return fmt.Errorf("the status does not report %s as unknown: %+v", unknown, now.Status.Rules)
		})
	})
}

// stolenToken is an attacker who has only the tokens of a node's agent.
type stolenToken struct {
	*scene
	kube    kubernetes.Interface
	objects dynamic.Interface
	// marker is in everything that the attacker tries to write, as value and as field manager.
	marker         string
	reports, trust string
}

// stealToken reads the tokens from the agent's container.
func stealToken(s *scene) *stolenToken {
	s.Helper()
	agent, err := kube.CoreV1().Pods(namespace).Get(background, agentPod(s.node), metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	secrets := "/proc/" + processOfPod(s.T, agent, "agent") + "/root/var/run/secrets/"
	read := func(file string) string { return onNode(s, s.node, "cat "+secrets+file) }
	config := rest.AnonymousClientConfig(access)
	config.BearerToken = read("kubernetes.io/serviceaccount/token")
	stolen := &stolenToken{scene: s, marker: s.name + "-thief", reports: read("plimsoll.dev/report/token"), trust: read("plimsoll.dev/report/ca.crt")}
	if stolen.kube, err = kubernetes.NewForConfig(config); err != nil {
		s.Fatal(err)
	}
	if stolen.objects, err = dynamic.NewForConfig(config); err != nil {
		s.Fatal(err)
	}
	return stolen
}

// refused retries until the attempt is refused with this message: a Lease may be renewed meanwhile, and the controller may be slow. It fails the
// test if the attempt succeeds.
func (th *stolenToken) refused(what, words string, try func() error) {
	th.Helper()
	eventually(th, time.Minute, "it is forbidden to "+what, func() error {
		err := try()
		if err == nil {
			th.Fatalf("a holder of the agent's token can %s", what)
		}
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), words) {
			return fmt.Errorf("refused for another reason than %q: %w", words, err)
		}
		return nil
	})
}

// patches returns a function that patches an object; $MARK in the patch stands for the marker.
func (th *stolenToken) patches(kind schema.GroupVersionResource, name, patch string, subresources ...string) func() error {
	return func() error {
		body := []byte(strings.ReplaceAll(patch, "$MARK", th.marker))
		_, err := th.objects.Resource(kind).Patch(background, name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: th.marker}, subresources...)
		return err
	}
}

func TestStolenAgentTokenIsLimitedToItsNode(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		needShell(t)
		th := stealToken(shared(t, node))
		const label, cordon = `{"metadata":{"labels":{"stolen":"$MARK"}}}`, `{"spec":{"unschedulable":true}}`
		allNodes, ours := corev1.SchemeGroupVersion.WithResource("nodes"), "the condition InterferenceIdentified of its Node, not "
		th.refused("label its own node", ours+"metadata.labels", th.patches(allNodes, node, label))
		th.refused("cordon its own node", ours+"spec.unschedulable", th.patches(allNodes, node, cordon))
		for where, among := range map[string]string{"everywhere": "", "in its own namespace": namespace} {
			th.refused("read secrets "+where, `cannot list resource "secrets"`, func() error {
				_, err := th.kube.CoreV1().Secrets(among).List(background, metav1.ListOptions{})
				return err
			})
		}
		th.cannotRemoveGuards()
		th.cannotEvictDirectly(node)
		if len(nodes) > 1 {
			their, only := other(node), "may update only its own Node, not "+other(node)
			taint := `{"spec":{"taints":[{"key":"` + taintKey + `","value":"$MARK","effect":"NoSchedule"}]}}`
			th.refused("taint another node", only, th.patches(allNodes, their, taint))
			th.refused("cordon another node", only, th.patches(allNodes, their, cordon))
			th.refused("label another node", only, th.patches(allNodes, their, label))
			status := th.patches(nodeWatermarks, their, `{"status":{"observedHash":"$MARK"}}`, "status")
			th.refused("write the status of another agent", "only the status of its own NodeWatermark; the request is UPDATE of "+their, status)
			th.refused("renew the Lease of another agent", "not plimsoll-node-lease/"+their, func() error { return th.renew(their) })
			th.cannotEvictOn(their)
			th.cannotReportFor(their)
		}
		// Any successful write would carry the marker.
		written := append([]string{"get", "node,nodewatermark,lease", "-n", "plimsoll-node-lease", "-o", "json", "--show-managed-fields", "--ignore-not-found"}, nodes...)
		if now := kubectl(t, written...); !strings.Contains(now, "managedFields") || strings.Contains(now, th.marker) {
			t.Errorf("%s has written to one of these:\n%s", th.marker, now)
		}
		// It can still read, as docs/security.md says.
		pods, err := th.kube.CoreV1().Pods("").List(background, metav1.ListOptions{})
		if err != nil || len(pods.Items) == 0 {
			t.Errorf("an agent's token cannot read pods: %v", err)
		}
		if _, err := th.kube.CoreV1().Nodes().Get(background, node, metav1.GetOptions{}); err != nil {
			t.Errorf("an agent's token cannot read its own Node: %v", err)
		}
	})
}

// cannotRemoveGuards tries to delete the admission policies that restrict it.
func (th *stolenToken) cannotRemoveGuards() {
	th.Helper()
	guards := strings.Fields(kubectl(th, "get", "validatingadmissionpolicy,validatingadmissionpolicybinding",
		"-l", "app.kubernetes.io/instance=plimsoll", "-o", `jsonpath={range .items[*]}{.kind}/{.metadata.name} {end}`))
	kinds := map[string]string{"ValidatingAdmissionPolicy": "", "ValidatingAdmissionPolicyBinding": ""}
	for _, guard := range guards {
		kind, name, _ := strings.Cut(guard, "/")
		delete(kinds, kind)
		resource := admissionv1.SchemeGroupVersion.WithResource(strings.ReplaceAll(strings.ToLower(kind)+"s", "policys", "policies"))
		th.refused("delete "+guard, "cannot delete", func() error {
			return th.objects.Resource(resource).Delete(background, name, metav1.DeleteOptions{})
		})
		if _, err := objects.Resource(resource).Get(background, name, metav1.GetOptions{}); err != nil {
			th.Errorf("%s no longer exists: %v", guard, err)
		}
	}
	if len(kinds) > 0 {
		th.Errorf("some kinds of admission objects are missing: %v", guards)
	}
}

// renew tries to take over the Lease of a node.
func (th *stolenToken) renew(node string) error {
	leases := th.kube.CoordinationV1().Leases("plimsoll-node-lease")
	lease, err := leases.Get(background, node, metav1.GetOptions{})
	if err != nil {
		return err
	}
	lease.Spec.HolderIdentity = &th.marker
	_, err = leases.Update(background, lease, metav1.UpdateOptions{FieldManager: th.marker})
	return err
}

// cannotEvictDirectly tries to evict a pod of its own node, and to request an eviction for a rule that does not exist.
func (th *stolenToken) cannotEvictDirectly(node string) {
	th.Helper()
	th.running(work{name: "own-" + node, args: []string{"pause"}})
	own := th.pod("own-" + node)
	th.refused("evict a pod of its own node", `cannot create resource "pods/eviction"`, func() error {
		return th.kube.PolicyV1().Evictions(th.name).Evict(background, &policyv1.Eviction{
			ObjectMeta: metav1.ObjectMeta{Name: own.Name, Namespace: own.Namespace}, DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &own.UID}}})
	})
	th.evictionRefused(own, "no rule asks for it any more")
}

// cannotEvictOn requests the eviction of another node's pod, as itself and as that node's agent.
func (th *stolenToken) cannotEvictOn(node string) {
	th.Helper()
	there := &scene{th.T, node, th.name, th.settleTimeout}
	there.running(work{name: "elsewhere", args: []string{"pause"}})
	pod := there.pod("elsewhere")
	th.evictionRefused(pod, "it is not on this node any more")
	th.refused("request an eviction as another agent", fmt.Sprintf("only the agent of node %q may request evictions of its pods", node), func() error {
		_, err := plane.Evict(background, th.kube, node, th.evictionRequest(pod, ""))
		return err
	})
	if err := there.alive("elsewhere"); err != nil {
		th.Error(err)
	}
}

// evictionRequest requests the eviction of a pod for a rule that does not exist.
func (th *stolenToken) evictionRequest(pod *corev1.Pod, hash string) report.Eviction {
	return report.Eviction{BootID: th.marker, Sequence: time.Now().UnixNano(), Namespace: pod.Namespace, Name: pod.Name, UID: string(pod.UID),
		Rule: th.marker + "/hot", Hash: cmp.Or(hash, "none")}
}

// evictionRefused requests an eviction with everything that the token can read, until the leader refuses it with this message.
func (th *stolenToken) evictionRefused(pod *corev1.Pod, words string) {
	th.Helper()
	eventually(th, time.Minute, "the leader refuses to evict "+pod.Name, func() error {
		now, err := watermarkOf(th.node)
		if err != nil {
			return err
		}
		output, err := plane.Evict(background, th.kube, th.node, th.evictionRequest(pod, now.Spec.Hash))
		if output.Result == "accepted" {
			th.Fatalf("a holder of the agent's token can have %s evicted", pod.Name)
		}
		// Other scenes may change the node's rules or evict there meanwhile.
		if err != nil || output.Result != "refused" || !strings.Contains(output.Why, words) {
			return fmt.Errorf("unexpected response: %+v (%v)", output, err)
		}
		return nil
	})
	if err := (&scene{th.T, th.node, pod.Namespace, th.settleTimeout}).alive(pod.Name); err != nil {
		th.Error(err)
	}
}

// cannotReportFor tries to send a report for another node, from node v1, which reaches the controllers.
func (th *stolenToken) cannotReportFor(node string) {
	th.Helper()
	if _, err := tryOnNode("v1", "command -v curl"); err != nil {
		th.Log("NOT TESTED: forged reports need curl on node v1")
		return
	}
	trust := filepath.Join(th.TempDir(), "ca.crt")
	if err := os.WriteFile(trust, []byte(th.trust), 0o644); err != nil {
		th.Fatal(err)
	}
	report := fmt.Sprintf(`{"node":%q,"bootID":"b","agentStartedMillis":1,"sequence":1,"intervalSeconds":10,"status":{}}`, node)
	service := "plimsoll-report." + namespace + ".svc:8444"
	eventually(th, time.Minute, "it is forbidden to report for another node", func() error {
		options := fmt.Sprintf("url=%q\nresolve=%q\ncacert=%q\nheader=%q\nheader=%q\ndata=%q\nwrite-out=%q\nhttp2\nnoproxy=\"*\"\nsilent\nshow-error\nmax-time=10\n",
			"https://"+service+"/v1/report", service+":"+componentPods(th.T, "controller")[0].Status.PodIP, trust,
			"Authorization: Bearer "+th.reports, "Content-Type: application/json", report, " %{http_code}")
		response, err := run(options, clusterTool, "on", "v1", "curl", "--config", "-")
		if strings.HasSuffix(response, " 200") {
			th.Fatalf("a holder of the agent's token can report for another node: %s", response)
		}
		if refusal := fmt.Sprintf(`the agent of node \"%s\" cannot report for node \"%s\"`, th.node, node); !strings.HasSuffix(response, " 403") || !strings.Contains(response, refusal) {
			return fmt.Errorf("unexpected response: %q (%v)", response, err)
		}
		return nil
	})
}
