//go:build e2e

package suite

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// nodeView has the parts of the Node that Preview must not change.
func nodeView(t *testing.T, node string) string {
	t.Helper()
	object, err := kube.CoreV1().Nodes().Get(background, node, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var conditions []string
	for _, condition := range object.Status.Conditions {
		conditions = append(conditions, fmt.Sprint(condition.Type, condition.Status))
	}
	text, err := json.Marshal([]any{object.Spec, object.Labels, conditions})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestPreviewChangesNothingAndNamesTheLaterActions(t *testing.T) {
	onEachNode(t, func(t *testing.T, node string) {
		s := alone(t, node)
		s.running(work{name: "slowed", args: []string{"burn", "100"}, limits: "150m", requests: "20m", labels: map[string]string{"job": "batch"}})
		moved := s.owned(work{name: "moved", args: []string{"burn", "30"}, requests: "10m"})[0]
		slowed, other := s.victim("slowed"), s.victim(moved)
		before := nodeView(t, node)

		throttle, evict := s.name+"-throttle", s.name+"-evict"
		s.action(throttle, "{coolDownSeconds: 2, throttle: {cpuThrottle: {stepCPURatio: 10, minCPURatio: 90}}}")
		s.action(evict, "{coolDownSeconds: 2, eviction: {terminationGracePeriodSeconds: 1}}")
		for action, app := range map[string]string{throttle: "slowed", evict: "moved"} {
			s.allow(action, app, action)
		}
		s.rule(throttle, rule{action: throttle, strategy: "Preview"})
		s.rule(evict, rule{action: evict, strategy: "Preview"})
		s.waitRulesEnforced(throttle)
		s.waitRulesEnforced(evict)
		s.set(hot)

		earlier := agentMetrics(t, node)
		would, how := map[string]string{}, map[string]string{}
		eventually(t, 20*time.Second, "the status reports what each rule would do", func() error {
			now, err := watermarkOf(node)
			if err != nil {
				return err
			}
			for _, entry := range now.Status.Would {
				would[entry.Rule+" "+entry.What] = entry.Namespace + "/" + entry.Pod
				how[entry.What] = entry.How
			}
			for key, pod := range map[string]string{
				throttle + "/hot throttle": s.name + "/slowed", evict + "/hot evict": s.name + "/" + moved} {
				if would[key] != pod {
					return fmt.Errorf("%s would act on %q, not %s; all: %v", key, would[key], pod, now.Status.Would)
				}
			}
			if _, ok := would[evict+"/hot disableScheduling"]; !ok || how["disableScheduling"] != string(corev1.TaintEffectNoSchedule) {
				return fmt.Errorf("the status does not report that scheduling would be disabled, or not how: %v", now.Status.Would)
			}
			return nil
		})
		always(t, 5*time.Second, "nothing changes", func() error {
			if err := s.alive(moved); err != nil {
				return err
			}
			for _, v := range []*victim{slowed, other} {
				if err := checkRestored(v.before, s.settings(v.directory)); err != nil {
					return err
				}
			}
			if now := nodeView(t, node); now != before {
				return fmt.Errorf("the node was %s, is %s", before, now)
			}
			return nil
		})
		for _, wanted := range []struct{ kind, ns, name, reason, rule string }{
			{"Pod", s.name, "slowed", "WouldThrottle", throttle},
			{"Pod", s.name, moved, "WouldEvict", evict},
			{"Node", "", node, "WouldDisableScheduling", evict},
		} {
			s.waitRuleEvent(wanted.kind, wanted.ns, wanted.name, wanted.reason, wanted.rule)
		}
		// The counters of writes may lag behind the requests.
		eventually(t, 15*time.Second, "only events and the status were written", func() error {
			now := agentMetrics(t, node)
			grew := func(name string) float64 { return now[name] - earlier[name] }
			creates, patches := grew(`api_requests_total{verb="create",code="201"}`), grew(`api_requests_total{verb="patch",code="200"}`)
			if events, writes := grew(`events_total{result="written"}`), grew(`status_writes_total{result="done"}`); creates > events || patches > writes {
				return fmt.Errorf("%v creates for %v events, %v patches for %v status writes", creates, events, patches, writes)
			}
			if grew(`evictions_total{outcome="accepted"}`) != 0 || now[`would{rule="`+throttle+`/hot"}`] != 1 {
				return fmt.Errorf("the metrics do not show what would be done: %v", now)
			}
			return nil
		})

		// The same rules, enforced.
		s.rule(throttle, rule{action: throttle})
		s.rule(evict, rule{action: evict})
		s.waitTerminating(20*time.Second, moved)
		s.waitTaint(5*time.Second, corev1.TaintEffectNoSchedule)
		s.waitRuleEvent("Pod", s.name, moved, "PodEvicted", evict)
		s.waitRuleEvent("Node", "", node, "SchedulingDisabled", evict)
		eventually(t, 20*time.Second, "the pod is throttled as the preview said", func() error {
			reported := s.throttled("slowed")
			if reported == nil || reported.Rule != throttle+"/hot" || reported.ToMillicores == nil {
				return fmt.Errorf("the status reports %+v", reported)
			}
			// Predicted as `to 90 %, 123m`, from the pod's usage at that time.
			var ratio, millicores int
			if _, err := fmt.Sscanf(how["throttle"], "to %d %%, %dm", &ratio, &millicores); err != nil {
				t.Fatalf("the preview was %q: %v", how["throttle"], err)
			}
			if reported.Ratio != ratio || *reported.ToMillicores < millicores*8/10 || *reported.ToMillicores > millicores*12/10 {
				t.Fatalf("the preview was %q, but it became %d %%, %dm", how["throttle"], reported.Ratio, *reported.ToMillicores)
			}
			return checkRow(node, "NoSchedule", map[string]int{"BREACHED": 2, "THROTTLED": 1})
		})
		s.set(cold)
		s.waitRestored(20*time.Second, slowed.directory, slowed.before)
		s.waitNoTaint(20 * time.Second)
	})
}

// waitRuleEvent waits until an event about an object, with this reason, names the rule of a NodeQOS.
func (s *scene) waitRuleEvent(kind, ns, name, reason, nodeQOS string) {
	s.Helper()
	eventually(s, 15*time.Second, fmt.Sprintf("%s of %s %s for %s is reported", reason, kind, name, nodeQOS), func() error {
		all := events(s, kind, ns, name)
		for _, event := range all {
			if strings.HasPrefix(event, reason+": ") && strings.Contains(event, nodeQOS+"/hot") {
				return nil
			}
		}
		return fmt.Errorf("its events are:\n%s", strings.Join(all, "\n"))
	})
}

// agentMetrics reads the metrics of a node's agent, by name without the prefix plimsoll_agent_, and with labels.
func agentMetrics(t *testing.T, node string) map[string]float64 {
	t.Helper()
	path := "/api/v1/namespaces/" + namespace + "/pods/" + agentPod(node) + ":8080/proxy/metrics"
	text, err := kube.CoreV1().RESTClient().Get().AbsPath(path).Timeout(0).DoRaw(background)
	if err != nil {
		t.Fatal(err)
	}
	read := map[string]float64{}
	for _, line := range strings.Split(string(text), "\n") {
		name, value, _ := strings.Cut(line, " ")
		if number, err := strconv.ParseFloat(value, 64); err == nil {
			read[strings.TrimPrefix(name, "plimsoll_agent_")] = number
		}
	}
	return read
}

// previewOutput has the fields of `plimsoll preview -o json` that the tests read.
type previewOutput struct {
	Nodes []struct {
		Node  string
		Rules []previewRule
	}
}

type previewRule struct {
	Rule, State, Scheduling string
	Source                  struct{ From string }
	Pods                    []struct {
		Namespace, Name string
		Would           []struct{ Change string }
		Reasons         []string
	}
}

// preview runs `plimsoll preview` for policies in a file, and returns its output for the scene's node, by rule.
func (s *scene) preview(file string, args ...string) (rules map[string]previewRule, err error) {
	s.Helper()
	command := []string{binary(), "preview", "--kubeconfig", absolute("target/e2e/kubeconfig"), "-f", file, "--node", s.node, "-o", "json"}
	out, err := run("", append(command, args...)...)
	if err != nil {
		return nil, err
	}
	var read previewOutput
	if err := json.Unmarshal([]byte(out), &read); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	if len(read.Nodes) != 1 || read.Nodes[0].Node != s.node {
		return nil, fmt.Errorf("plimsoll preview did not report exactly node %s: %s", s.node, out)
	}
	rules = map[string]previewRule{}
	for _, rule := range read.Nodes[0].Rules {
		rules[rule.Rule] = rule
	}
	return rules, nil
}

// victims are the pods that would get this change, in order.
func (r previewRule) victims(change string) (names []string) {
	for _, pod := range r.Pods {
		for _, would := range pod.Would {
			if would.Change == change {
				names = append(names, pod.Namespace+"/"+pod.Name)
			}
		}
	}
	return names
}

// reason is why nothing is done to a pod of the scene.
func (r previewRule) reason(s *scene, name string) string {
	for _, pod := range r.Pods {
		if pod.Namespace == s.name && pod.Name == name {
			return strings.Join(pod.Reasons, "; ")
		}
	}
	return "the preview does not list it"
}

// victims are the pods that the rule would affect according to the agent, in order.
func (w watermark) victims(rule, what string) (names []string) {
	for _, entry := range w.Status.Would {
		if entry.Rule == rule && entry.What == what {
			names = append(names, entry.Namespace+"/"+entry.Pod)
		}
	}
	return names
}

// previewPolicies have one rule that is above its threshold on any node, and one that follows the scene's metric. They throttle batch
// jobs, and evict the app moved.
const previewPolicies = `apiVersion: ensurance.crane.io/v1alpha1
kind: AvoidanceAction
metadata: {name: %[1]s-throttle, labels: {e2e: %[1]s}}
spec: {coolDownSeconds: 2, throttle: {cpuThrottle: {stepCPURatio: 10, minCPURatio: 90}}}
---
apiVersion: ensurance.crane.io/v1alpha1
kind: AvoidanceAction
metadata: {name: %[1]s-evict, labels: {e2e: %[1]s}}
spec: {coolDownSeconds: 2, eviction: {terminationGracePeriodSeconds: 1}}
---
apiVersion: ensurance.crane.io/v1alpha1
kind: PodQOS
metadata: {name: %[1]s-throttle, labels: {e2e: %[1]s}, annotations: {plimsoll.dev/rollout: immediate}}
spec: {allowedActions: [%[1]s-throttle], labelSelector: {matchLabels: {job: batch}}, scopeSelector: {matchExpressions: [{scopeName: Namespace, operator: In, values: [%[1]s]}]}}
---
apiVersion: ensurance.crane.io/v1alpha1
kind: PodQOS
metadata: {name: %[1]s-evict, labels: {e2e: %[1]s}, annotations: {plimsoll.dev/rollout: immediate}}
spec: {allowedActions: [%[1]s-evict], labelSelector: {matchLabels: {app: moved}}, scopeSelector: {matchExpressions: [{scopeName: Namespace, operator: In, values: [%[1]s]}]}}
---
apiVersion: ensurance.crane.io/v1alpha1
kind: NodeQOS
metadata: {name: %[1]s, labels: {e2e: %[1]s}}
spec:
  selector: {matchLabels: {kubernetes.io/hostname: %[2]s}}
  nodeQualityProbe: {timeoutSeconds: 2, httpGet: {scheme: HTTP, host: %[3]s, port: 80, path: /metrics}}
  rules:
  - {name: busy, avoidanceThreshold: 2, restoreThreshold: 2, actionName: %[1]s-throttle, strategy: Preview, metricRule: {name: cpu_total_utilization, value: 1}}
  - {name: hot, avoidanceThreshold: 2, restoreThreshold: 2, actionName: %[1]s-evict, strategy: Preview, metricRule: {name: %[4]s, value: %[5]d}}
`

// TestPreviewCommandMatchesTheAgent previews policies before they are applied, with pod usage from the kubelet, and afterwards, with the agent's data.
func TestPreviewCommandMatchesTheAgent(t *testing.T) {
	needShell(t) // the command uses our own cluster's kubeconfig
	onEachNode(t, func(t *testing.T, node string) {
		s := shared(t, node)
		batch := map[string]string{"job": "batch"}
		// BestEffort pods come before Burstable ones, whatever they use.
		s.running(
			work{name: "protected", args: []string{"burn", "30"}, labels: batch, annotations: map[string]string{"plimsoll.dev/protected": "true"}},
			work{name: "first", args: []string{"burn", "60"}, labels: batch},
			work{name: "second", args: []string{"burn", "90"}, requests: "10m", labels: batch},
		)
		moved := s.owned(work{name: "moved", args: []string{"burn", "40"}, requests: "10m"})[0]
		wanted := expectedPreview{
			throttled: []string{s.name + "/first", s.name + "/second"}, evicted: []string{s.name + "/" + moved},
			spared: []spared{
				{"busy", "protected", "it is protected"},
				{"busy", moved, "no PodQOS allows this action on it"},
				{"hot", "first", "no PodQOS allows this action on it"},
			},
		}
		policies := fmt.Sprintf(previewPolicies, s.name, node, gaugeAddress, s.metric(), threshold)
		file := filepath.Join(t.TempDir(), "policies.yaml")
		if err := os.WriteFile(file, []byte(policies), 0o600); err != nil {
			t.Fatal(err)
		}

		// A kubelet measures its pods every 10 to 15 s.
		eventually(t, 90*time.Second, "the preview from the kubelet's data matches", func() error {
			rules, err := s.preview(file, "--value", fmt.Sprintf("%s=%d", s.metric(), hot))
			if err != nil {
				return err
			}
			return wanted.checkCommand(s, rules, "kubelet", "given")
		})
		if applied := kubectl(t, "get", "nodeqos,podqos,avoidanceaction", "-l", "e2e="+s.name, "-o", "name"); applied != "" {
			t.Fatalf("the preview applied policies: %s", applied)
		}

		s.set(hot)
		apply(t, policies)
		s.waitRulesEnforced(s.name)
		eventually(t, 40*time.Second, "the agent's status matches", func() error { return wanted.checkStatus(s) })
		eventually(t, 60*time.Second, "the preview from the agent's data matches", func() error {
			rules, err := s.preview(file)
			if err != nil {
				return err
			}
			return wanted.checkCommand(s, rules, "agent", "agent")
		})
		if err := s.alive(moved); err != nil {
			t.Error(err)
		}
	})
}

// expectedPreview is what the scene's rules would do: busy throttles these pods in this order, hot evicts these and closes the node, and
// spared pods are skipped for a reason.
type expectedPreview struct {
	throttled, evicted []string
	spared             []spared
}

type spared struct{ rule, pod, reason string }

// checkCommand checks the command's output, with the values of busy and hot from these sources.
func (o expectedPreview) checkCommand(s *scene, rules map[string]previewRule, busyFrom, hotFrom string) error {
	busy, heated := rules[s.name+"/busy"], rules[s.name+"/hot"]
	if busy.State != "over" || heated.State != "over" || busy.Source.From != busyFrom || heated.Source.From != hotFrom {
		return fmt.Errorf("busy is %q with a value from %q, hot is %q with a value from %q", busy.State, busy.Source.From, heated.State, heated.Source.From)
	}
	if busy.Scheduling != "" || heated.Scheduling != string(corev1.TaintEffectNoSchedule) {
		return fmt.Errorf("busy would close the node with %q, hot with %q", busy.Scheduling, heated.Scheduling)
	}
	if err := o.check(busy.victims("throttle"), heated.victims("evict")); err != nil {
		return fmt.Errorf("%w; busy: %+v; hot: %+v", err, busy.Pods, heated.Pods)
	}
	for _, it := range o.spared {
		if reason := rules[s.name+"/"+it.rule].reason(s, it.pod); reason != it.reason {
			return fmt.Errorf("%s skips %s: %q, not %q", it.rule, it.pod, reason, it.reason)
		}
	}
	return nil
}

// checkStatus checks the agent's status.
func (o expectedPreview) checkStatus(s *scene) error {
	now, err := watermarkOf(s.node)
	if err != nil {
		return err
	}
	busy, heated := s.name+"/busy", s.name+"/hot"
	if closes := now.victims(heated, "disableScheduling"); len(closes) != 1 || len(now.victims(busy, "disableScheduling")) != 0 {
		return fmt.Errorf("not only rule hot would close the node: %v", now.Status.Would)
	}
	return o.check(now.victims(busy, "throttle"), now.victims(heated, "evict"))
}

func (o expectedPreview) check(throttled, evicted []string) error {
	if !slices.Equal(throttled, o.throttled) || !slices.Equal(evicted, o.evicted) {
		return fmt.Errorf("the preview would throttle %v and evict %v, not %v and %v", throttled, evicted, o.throttled, o.evicted)
	}
	return nil
}
