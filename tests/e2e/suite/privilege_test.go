//go:build e2e

package suite

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// escape is a shell that was got in the agent's place: it says of each attempt whether it left its container, and of the one thing that
// it is there for whether it can do it. $TREES are the cgroup trees that it may read, $PODS the parts of them that it may write. There is
// a pod on the node that is root without capabilities, as it is itself: the kernel keeps such processes apart only where they can't see each other.
// Of what was held it tells the number alone: a container's last message may have 4096 bytes.
const escape = `
b=/bin/busybox
held=0
try() { what=$1; shift; if "$@" >/dev/null 2>&1; then echo "left: $what"; else held=$((held + 1)); fi; }
write() { echo "$1" >"$2"; }
again() { write "$(cat "$1")" "$1"; }
own() { : >/var/lib/plimsoll/left; "$@" /var/lib/plimsoll/left; code=$?; $b rm -f /var/lib/plimsoll/left; return $code; }
procs=$($b awk '/ - proc /{print $5}' /proc/self/mountinfo)
environment() { for proc in $procs; do [ -z "$($b grep -l PLIMSOLL_E2E_VICTIM $proc/[0-9]*/environ)" ] || return 0; done; return 1; }
files() { for proc in $procs; do [ -z "$(ls $proc/[0-9]*/root/tmp/victim)" ] || return 0; done; return 1; }
another() { process=$1; shift; ! [ $process/root -ef / ] && "$@"; } # such a thing of itself is no escape
see() { ls $1/root/; }
sees() { for proc in $procs; do for process in $proc/[0-9]*; do ! another $process see $process || return 0; done; done; return 1; }
opens() { (: <$1); }
reads() { [ -n "$(head -c 1 $1)" ]; }
reclaim() { for file in $1/*/*pod*/memory.reclaim; do ! write 0 $file || return 0; done; return 1; } # of a pod that is not gone by then
device() { $b mknod /var/lib/plimsoll/left c 1 3 || return 1; $b rm -f /var/lib/plimsoll/left; }
try "write to the image" write x /bin/left
for tree in $TREES; do
  try "make a cgroup in $tree" mkdir $tree/left
  try "join the node's own cgroup in $tree" write 0 $tree/cgroup.procs
  try "have the kernel run a program by $tree" write /bin/true $tree/release_agent
  try "mount $tree to write" $b mount -o remount,bind,rw $tree
done
for sys in /proc/sys /host/proc/sys; do
  try "set a parameter of the kernel in $sys" again $sys/vm/swappiness
  try "say which program takes core dumps in $sys" again $sys/kernel/core_pattern
done
for point in $($b awk '$5 ~ "^/host/" && $6 ~ "^rw" {print $5}' /proc/self/mountinfo); do # as binfmt_misc is, below a /proc
  case " $PODS " in *" $point "*) ;; *) echo "left: write to $point";; esac
done
try "read the environment of another pod that is root" environment
try "read the files of another pod that is root" files
try "see the files of any process of another" sees
try "mount a file system" $b mount -t tmpfs none /tmp
try "mount the root to write" $b mount -o remount,rw /
try "take a mount away" $b umount -l /host/proc/1/net/dev
try "be root of a user namespace" $b unshare -U true
try "get a mount namespace" $b unshare -m true
try "get a network namespace" $b unshare -n true
for proc in /proc /host/proc; do # as a pod with the node's processes would see them, and as a mount of the node's shows them
  try "ask the kernel for help by $proc" write h $proc/sysrq-trigger
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
try "give a file away" own $b chown 1000
try "name the node" $b hostname left
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
echo "$held attempts were held"
echo end
`

