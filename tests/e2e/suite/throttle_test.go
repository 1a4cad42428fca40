//go:build e2e

package suite

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// gently throttles to 50 % in two steps, so that the floor is reached soon. Steps are 1 s apart, so that polling sees each.
const gently = "{coolDownSeconds: 2, throttle: {cpuThrottle: {stepCPURatio: 25, minCPURatio: 50}}}"

// victim is a pod to be throttled, with its cgroup and original settings.
type victim struct {
	name      string
	directory string
	before    settings
	quota     int // millicores, once it is throttled
}

func (s *scene) victim(name string) *victim {
	s.Helper()
	directory := s.directory(name)
	return &victim{name: name, directory: directory, before: s.settings(directory)}
}

// throttled is the status entry of a pod of the scene; nil if it is not throttled.
func (s *scene) throttled(pod string) *throttled {
	s.Helper()
	now, err := watermarkOf(s.node)
	if err != nil {
		s.Fatal(err)
	}
	for _, entry := range now.Status.Throttled {
		if entry.Namespace == s.name && entry.Pod == pod {
			return &entry
		}
	}
	return nil
}

// waitRatio waits until a pod is throttled to a percentage, according to the status and the kernel, and returns
// the quota in millicores.
func (s *scene) waitRatio(limit time.Duration, v *victim, ratio int) (quota int) {
	s.Helper()
	eventually(s, limit, fmt.Sprintf("%s is throttled to %d %%", v.name, ratio), func() error {
		reported := s.throttled(v.name)
		if reported == nil || reported.Ratio != ratio || reported.ToMillicores == nil {
			return fmt.Errorf("the status reports %+v", reported)
		}
		read, err := readSettings(s.node, v.directory)
		if err != nil {
			return err
		}
		quota = read.millicores()
		if quota < *reported.ToMillicores-1 || quota > *reported.ToMillicores+1 {
			return fmt.Errorf("the status reports %dm, the kernel %dm", *reported.ToMillicores, quota)
		}
		return nil
	})
	// 100 % is the quota, or the usage at the first step if that was lower.
	if original := v.before.millicores(); original > 0 && (quota > original*ratio/100+1 || quota < original*ratio/200) {
		s.Errorf("%s had %dm, but at %d %% of its base it has %dm", v.name, original, ratio, quota)
	}
	return quota
}

// waitQuota waits until a pod has a quota of this many millicores.
func (s *scene) waitQuota(limit time.Duration, v *victim, millicores int) {
	s.Helper()
	eventually(s, limit, fmt.Sprintf("the quota of %s is %dm", v.name, millicores), func() error { return s.checkQuota(v, millicores) })
}

// checkQuota checks that a pod has a quota of this many millicores.
func (s *scene) checkQuota(v *victim, millicores int) error {
	read, err := readSettings(s.node, v.directory)
	if err != nil {
		return err
	}
	if now := read.millicores(); now < millicores-1 || now > millicores+1 {
		return fmt.Errorf("the quota of %s is %dm, not %dm", v.name, now, millicores)
	}
	return nil
}

// trace reads a pod's quota 5 times a second on the node itself; the returned function stops it and returns the distinct quotas in order.
func (s *scene) trace(v *victim) (end func() []int) {
	s.Helper()
	file := "cpu.max"
	if s.node == "v1" {
		file = "*/cpu.cfs_quota_us" // of its containers, where the limit is
	}
	stop := "/tmp/trace-" + s.name
	onNode(s, s.node, "touch "+stop)
	traced := make(chan string, 1)
	go func() {
		out, _ := tryOnNode(s.node, fmt.Sprintf("cd %s; while [ -e %s ]; do echo $(cat %s); sleep 0.2; done; echo $(cat %s)", v.directory, stop, file, file))
		traced <- out
	}()
	return func() (seen []int) {
		onNode(s, s.node, "rm "+stop)
		for _, line := range strings.Split(<-traced, "\n") {
			sum := 0
			for _, word := range strings.Fields(line) {
				if micros, err := strconv.Atoi(word); err == nil && micros > 2000 { // except for the sandbox's on v1
					sum += micros / 100
				}
				if s.node == "v2" {
					break // the period follows
				}
			}
			if len(seen) == 0 || seen[len(seen)-1] != sum {
				seen = append(seen, sum)
			}
		}
		return seen
	}
}

