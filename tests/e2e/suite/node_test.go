//go:build e2e

package suite

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// watermark has the fields of a NodeWatermark that the tests read.
type watermark struct {
	Spec struct {
		Hash  string
		Rules []struct {
			ID        string
			Watermark float64
		}
	}
	Status struct {
		ObservedHash string
		Rules        []struct {
			ID, Metric, Strategy, State string
			Value                       *float64
			Mark                        float64
			Since                       *metav1.Time
			Unknown                     string
		}
		Scheduling struct {
			State string
			Rules []string
		}
		Throttled []throttled
		Evictions []struct{ Namespace, Pod, Rule, Outcome string }
		Would     []struct{ Rule, What, Namespace, Pod, How string }
		Refused   []struct{ What, Pod, Rule, Reason string }
		Counts    struct{ Rules, Breached, Throttled, EvictedLastHour, Would int }
	}
}

type throttled struct {
	Namespace, Pod, Rule         string
	Ratio                        int
	FromMillicores, ToMillicores *int
}

var nodeWatermarks = schema.GroupVersionResource{Group: "plimsoll.dev", Version: "v1alpha1", Resource: "nodewatermarks"}

// watermarkOf reads a node's NodeWatermark.
func watermarkOf(node string) (watermark, error) {
	var read watermark
	object, err := objects.Resource(nodeWatermarks).Get(background, node, metav1.GetOptions{})
	if err != nil {
		return read, err
	}
	text, err := object.MarshalJSON()
	if err != nil {
		return read, err
	}
	return read, json.Unmarshal(text, &read)
}

// row is a node's line of `kubectl get nodewatermark`, by column name.
func row(node string) (shown map[string]string, err error) {
	out, err := tryKubectl("", "get", "nodewatermark", node)
	if err != nil {
		return nil, err
	}
	header, line, _ := strings.Cut(out, "\n")
	columns := regexp.MustCompile(`\S+`).FindAllStringIndex(header, -1)
	shown = map[string]string{}
	for i, column := range columns { // cells may be empty and start where their header does
		end := len(line)
		if i+1 < len(columns) {
			end = min(end, columns[i+1][0])
		}
		shown[header[column[0]:column[1]]] = strings.TrimSpace(line[min(column[0], end):end])
	}
	return shown, nil
}

// checkRow checks that kubectl shows this scheduling state and at least these counts.
func checkRow(node, scheduling string, minimums map[string]int) error {
	shown, err := row(node)
	if err != nil {
		return err
	}
	if shown["SCHEDULING"] != scheduling {
		return fmt.Errorf("scheduling is shown as %q, not %s: %v", shown["SCHEDULING"], scheduling, shown)
	}
	for column, minimum := range minimums {
		if count, err := strconv.Atoi(shown[column]); err != nil || count < minimum {
			return fmt.Errorf("%s is %q, not %d or more: %v", column, shown[column], minimum, shown)
		}
	}
	return nil
}

// checkBreached checks that the status shows the scene's metric above the threshold of a NodeQOS since about this time.
func (s *scene) checkBreached(nodeQOS string, about time.Time) error {
	now, err := watermarkOf(s.node)
	if err != nil {
		return err
	}
	for _, rule := range now.Status.Rules {
		if rule.ID != nodeQOS+"/hot" {
			continue
		}
		if rule.State != "Breached" || rule.Metric != s.metric() || rule.Value == nil || *rule.Value != hot || rule.Mark != threshold {
			return fmt.Errorf("the rule is %+v", rule)
		}
		// By the node's clock, which may be some seconds off.
		if rule.Since == nil || rule.Since.Sub(about).Abs() > time.Minute {
			return fmt.Errorf("Since is %v, but the breach began at %v", rule.Since, about)
		}
		return nil
	}
	return fmt.Errorf("no rule of %s among %v", nodeQOS, now.Status.Rules)
}

