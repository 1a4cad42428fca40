//go:build e2e

package suite

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
)

// resyncs is longer than a kubelet takes to look at each of its pods again.
const resyncs = 100 * time.Second

// TestKubeletGoesOnWhilePodsAreIdle is for every version of the kubelet: from 1.36 on it reads cgroups back, and the idle class would make it
// reject every new pod with a CPU request.
func TestKubeletGoesOnWhilePodsAreIdle(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		reads := s.kubeletReadsCgroups()
		batch := work{name: "batch", args: []string{"burn", "100"}, requests: "50m", limits: "200m"}
		s.running(batch)
		pods := []string{"batch"}
		if reads {
			s.startChanged(work{name: "whole", args: []string{"burn", "100"}}, podLevel)
			s.waitRunning("whole")
			pods = append(pods, "whole")
		}
		victims, requests := map[string]*victim{}, map[string]string{}
		for _, name := range pods {
			victims[name] = s.victim(name)
			requests[name] = s.reportedRequest(name)
		}
		s.action(s.name, "{coolDownSeconds: 2, throttle: {cpuThrottle: {idle: true, stepCPURatio: 25, minCPURatio: 50}}}")
		for _, name := range pods {
			s.allow(s.name+"-"+name, name, s.name)
		}
		s.rule(s.name, rule{action: s.name})
		s.waitRulesEnforced(s.name)
		s.set(hot)
		for _, name := range pods {
			s.waitYields(victims[name], reads)
		}
		if reads {
			eventually(s, 30*time.Second, "the status says that the idle class is unsafe here", func() error { return s.checkIdleUnsafe() })
		}

		s.running(work{name: "new", args: []string{"pause"}, requests: "100m", limits: "100m"})
		s.resize("batch", "60m")
		s.waitYields(victims["batch"], reads)
		s.restart("kubelet")
		waitNodeReady(t, node)
		s.running(work{name: "later", args: []string{"pause"}, requests: "100m", limits: "100m"})
		// A kubelet reads the cgroups of each pod when it starts.
		always(t, 10*time.Second, "the kubelet reports requests that the node has", func() error { return s.checkRequests(pods) })
		for _, name := range append(pods, "new") {
			if status := s.pod(name).Status.ContainerStatuses[0]; status.RestartCount != 0 || !status.Ready {
				t.Errorf("%s did not go on while the kubelet restarted: %+v", name, status)
			}
		}
		for _, name := range pods {
			s.waitYields(victims[name], reads)
		}

		s.set(cold)
		like := batch
		like.name, like.args, like.requests = "like", []string{"pause"}, "60m"
		s.running(like)
		victims["batch"].before = s.victim("like").before
		for _, name := range pods {
			s.waitRestored(60*time.Second, victims[name].directory, victims[name].before)
			eventually(s, 2*resyncs, "the kubelet reports the request of "+name+" as of an untouched pod", func() error {
				untouched := requests[name]
				if name == "batch" { // It was resized.
					untouched = s.reportedRequest("like")
				}
				if now := s.reportedRequest(name); now != untouched {
					return fmt.Errorf("it is %q, not %q", now, untouched)
				}
				return nil
			})
		}
	})
}

// podLevel gives a pod resources of its own, and its container none.
func podLevel(spec *corev1.PodSpec) {
	resources := func(cpu string) corev1.ResourceList {
		return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse("32Mi")}
	}
	spec.Resources = &corev1.ResourceRequirements{Requests: resources("50m"), Limits: resources("200m")}
}

// kubeletReadsCgroups is whether the node's kubelet reports the resources of pods as it finds them in cgroups.
func (s *scene) kubeletReadsCgroups() bool {
	s.Helper()
	node, err := kube.CoreV1().Nodes().Get(background, s.node, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	version := node.Status.NodeInfo.KubeletVersion
	minor, err := strconv.Atoi(strings.Split(version, ".")[1])
	if err != nil {
		s.Fatal(version, err)
	}
	s.Logf("node %s has kubelet %s", s.node, version)
	return minor >= 36
}

// reportedRequest is the CPU request in status.resources; empty if the kubelet reports none.
func (s *scene) reportedRequest(name string) string {
	s.Helper()
	reported := s.pod(name).Status.Resources
	if reported == nil {
		return ""
	}
	return reported.Requests.Cpu().String()
}

// checkRequests checks that no pod is reported to request more than the node has.
func (s *scene) checkRequests(pods []string) error {
	for _, name := range pods {
		reported := s.pod(name).Status.Resources
		if reported != nil && reported.Requests.Cpu().MilliValue() > 2000 {
			return fmt.Errorf("%s requests %s", name, reported.Requests.Cpu())
		}
	}
	return nil
}

// waitYields waits until a pod runs only when others leave CPU: in the idle class, or where that is unsafe with the lowest weight and a quota.
func (s *scene) waitYields(v *victim, unsafe bool) {
	s.Helper()
	wanted := map[string]string{"pod/cpu.idle": "1"}
	if unsafe {
		wanted = map[string]string{"pod/cpu.idle": "0", "pod/cpu.weight": "1"}
	}
	eventually(s, 60*time.Second, v.name+" runs only when others leave CPU", func() error {
		read, err := readSettings(s.node, v.directory)
		if err != nil {
			return err
		}
		for file, value := range wanted {
			if read[file] != value {
				return fmt.Errorf("%s is %q, not %s", file, read[file], value)
			}
		}
		if original := v.before.millicores(); unsafe && (read.millicores() < 0 || read.millicores() >= original) {
			return fmt.Errorf("its quota was %dm, and is %dm", original, read.millicores())
		}
		return nil
	})
}

// checkIdleUnsafe checks the condition that says why the idle class is not used.
func (s *scene) checkIdleUnsafe() error {
	object, err := objects.Resource(nodeWatermarks).Get(background, s.node, metav1.GetOptions{})
	if err != nil {
		return err
	}
	conditions, _, _ := unstructured.NestedSlice(object.Object, "status", "conditions")
	for _, condition := range conditions {
		if condition, ok := condition.(map[string]any); ok && condition["reason"] == "IdleUnsafe" && condition["status"] == "False" {
			return nil
		}
	}
	return errors.New("no condition has the reason IdleUnsafe")
}

// resize changes the CPU request of a pod's container and waits until the kubelet has done it.
func (s *scene) resize(name, request string) {
	s.Helper()
	patch := fmt.Sprintf(`{"spec":{"containers":[{"name":"work","resources":{"requests":{"cpu":%q}}}]}}`, request)
	_, err := kube.CoreV1().Pods(s.name).Patch(background, name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, "resize")
	if err != nil {
		s.Fatal(err)
	}
	eventually(s, 2*resyncs, "the kubelet resized "+name, func() error {
		status := s.pod(name).Status
		for _, condition := range status.Conditions {
			if condition.Type == corev1.PodResizePending || condition.Type == corev1.PodResizeInProgress {
				return fmt.Errorf("%s: %s", condition.Type, condition.Message)
			}
		}
		resources := status.ContainerStatuses[0].Resources
		if resources == nil || resources.Requests.Cpu().String() != request {
			return fmt.Errorf("its resources are %v", resources)
		}
		return nil
	})
}
