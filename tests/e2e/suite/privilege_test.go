//go:build e2e

package suite

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// escape is a shell that was got in the agent's place: it says of each attempt whether it left its container, and of the one thing that
// it is there for whether it can do it. $TREES are the cgroup trees that it may read, $PODS the parts of them that it may write.
const escape = `
b=/bin/busybox
try() { what=$1; shift; if "$@" >/dev/null 2>&1; then echo "left: $what"; else echo "held: $what"; fi; }
write() { echo "$1" >"$2"; }
again() { write "$(cat "$1")" "$1"; }
own() { : >/var/lib/plimsoll/left; "$@" /var/lib/plimsoll/left; code=$?; $b rm -f /var/lib/plimsoll/left; return $code; }
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
try "ask the kernel for help" write h /host/proc/sysrq-trigger
try "mount a file system" $b mount -t tmpfs none /tmp
try "mount the root to write" $b mount -o remount,rw /
try "take a mount away" $b umount -l /host/proc
try "be root of a user namespace" $b unshare -U true
try "get a mount namespace" $b unshare -m true
try "get a network namespace" $b unshare -n true
try "enter the node's mounts" $b nsenter --mount=/host/proc/1/ns/mnt true
try "enter the node's network" $b nsenter --net=/host/proc/1/ns/net true
try "see the node's files" ls /host/proc/1/root/
try "see what a process of the node has open" $b readlink /host/proc/1/fd/0
try "read the environment of a process of the node" cat /host/proc/1/environ
try "read the memory of a process of the node" head -c 1 /host/proc/1/mem
try "read the memory of the node" head -c 1 /host/proc/kcore
try "change its root" $b chroot / /bin/true
try "make a device" device
try "give a file away" own $b chown 1000
try "name the node" $b hostname left
try "load a module" $b insmod /bin/busybox
try "find a runtime's socket" ls /run/containerd /run/crio /run/docker.sock /var/run/docker.sock
for pods in $PODS; do
  for file in $pods/cpu.weight $pods/cpu.shares; do
    [ ! -e $file ] || if again $file; then echo "able: set $file"; else echo "unable: set $file"; fi
  done
done
echo end
`

func TestWhoeverTakesOverAnAgentCannotLeaveItsContainer(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		needShell(t) // and the tools' image
		shared(t, node)
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
		for _, line := range strings.Split(said, "\n") {
			if strings.HasPrefix(line, "left: ") || strings.HasPrefix(line, "unable: ") {
				t.Error(line)
			}
		}
	})
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
