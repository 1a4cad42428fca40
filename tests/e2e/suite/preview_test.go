//go:build e2e

package suite

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// nodeView is what of the Node object Preview must not change.
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

func TestPreviewChangesNothingAndNamesWhatNoneThenDoes(t *testing.T) {
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
		s.waitKept(throttle)
		s.waitKept(evict)
		s.set(hot)

		asked := agentMetrics(t, node)
		would, how := map[string]string{}, map[string]string{}
		eventually(t, 20*time.Second, "the status says what each rule would do", func() error {
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
					return fmt.Errorf("%s would be done to %q, not %s; all: %v", key, would[key], pod, now.Status.Would)
				}
			}
			if _, ok := would[evict+"/hot disableScheduling"]; !ok || how["disableScheduling"] != string(corev1.TaintEffectNoSchedule) {
				return fmt.Errorf("it does not say that scheduling would be disabled, and how: %v", now.Status.Would)
			}
			return nil
		})
		always(t, 5*time.Second, "nothing changes", func() error {
			if err := s.alive(moved); err != nil {
				return err
			}
			for _, v := range []*victim{slowed, other} {
				if err := checkRestored(v.before, s.settings(v.folder)); err != nil {
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
			{"Node", "", node, "WouldEvict", evict},
			{"Node", "", node, "WouldDisableScheduling", evict},
		} {
			s.waitTold(wanted.kind, wanted.ns, wanted.name, wanted.reason, wanted.rule)
		}
		// What is counted as written may lag behind the requests.
		eventually(t, 15*time.Second, "all that was written are events and the status", func() error {
			now := agentMetrics(t, node)
			grew := func(name string) float64 { return now[name] - asked[name] }
			creates, patches := grew(`api_requests_total{verb="create",code="201"}`), grew(`api_requests_total{verb="patch",code="200"}`)
			if events, writes := grew(`events_total{result="written"}`), grew(`status_writes_total{result="done"}`); creates > events || patches > writes {
				return fmt.Errorf("%v objects created for %v events, %v patches for %v writes of the status", creates, events, patches, writes)
			}
			if grew(`evictions_total{outcome="accepted"}`) != 0 || now[`would{rule="`+throttle+`/hot"}`] != 1 {
				return fmt.Errorf("the metrics do not tell of what would be done: %v", now)
			}
			return nil
		})

		// The same rules, acting.
		s.rule(throttle, rule{action: throttle})
		s.rule(evict, rule{action: evict})
		s.waitEnding(20*time.Second, moved)
		s.waitTaint(5*time.Second, corev1.TaintEffectNoSchedule)
		s.waitTold("Pod", s.name, moved, "PodEvicted", evict)
		s.waitTold("Node", "", node, "SchedulingDisabled", evict)
		eventually(t, 20*time.Second, "the pod that would be throttled is", func() error {
			told := s.throttled("slowed")
			if told == nil || told.Rule != throttle+"/hot" || told.ToMillicores == nil {
				return fmt.Errorf("the status says %+v", told)
			}
			// Foretold as `to 90 %, 123m`, from what the pod used then.
			var ratio, foretold int
			if _, err := fmt.Sscanf(how["throttle"], "to %d %%, %dm", &ratio, &foretold); err != nil {
				t.Fatalf("it was foretold as %q: %v", how["throttle"], err)
			}
			if told.Ratio != ratio || *told.ToMillicores < foretold*8/10 || *told.ToMillicores > foretold*12/10 {
				t.Fatalf("it was foretold as %q, and became %d %%, %dm", how["throttle"], told.Ratio, *told.ToMillicores)
			}
			return nil
		})
		s.set(cold)
		s.waitRestored(20*time.Second, slowed.folder, slowed.before)
		s.waitNoTaint(20 * time.Second)
	})
}

// waitTold waits until an event about an object, with this reason, names the rule of a NodeQOS.
func (s *scene) waitTold(kind, ns, name, reason, nodeQOS string) {
	s.Helper()
	eventually(s, 15*time.Second, fmt.Sprintf("%s of %s %s for %s is told", reason, kind, name, nodeQOS), func() error {
		all := events(s, kind, ns, name)
		for _, event := range all {
			if strings.HasPrefix(event, reason+": ") && strings.Contains(event, nodeQOS+"/hot") {
				return nil
			}
		}
		return fmt.Errorf("its events are:\n%s", strings.Join(all, "\n"))
	})
}

// agentMetrics reads the metrics of a node's agent, by name without its prefix and with labels.
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