func TestThrottleStepsDownToFloorAndRestores(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := shared(t, node)
		s.running(
			work{name: "limited", args: []string{"burn"}, limits: "100m", requests: "10m"},
			work{name: "bystander", args: []string{"burn", "50"}, limits: "300m", requests: "20m"},
		)
		limited, bystander := s.victim("limited"), s.victim("bystander")
		s.action(s.name, "{coolDownSeconds: 2, throttle: {cpuThrottle: {stepCPURatio: 20, minCPURatio: 40}}}")
		s.allow(s.name, "limited", s.name)
		s.rule(s.name, rule{action: s.name})
		s.waitRulesEnforced(s.name)
		if free := s.usage(limited.directory, 2*time.Second); free < 70 {
			t.Fatalf("the pod uses only %dm of 100m while nothing is in force", free)
		}

		trace := s.trace(limited)
		s.set(hot)
		quota := s.waitRatio(30*time.Second, limited, 40)
		checkSteps(t, trace(), 100, quota)
		if used := s.usage(limited.directory, 4*time.Second); used > quota*105/100+2 || used < quota*60/100 {
			t.Errorf("at a quota of %dm the pod uses %dm", quota, used)
		}
		if reported := s.throttled("limited"); reported == nil || reported.Rule != s.name+"/hot" || reported.FromMillicores == nil || *reported.FromMillicores != 100 {
			t.Errorf("the status reports %+v", reported)
		}
		if err := checkRestored(bystander.before, s.settings(bystander.directory)); err != nil {
			t.Errorf("a pod that no PodQOS selects was changed: %v", err)
		}

		trace = s.trace(limited)
		s.set(cold)
		s.waitRestored(30*time.Second, limited.directory, limited.before)
		checkSteps(t, trace(), quota, 100)
		if used := s.usage(limited.directory, 2*time.Second); used < 70 {
			t.Errorf("its 100m are restored, but it uses only %dm", used)
		}
		reported := strings.Join(events(t, "Pod", s.name, "limited"), "\n")
		if !strings.Contains(reported, s.name+"/hot") {
			t.Errorf("no event of the pod names the rule:\n%s", reported)
		}
	})
}

// checkSteps checks that quotas change monotonically from start to end, with steps in between.
func checkSteps(t *testing.T, seen []int, start, end int) {
	t.Helper()
	if len(seen) < 4 || seen[0] != start || seen[len(seen)-1] != end {
		t.Errorf("the quota did not change from %dm to %dm in steps: %v", start, end, seen)
	}
	for i := 1; i < len(seen); i++ {
		if (seen[i] > seen[i-1]) != (end > start) {
			t.Errorf("the quotas do not change in one direction: %v", seen)
		}
	}
}

func TestThrottleOfPodWithoutLimitStartsFromItsUsage(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := shared(t, node)
		s.running(work{name: "free", args: []string{"burn", "200"}})
		free := s.victim("free")
		if before := free.before.millicores(); before != -1 {
			t.Fatalf("the pod already has a quota of %dm", before)
		}
		used := s.usage(free.directory, 3*time.Second)
		s.action(s.name, gently)
		s.allow(s.name, "", s.name)
		s.rule(s.name, rule{action: s.name})
		s.waitRulesEnforced(s.name)
		s.set(hot)
		eventually(t, 20*time.Second, "its quota is below its usage", func() error {
			if now := s.settings(free.directory).millicores(); now < 0 || now > used*3/4 {
				return fmt.Errorf("it used %dm, and its quota is %dm", used, now)
			}
			return nil
		})
		quota := s.settings(free.directory).millicores()
		if now := s.usage(free.directory, 4*time.Second); now > quota*108/100+2 {
			t.Errorf("at a quota of %dm the pod uses %dm", quota, now)
		}
		s.set(cold)
		s.waitRestored(20*time.Second, free.directory, free.before)
	})
}