func TestWhoeverTakesOverAnAgentCannotLeaveItsContainer(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		needShell(t) // and the tools' image
		s := shared(t, node)
		s.startWeak("victim")
		agent, err := kube.CoreV1().Pods(namespace).Get(background, agentPod(node), metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "taken-over-" + node, Namespace: namespace, Annotations: map[string]string{"plimsoll.dev/protected": "true"}},
			Spec:       takenOver(agent.Spec),
		}
		if _, err := kube.CoreV1().Pods(namespace).Create(background, pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			kube.CoreV1().Pods(namespace).Delete(background, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))})
		})
		said := ""
		eventually(t, time.Minute, "the attempts on "+node+" are over", func() error {
			now, err := kube.CoreV1().Pods(namespace).Get(background, pod.Name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if len(now.Status.ContainerStatuses) == 0 || now.Status.ContainerStatuses[0].State.Terminated == nil {
				return fmt.Errorf("its pod is %s %v", now.Status.Phase, now.Status.ContainerStatuses)
			}
			said = now.Status.ContainerStatuses[0].State.Terminated.Message
			return nil
		})
		if !strings.HasSuffix(strings.TrimSpace(said), "end") || !strings.Contains(said, "able: set") {
			t.Errorf("not all was tried:\n%s", said)
		}
		if node == "v2" && !strings.Contains(said, "able: reclaim") {
			t.Errorf("no page cache of a pod was asked for:\n%s", said)
		}
		for _, line := range strings.Split(said, "\n") {
			if strings.HasPrefix(line, "left: ") || strings.HasPrefix(line, "unable: ") {
				t.Error(line)
			}
		}
	})
}

