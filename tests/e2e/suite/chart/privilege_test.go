//go:build e2e

package chart

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// podsOf are the Pods and the templates of Pods among what was rendered, by kind and name.
func podsOf(t *testing.T, rendered string) map[string]corev1.PodSpec {
	t.Helper()
	found := map[string]corev1.PodSpec{}
	for _, object := range objects(t, rendered) {
		path := []string{"spec", "template", "spec"}
		if object.GetKind() == "Pod" {
			path = path[:1]
		}
		read, isPod, _ := unstructured.NestedMap(object.Object, path...)
		if !isPod {
			continue
		}
		var spec corev1.PodSpec
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(read, &spec); err != nil {
			t.Fatal(err)
		}
		found[object.GetKind()+" "+object.GetName()] = spec
	}
	return found
}

// ofTheNode are the paths of the node that a pod has, each with a `w` where it may write there.
func ofTheNode(spec corev1.PodSpec) (paths []string) {
	for _, volume := range spec.Volumes {
		if volume.HostPath == nil {
			continue
		}
		for _, mount := range spec.Containers[0].VolumeMounts {
			if mount.Name == volume.Name {
				paths = append(paths, volume.HostPath.Path+map[bool]string{true: "", false: " w"}[mount.ReadOnly])
			}
		}
	}
	slices.Sort(paths)
	return paths
}

func TestPodsHaveOfTheirNodesWhatTheyNeedAndNothingElse(t *testing.T) {
	file := combinations(t)["nodes"]
	v1 := "/sys/fs/cgroup/cpu /sys/fs/cgroup/cpu/kubepods w /sys/fs/cgroup/cpuacct /sys/fs/cgroup/cpuacct/kubepods w " +
		"/sys/fs/cgroup/memory /sys/fs/cgroup/memory/kubepods w /var/lib/plimsoll w"
	want := map[string]string{
		"DaemonSet plimsoll-agent-v2":          "/proc/1/net/dev /sys/fs/cgroup /sys/fs/cgroup/kubepods.slice w /var/lib/plimsoll w",
		"DaemonSet plimsoll-agent-v2-cgroupfs": "/proc/1/net/dev /sys/fs/cgroup /sys/fs/cgroup/kubelet/kubepods w /var/lib/plimsoll w",
		"DaemonSet plimsoll-agent-v1":          "/proc/1/net/dev " + v1,
		"Pod plimsoll-agent-restore-worker-1":  v1,
		"Deployment plimsoll-controller":       "",
	}
	rendered, err := render(t, "--values", file, "--set", "restoreNode=worker-1,restoreLayout=v1")
	if err != nil {
		t.Fatal(err)
	}
	found := podsOf(t, rendered)
	for name, spec := range found {
		if paths := strings.Join(ofTheNode(spec), " "); paths != want[name] {
			t.Errorf("%s has of its node %s", name, paths)
		}
	}
	if len(found) != len(want) {
		t.Errorf("%d kinds of pods, not %d", len(found), len(want))
	}
	if _, err := render(t, "--values", file, "--set", "restoreNode=worker-1"); err == nil ||
		!strings.Contains(err.Error(), "restoreLayout: name the layout of node worker-1, one of v2, v2-cgroupfs, v1") {
		t.Errorf("of three layouts none is named: %v", err)
	}
}