func TestThrottleSurvivesRestartsOnTheNode(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		s.running(
			work{name: "limited", args: []string{"burn", "150"}, limits: "100m", requests: "10m"},
			work{name: "free", args: []string{"burn", "200"}},
		)
		limited, free := s.victim("limited"), s.victim("free")
		s.action(s.name, gently)
		s.allow(s.name, "", s.name)
		s.rule(s.name, rule{action: s.name})
		s.waitRulesEnforced(s.name)
		s.set(hot)
		quota, freeQuota := s.waitRatio(30*time.Second, limited, 50), s.waitRatio(30*time.Second, free, 50)

		if node == "v2" {
			// systemd resets every slice to its own settings: the pod's limit, or none.
			for _, command := range []string{"systemctl daemon-reload", "systemctl daemon-reexec"} {
				seen, end := s.follow(limited)
				onNode(t, node, command)
				eventually(t, 30*time.Second, "the slice is reset, and throttled again", func() error { return quotaRestored(seen(), quota) })
				all := seen()
				end()
				s.checkQuotaRestored(command, all, quota)
				s.waitQuota(5*time.Second, free, freeQuota)
			}
		}
		for _, daemon := range []string{"containerd", "kubelet"} {
			seen, end := s.follow(limited)
			s.restart(daemon)
			always(t, 3*time.Second, "several ticks after "+daemon+" is back the quotas are unchanged", func() error {
				if err := s.checkQuota(limited, quota); err != nil {
					return err
				}
				return s.checkQuota(free, freeQuota)
			})
			all := seen()
			end()
			s.checkQuotaRestored("the restart of "+daemon, all, quota)
		}
		waitNodeReady(t, node)

		// On v2 the quota is set in the pod's cgroup, so it survives the container. On v1 there is none until the new container exists.
		checkStayed := func() {}
		if node == "v2" {
			seen, end := s.follow(limited)
			checkStayed = func() {
				all := seen()
				end()
				s.checkQuotaRestored("the restart of the container", all, quota)
			}
		}
		eventually(t, 60*time.Second, "the kubelet serves exec again, and the container is killed", func() error {
			_, err := tryKubectl("", "exec", "-n", s.name, "limited", "--", "kill", "1")
			return err
		})
		eventually(t, 60*time.Second, "the container is restarted", func() error {
			status := s.pod("limited").Status.ContainerStatuses[0]
			if status.RestartCount == 0 || !status.Ready {
				return fmt.Errorf("restarts: %d, ready: %v", status.RestartCount, status.Ready)
			}
			return nil
		})
		// More than a tick: each check is a command on a node that the new container keeps busy.
		s.waitQuota(5*time.Second, limited, quota)
		checkStayed()

		seen, end := s.follow(limited)
		patch := `{"spec":{"containers":[{"name":"work","resources":{"limits":{"cpu":"200m"}}}]}}`
		_, err := kube.CoreV1().Pods(s.name).Patch(background, "limited", types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, "resize")
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, 60*time.Second, "the kubelet resized the pod", func() error {
			resources := s.pod("limited").Status.ContainerStatuses[0].Resources
			if resources == nil || resources.Limits.Cpu().MilliValue() != 200 {
				return fmt.Errorf("its resources are %v", resources)
			}
			return nil
		})
		// One tick finds the new limit and the next throttles by it; the kubelet may still write to the cgroups, and the status lags.
		eventually(t, 30*time.Second, "the pod is throttled by its new limit", func() error {
			reported := s.throttled("limited")
			if reported == nil || reported.FromMillicores == nil || *reported.FromMillicores != 200 || reported.ToMillicores == nil || *reported.ToMillicores > 100 {
				return fmt.Errorf("the status reports %+v", reported)
			}
			return s.checkQuota(limited, *reported.ToMillicores)
		})
		all := seen()
		end()
		s.checkQuotaRaised("the resize", all, 100)

		s.set(cold)
		s.waitRestored(20*time.Second, free.directory, free.before)
		s.waitQuota(20*time.Second, limited, 200)
		// Compare with a new pod of the same kind.
		s.running(work{name: "like", args: []string{"pause"}, limits: "200m", requests: "10m"})
		s.waitRestored(10*time.Second, limited.directory, s.victim("like").before)
	})
}