// checkRefused checks that the status gives this reason why a rule skipped a pod of the scene, or all pods if pod is empty.
func (s *scene) checkRefused(what, pod, nodeQOS, words string) error {
	now, err := watermarkOf(s.node)
	if err != nil {
		return err
	}
	full := pod
	if pod != "" {
		full = s.name + "/" + pod
	}
	for _, entry := range now.Status.Refused {
		if entry.What == what && entry.Pod == full && entry.Rule == nodeQOS+"/hot" && strings.Contains(entry.Reason, words) {
			return nil
		}
	}
	return fmt.Errorf("%s of %s for %q is not among %+v", what, pod, words, now.Status.Refused)
}

// waitRulesEnforced waits until the agent reports that it enforces the current rules, including one of this NodeQOS.
func (s *scene) waitRulesEnforced(nodeQOS string) {
	s.Helper()
	eventually(s, 20*time.Second, "the agent enforces "+nodeQOS, func() error {
		now, err := watermarkOf(s.node)
		if err != nil {
			return err
		}
		if now.Spec.Hash != now.Status.ObservedHash {
			return fmt.Errorf("the hash of the spec is %s, but the agent enforces %s", now.Spec.Hash, now.Status.ObservedHash)
		}
		for _, rule := range now.Status.Rules {
			if rule.ID == nodeQOS+"/hot" {
				return nil
			}
		}
		return fmt.Errorf("no rule of %s among %v", nodeQOS, now.Status.Rules)
	})
}

