//go:build e2e

package chart

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// podsOf are the rendered Pods and pod templates, by kind and name.
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

// hostPaths are a pod's hostPath mounts, with `w` if writable.
func hostPaths(spec corev1.PodSpec) (paths []string) {
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

func TestPodsMountOnlyWhatTheyNeed(t *testing.T) {
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
		if paths := strings.Join(hostPaths(spec), " "); paths != want[name] {
			t.Errorf("%s mounts these paths of its node: %s", name, paths)
		}
	}
	if len(found) != len(want) {
		t.Errorf("the chart renders %d kinds of pods, not %d", len(found), len(want))
	}
	if _, err := render(t, "--values", file, "--set", "restoreNode=worker-1"); err == nil ||
		!strings.Contains(err.Error(), "restoreLayout must be the layout of node worker-1: one of v2, v2-cgroupfs, v1") {
		t.Errorf("the error does not name the three layouts: %v", err)
	}
}

// TestPodTokensExpireWithinAnHour: automatically mounted ones are valid for a year, since API servers extend exactly those of 3607 s.
func TestPodTokensExpireWithinAnHour(t *testing.T) {
	rendered, err := render(t, "--set", "restoreNode=worker-1,placement.scheduler.enabled=true")
	if err != nil {
		t.Fatal(err)
	}
	const directory = "/var/run/secrets/kubernetes.io/serviceaccount"
	pods := podsOf(t, rendered)
	for name, spec := range pods {
		if mounted := spec.AutomountServiceAccountToken; mounted == nil || *mounted {
			t.Errorf("%s: its token is mounted automatically", name)
		}
		volumes := map[string]string{}
		for _, mount := range spec.Containers[0].VolumeMounts {
			volumes[mount.Name] = mount.MountPath
		}
		files := []string{}
		for _, volume := range spec.Volumes {
			if volume.Projected == nil {
				continue
			}
			for _, source := range volume.Projected.Sources {
				token := source.ServiceAccountToken
				if token != nil && (token.ExpirationSeconds == nil || *token.ExpirationSeconds != 3600) {
					t.Errorf("%s: the token of volume %s does not expire after an hour", name, volume.Name)
				}
				if volumes[volume.Name] != directory {
					continue
				}
				switch {
				case token != nil:
					files = append(files, token.Path)
				case source.ConfigMap != nil:
					files = append(files, source.ConfigMap.Items[0].Path)
				case source.DownwardAPI != nil:
					files = append(files, source.DownwardAPI.Items[0].Path)
				}
			}
		}
		if slices.Sort(files); fmt.Sprint(files) != "[ca.crt namespace token]" {
			t.Errorf("%s: unexpected files in %s: %v", name, directory, files)
		}
	}
	if len(pods) != 4 {
		t.Errorf("the chart renders %d kinds of pods, not 4", len(pods))
	}
}

func TestOpenShiftAccountsMayRunTheirPods(t *testing.T) {
	constraints := func(args ...string) (found []string) {
		t.Helper()
		rendered, err := render(t, args...)
		if err != nil {
			t.Fatal(err)
		}
		for _, object := range objects(t, rendered) {
			role, _, _ := unstructured.NestedString(object.Object, "roleRef", "name")
			if _, name, is := strings.Cut(role, "system:openshift:scc:"); is {
				subjects := object.Object["subjects"].([]any)
				for _, subject := range subjects {
					found = append(found, fmt.Sprint(object.GetKind(), " ", name, " ", subject.(map[string]any)["name"]))
				}
			}
		}
		slices.Sort(found)
		return found
	}
	want := []string{"RoleBinding nonroot-v2 plimsoll-controller", "RoleBinding nonroot-v2 plimsoll-policies", "RoleBinding nonroot-v2 plimsoll-test",
		"RoleBinding nonroot-v2 plimsoll-uninstall", "RoleBinding privileged plimsoll-agent"}
	if found := constraints("--api-versions", "security.openshift.io/v1"); !slices.Equal(found, want) {
		t.Errorf("on OpenShift the role bindings are %v", found)
	}
	withScheduler := constraints("--api-versions", "security.openshift.io/v1", "--set", "placement.scheduler.enabled=true")
	if want := slices.Insert(want, 2, "RoleBinding nonroot-v2 plimsoll-scheduler"); !slices.Equal(withScheduler, want) {
		t.Errorf("on OpenShift the role bindings with the second scheduler are %v", withScheduler)
	}
	if found := constraints(); len(found) != 0 {
		t.Errorf("on other clusters there are role bindings for OpenShift: %v", found)
	}
}

func TestAgentsHaveConfiguredSELinuxLabels(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, ""},
		{[]string{"--set", "agent.seLinuxOptions.type=spc_t"}, "spc_t"},
		{[]string{"--api-versions", "security.openshift.io/v1"}, "spc_t"},
		{[]string{"--api-versions", "security.openshift.io/v1", "--set", "agent.seLinuxOptions.type=mine_t"}, "mine_t"},
		{[]string{"--api-versions", "security.openshift.io/v1", "--set", "agent.securityContext.seLinuxOptions.type=mine_t"}, "mine_t"},
	} {
		rendered, err := render(t, append(c.args, "--set", "restoreNode=worker-1")...)
		if err != nil {
			t.Fatal(err)
		}
		agents := 0
		for name, spec := range podsOf(t, rendered) {
			got, options := "", spec.Containers[0].SecurityContext.SELinuxOptions
			if options != nil {
				got = options.Type
			}
			if want := map[bool]string{true: c.want}[strings.Contains(name, "-agent-")]; got != want {
				t.Errorf("%v: the SELinux type of %s is %q", c.args, name, got)
			}
			agents += map[bool]int{true: 1}[strings.Contains(name, "-agent-")]
		}
		if agents != 2 {
			t.Errorf("%v: the chart renders %d kinds of agent pods, not 2", c.args, agents)
		}
	}
}