// TestCrashLoopingContainerStartsInThrottledPod is for cgroup v1, where the kernel rejects a quota of a container above its
// pod's with EINVAL, so that the kubelet could not start it.
func TestCrashLoopingContainerStartsInThrottledPod(t *testing.T) {
	t.Parallel()
	if !slices.Contains(nodes, "v1") {
		t.Skip("needs the node with cgroup v1")
	}
	s := shared(t, "v1")
	s.startChanged(work{name: "mixed", args: []string{"burn"}, limits: "100m", requests: "10m"}, func(spec *corev1.PodSpec) {
		crash := spec.Containers[0]
		crash.Name, crash.Args = "crash", nil
		crash.Command = []string{"/bin/busybox", "sh", "-c", "/bin/busybox sleep 5; exit 1"}
		spec.Containers = append(spec.Containers, crash)
	})
	s.waitRunning("mixed")
	const full = "10000" // of 100 ms, at a limit of 100m
	var o *baseline
	eventually(t, 60*time.Second, "both containers exist, with their limits", func() error {
		o = s.baseline("mixed")
		quotas := o.before[string(s.pod("mixed").UID)].before["containers/cpu.cfs_quota_us"]
		if strings.Count(quotas, full) != 2 {
			return fmt.Errorf("quotas are %s", quotas)
		}
		return nil
	})
	mixed := o.before[string(s.pod("mixed").UID)]
	_, id, _ := strings.Cut(containerOf(t, s.pod("mixed"), "work").ContainerID, "://")
	// throttled checks that the busy container is below its original quota.
	throttled := func() error {
		quota, err := tryOnNode("v1", "cat "+mixed.directory+"/"+id+"/cpu.cfs_quota_us")
		if err != nil {
			return err
		}
		if micros, err := strconv.Atoi(quota); err != nil || micros <= 0 || micros > 7500 {
			return fmt.Errorf("its quota is %q (%v)", quota, err)
		}
		return nil
	}
	s.action(s.name, gently)
	s.allow(s.name, "mixed", s.name)
	s.rule(s.name, rule{action: s.name})
	s.waitRulesEnforced(s.name)

	s.set(hot)
	eventually(t, 40*time.Second, "the pod is throttled", func() error {
		if reported := s.throttled("mixed"); reported == nil || reported.Ratio != 50 {
			return fmt.Errorf("the status reports %+v", reported)
		}
		return throttled()
	})
	before := containerOf(t, s.pod("mixed"), "crash").RestartCount
	eventually(t, 120*time.Second, "the crashing container is restarted several times", func() error {
		if err := throttled(); err != nil {
			t.Fatalf("the throttle is not in force: %v", err)
		}
		now := containerOf(t, s.pod("mixed"), "crash")
		checkCrashed(t, now)
		if now.RestartCount < before+3 {
			return fmt.Errorf("%d restarts, were %d", now.RestartCount, before)
		}
		return nil
	})
	for _, reported := range events(t, "Pod", s.name, "mixed") {
		if strings.HasPrefix(reported, "Failed: ") {
			t.Errorf("a container could not be started: %s", reported)
		}
	}
	s.set(cold)
	o.waitAllRestored(60 * time.Second)
}

// containerOf is the status of one of a pod's containers.
func containerOf(t *testing.T, pod *corev1.Pod, name string) corev1.ContainerStatus {
	t.Helper()
	for _, status := range pod.Status.ContainerStatuses {
		if status.Name == name {
			return status
		}
	}
	t.Fatalf("%s has no container %s: %+v", pod.Name, name, pod.Status.ContainerStatuses)
	return corev1.ContainerStatus{}
}

// checkCrashed fails the test unless the container exited by itself: it must not fail to start.
func checkCrashed(t *testing.T, now corev1.ContainerStatus) {
	t.Helper()
	if waiting := now.State.Waiting; waiting != nil && slices.Contains([]string{"RunContainerError", "CreateContainerError"}, waiting.Reason) {
		t.Fatalf("the container cannot be started: %+v", waiting)
	}
	for _, ended := range []*corev1.ContainerStateTerminated{now.State.Terminated, now.LastTerminationState.Terminated} {
		if ended != nil && ended.ExitCode != 1 {
			t.Fatalf("the container did not exit by itself: %+v", ended)
		}
	}
}

func waitNodeReady(t *testing.T, node string) {
	t.Helper()
	eventually(t, 60*time.Second, "node "+node+" is Ready", func() error {
		object, err := kube.CoreV1().Nodes().Get(background, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range object.Status.Conditions {
			if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("conditions: %v", object.Status.Conditions)
	})
}