// agentPod is the name of the agent's pod on a node, empty if there is none.
func agentPod(node string) string {
	list, err := kube.CoreV1().Pods(namespace).List(background, metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/component=agent", FieldSelector: "spec.nodeName=" + node})
	if err != nil {
		return ""
	}
	for _, pod := range list.Items {
		if pod.DeletionTimestamp == nil {
			return pod.Name
		}
	}
	return ""
}

// taint is our taint on a node, or nil.
func taint(node string) (*corev1.Taint, error) {
	object, err := kube.CoreV1().Nodes().Get(background, node, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	for _, taint := range object.Spec.Taints {
		if taint.Key == taintKey {
			return &taint, nil
		}
	}
	return nil, nil
}

func (s *scene) waitTaint(limit time.Duration, effect corev1.TaintEffect) {
	s.Helper()
	eventually(s, limit, "the node is tainted", func() error {
		found, err := taint(s.node)
		if err != nil {
			return err
		}
		if found == nil || found.Effect != effect {
			return fmt.Errorf("taint is %v", found)
		}
		return nil
	})
}

func (s *scene) waitNoTaint(limit time.Duration) {
	s.Helper()
	eventually(s, limit, "the taint is gone", func() error {
		found, err := taint(s.node)
		if err == nil && found != nil {
			err = fmt.Errorf("taint is %v", found)
		}
		return err
	})
}

// directory is the pod's cgroup on its node: on cgroup v1 in the cpu hierarchy.
func (s *scene) directory(pod string) string {
	s.Helper()
	return s.directoryOf(s.name, pod, "cpu")
}

// directoryOf is the cgroup of any pod of the scene's node: on cgroup v1 in this controller's hierarchy.
func (s *scene) directoryOf(namespace, pod, controller string) string {
	s.Helper()
	needShell(s)
	below, err := run("", clusterTool, "cgroup", namespace+"/"+pod)
	if err != nil {
		s.Fatal(err)
	}
	if s.node == "v1" {
		return "/sys/fs/cgroup/" + controller + "/" + below
	}
	return "/sys/fs/cgroup/" + below
}

// settings are the CPU settings of a pod's cgroup and of its containers' cgroups, as `pod/FILE` and `containers/FILE`,
// the values of the latter sorted: a restarted container has a new name.
type settings map[string]string

const settingFiles = "cpu.max cpu.max.burst cpu.weight cpu.idle cpu.cfs_quota_us cpu.cfs_period_us cpu.cfs_burst_us cpu.shares memory.high"

func (s *scene) settings(directory string) settings {
	s.Helper()
	read, err := readSettings(s.node, directory)
	if err != nil {
		s.Fatal(err)
	}
	return read
}

// readSettings reads the settings of a pod's cgroup directory on a node.
func readSettings(node, directory string) (settings, error) {
	out, err := tryOnNode(node, fmt.Sprintf("cd %s && for file in %s; do grep -sH '' $file */$file; done; true", directory, settingFiles))
	if err != nil {
		return nil, err
	}
	containers, read := map[string][]string{}, settings{}
	for _, line := range strings.Split(out, "\n") {
		path, value, ok := strings.Cut(line, ":")
		if !ok {
			return nil, fmt.Errorf("no settings in %s: %q", directory, out)
		}
		if below := strings.LastIndex(path, "/"); below >= 0 {
			containers[path[below+1:]] = append(containers[path[below+1:]], value)
		} else {
			read["pod/"+path] = value
		}
	}
	for name, values := range containers {
		slices.Sort(values)
		read["containers/"+name] = strings.Join(values, ", ")
	}
	return read, nil
}

// millicores is the resulting CPU quota: the lower of the pod's quota and the sum of its containers' quotas,
// -1 if there is none. On v1 the sandbox is a container too; when throttled it has the smallest quota.
func (s settings) millicores() int {
	lowest := -1
	for _, level := range []string{"pod/", "containers/"} {
		sum := -1
		add := func(quota, period string) {
			if micros, err := strconv.Atoi(quota); err == nil && micros > 0 {
				length, _ := strconv.Atoi(period)
				if smallest := 2000; level == "containers/" && micros == smallest {
					return
				}
				sum = max(0, sum) + micros*1000/max(1, length)
			}
		}
		for _, value := range strings.Split(s[level+"cpu.max"], ", ") { // v2
			quota, period, _ := strings.Cut(value, " ")
			add(quota, period)
		}
		for _, value := range strings.Split(s[level+"cpu.cfs_quota_us"], ", ") { // v1; kubelets leave the period at 100 ms
			add(value, "100000")
		}
		if sum >= 0 && (lowest < 0 || sum < lowest) {
			lowest = sum
		}
	}
	return lowest
}

// checkRestored returns an error that lists the settings that differ from before.
func checkRestored(before, now settings) error {
	if maps.Equal(before, now) {
		return nil
	}
	var changed []string
	for name, value := range now {
		if before[name] != value {
			changed = append(changed, fmt.Sprintf("%s was %q, is %q", name, before[name], value))
		}
	}
	return fmt.Errorf("not restored: %s", strings.Join(changed, "; "))
}

// waitRestored waits until a pod's settings are as before.
func (s *scene) waitRestored(limit time.Duration, directory string, before settings) {
	s.Helper()
	eventually(s, limit, directory+" is restored", func() error {
		now, err := readSettings(s.node, directory)
		if err != nil {
			return err
		}
		return checkRestored(before, now)
	})
}

// usage measures what a cgroup uses, in millicores.
func (s *scene) usage(directory string, length time.Duration) int {
	s.Helper()
	file, unit := directory+"/cpu.stat", 1000
	if s.node == "v1" {
		file, unit = strings.Replace(directory, "/cgroup/cpu/", "/cgroup/cpuacct/", 1)+"/cpuacct.usage", 1
	}
	read := fmt.Sprintf("set -- $(head -n 1 %s); for last; do :; done; echo $last $(date +%%s%%N)", file)
	out := onNode(s, s.node, fmt.Sprintf("%s; sleep %.1f; %s", read, length.Seconds(), read))
	numbers := make([]int, 4)
	if _, err := fmt.Sscan(out, &numbers[0], &numbers[1], &numbers[2], &numbers[3]); err != nil {
		s.Fatalf("%q: %v", out, err)
	}
	return (numbers[2] - numbers[0]) * unit * 1000 / (numbers[3] - numbers[1])
}