// TestALockedAgentReclaimsPageCache is for cgroup v2: v1 has no memory.reclaim.
func TestALockedAgentReclaimsPageCache(t *testing.T) {
	t.Parallel()
	const node, mib = "v2", 1 << 20
	if !slices.Contains(nodes, node) {
		t.Skip("needs node " + node)
	}
	s := shared(t, node)
	s.running(work{name: "cache", args: []string{"pause"}})
	folder := s.folder("cache")
	// What is not on the disk yet can't be reclaimed.
	kubectl(t, "exec", "-n", s.name, "cache", "--", "/bin/busybox", "dd", "if=/dev/zero", "of=/tmp/file", "bs=1M", "count=24", "conv=fsync")
	cached := func() int {
		t.Helper()
		bytes, err := strconv.Atoi(strings.TrimSpace(onNode(t, node, "sed -n 's/^file //p' "+folder+"/memory.stat")))
		if err != nil {
			t.Fatal(err)
		}
		return bytes
	}
	if before := cached(); before < 20*mib {
		t.Fatalf("it has %d bytes of page cache", before)
	}
	s.action(s.name, "{coolDownSeconds: 2, throttle: {memoryThrottle: {forceGC: true}}}")
	s.allow(s.name, "", s.name)
	s.rule(s.name, rule{action: s.name})
	s.waitKept(s.name)
	const done = `actions_total{action="reclaim",strategy="None"}`
	earlier := agentMetrics(t, node)[done]
	s.set(hot)
	eventually(t, time.Minute, "its page cache is reclaimed", func() error {
		if now := cached(); now > 8*mib {
			return fmt.Errorf("it has %d bytes of page cache", now)
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

// TestALockedAgentMakesAPodIdleClass ends it both ways: the rule is over, and its policies are deleted.
func TestALockedAgentMakesAPodIdleClass(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := shared(t, node)
		s.running(work{name: "free", args: []string{"burn", "200"}})
		free := s.victim("free")
		class, has := free.before["pod/cpu.idle"]
		if !has {
			t.Skip("the kernel of " + node + " has no cpu.idle")
		}
		if class != "0" {
			t.Fatalf("its cpu.idle is %s while nothing is in force", class)
		}
		s.action(s.name, "{coolDownSeconds: 2, throttle: {cpuThrottle: {idle: true, stepCPURatio: 25, minCPURatio: 50}}}")
		s.allow(s.name, "", s.name)
		s.rule(s.name, rule{action: s.name})
		s.waitKept(s.name)

		s.set(hot)
		s.waitIdleClass(free)
		eventually(t, 20*time.Second, "the status tells that it is throttled", func() error {
			// How far its quota goes down after that depends on what others leave it.
			told := s.throttled(free.name)
			if told == nil || told.Rule != s.name+"/hot" || told.Ratio < 50 || told.FromMillicores != nil {
				return fmt.Errorf("the status says %+v", told)
			}
			return nil
		})
		eventually(t, 20*time.Second, "an event tells that the class came before any quota", func() error {
			all := events(t, "Pod", s.name, free.name)
			if !slices.ContainsFunc(all, func(told string) bool {
				return strings.HasPrefix(told, "PodThrottled: "+s.name+"/hot") && strings.HasSuffix(told, "; CPU unlimited, idle class")
			}) {
				return fmt.Errorf("its events are:\n%s", strings.Join(all, "\n"))
			}
			return nil
		})

		// The kernel gives what stops to be idle class the default weight: this pod's own is another.
		s.set(cold)
		s.waitRestored(30*time.Second, free.folder, free.before)
		s.set(hot)
		s.waitIdleClass(free)
		s.noPolicies()
		s.waitRestored(30*time.Second, free.folder, free.before)
	})
}

// waitIdleClass waits until the kernel has a pod in the idle class.
func (s *scene) waitIdleClass(v *victim) {
	s.Helper()
	eventually(s, 30*time.Second, v.name+" is idle class", func() error {
		read, err := readSettings(s.node, v.folder)
		if err != nil {
			return err
		}
		if class := read["pod/cpu.idle"]; class != "1" {
			return fmt.Errorf("its cpu.idle is %s", class)
		}
		return nil
	})
}

// startWeak runs a pod that is root without capabilities, with something of its own in its environment and its files.
func (s *scene) startWeak(name string) {
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

// takenOver is the agent's own pod with a shell instead of the agent: the same user, capabilities, filters, mounts and token.
func takenOver(spec corev1.PodSpec) corev1.PodSpec {
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

func TestALockedAgentMeasuresItsNodeAndNotItsContainer(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := shared(t, node)
		names := "sed -n 's/^ *\\([^: ]*\\):.*/\\1/p' "
		agents := "/proc/" + processOf(t, node, "agent") + "/root/host/proc/1/net/dev"
		eventually(t, time.Minute, "the agent sees the interfaces of "+node, func() error { // those of pods come and go
			both, err := tryOnNode(node, names+"/proc/1/net/dev; echo =; "+names+agents)
			nodes, seen, _ := strings.Cut(both, "=")
			if err != nil || strings.TrimSpace(nodes) != strings.TrimSpace(seen) || len(strings.Fields(seen)) < 2 {
				return fmt.Errorf("it sees %s of %s (%v)", strings.Fields(seen), strings.Fields(nodes), err)
			}
			return nil
		})

		action := s.name + "-none"
		s.action(action, "{}")
		// Processes of others are out of sight: what has to be known of them is unknown, not 0.
		unknown := s.name + "-queue/hot"
		rules := map[string]rule{ // whose marks are never reached
			"load":  {metric: "cpu_load_1_min", mark: 1_000_000},
			"net":   {metric: "network_receive_pckps", mark: 1_000_000_000},
			"queue": {metric: "container_sched_run_queue_time", mark: 1_000_000_000},
		}
		if onNode(t, node, "cat /proc/pressure/memory || true") != "" {
			rules["psi"] = rule{metric: "memory_pressure_some_avg10", mark: 99}
		}
		for what, r := range rules {
			r.action, r.strategy = action, "Preview"
			s.rule(s.name+"-"+what, r)
		}
		eventually(t, time.Minute, "what can be measured has a value, and what can't is unknown", func() error {
			values := agentMetrics(t, node)
			for what, r := range rules {
				series := fmt.Sprintf(`rule_value{rule="%s-%s/hot",metric="%s"}`, s.name, what, r.metric)
				if value, has := values[series]; (has && !math.IsNaN(value)) != (what != "queue") {
					return fmt.Errorf("%s is %v (%v)", series, value, has)
				}
			}
			now, err := watermarkOf(node)
			if err != nil {
				return err
			}
			for _, rule := range now.Status.Rules {
				if rule.ID == unknown && rule.Unknown == "no sample of it" {
					return nil
				}
			}
			return fmt.Errorf("the status does not say that %s is unknown: %+v", unknown, now.Status.Rules)
		})
	})
}
