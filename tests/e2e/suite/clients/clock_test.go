//go:build e2e

package clients

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"plimsoll.dev/suite/plane"
)

// TestClientsStayCorrectIfControllerClockIsOffByAnHour: the clock of one replica is ahead of or behind all others. Each replica leads in turn,
// and receives reports of all agents. The one with the wrong clock receives them through the other replica or from the Leases, since no
// token is valid by its clock.
func TestClientsStayCorrectIfControllerClockIsOffByAnHour(t *testing.T) {
	for _, offset := range []struct {
		direction, result string
		ahead             time.Duration
	}{{"ahead", "token_expired", time.Hour}, {"behind", "token_not_yet", -time.Hour}} {
		t.Run(offset.direction, func(t *testing.T) {
			s := openWith(t, setting{directly: true, ahead: offset.ahead})
			s.edits()
			all := append(s.all(), s.rawClient("a client that retries at once"))
			s.waitUpToDate(waitTimeout, all)
			for range 2 {
				leader, standby := s.leader()
				leader.Kill()
				leader.Start()
				s.logUpToDate(standby.name+" leads after "+leader.name+": all clients", all)
				s.waitReady(leader)
			}
			_, written := s.writes()
			for _, r := range s.replicas {
				if !slices.ContainsFunc(written, func(write plane.AuditEvent) bool { return write.User.Username == r.name }) {
					t.Errorf("%s never led", r.name)
				}
				refused, err := plane.Metric(r.metrics, fmt.Sprintf("plimsoll_controller_reports_total{result=%q}", offset.result))
				if err != nil || (refused > 0) != (r == s.replicas[0]) {
					t.Errorf("%s refused %.0f reports as %s: %v", r.name, refused, offset.result, err)
				}
			}
			if found := s.events("AgentUnresponsive"); len(found) > 0 {
				t.Errorf("live agents were reported as unresponsive: %v", found)
			}
		})
	}
}

// events are the names of the objects of events with this reason.
func (s *scene) events(reason string) (about []string) {
	s.T.Helper()
	events, err := s.Kube.CoreV1().Events("").List(background, metav1.ListOptions{})
	s.agents.must(nil, err)
	for _, event := range events.Items {
		if event.Reason == reason {
			about = append(about, event.InvolvedObject.Name)
		}
	}
	return about
}

// TestAgentLivenessIgnoresAClockThatIsOffByAnHour: such an agent reports, and its node is shown as healthy and keeps its taint. When the agent
// is killed, that is detected in time, even if its Lease is from the future. When it is started again, the node recovers.
func TestAgentLivenessIgnoresAClockThatIsOffByAnHour(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("NOT TESTED: agents need root")
	}
	s := openWith(t, setting{directly: true, flags: []string{"--max-unschedulable", "100%", "--dead-agent-after", "20s", "--short-dead-agent-after"}})
	s.closeBusyNodes()
	for _, r := range s.replicas {
		s.Endpoint(plane.ReportService, r.name, r.report)
	}
	agents := []*machine{s.machine("ahead", time.Hour), s.machine("behind", -time.Hour)}
	for _, m := range agents {
		s.Eventually(waitTimeout, m.node+" is healthy and closed", func() error { return m.checkHealthy(s, "the agent reports to the controller") })
	}
	// Longer than the liveness timeout of agents.
	for end := time.Now().Add(75 * time.Second); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		for _, m := range agents {
			if err := m.checkHealthy(s, "the agent "); err != nil {
				t.Fatalf("%s: %v", m.node, err)
			}
		}
	}
	if found := s.events("AgentUnresponsive"); len(found) > 0 {
		t.Errorf("live agents were reported as unresponsive: %v", found)
	}
	killed := time.Now()
	for _, m := range agents {
		m.Kill()
	}
	for _, m := range agents {
		s.Eventually(waitTimeout, m.node+" is reported as unresponsive and open again", func() error { return m.checkUnresponsive(s) })
		t.Logf("%s: unresponsive and open %s after its agent was killed", m.node, time.Since(killed).Round(100*time.Millisecond))
	}
	for _, m := range agents {
		m.Start()
		s.Eventually(waitTimeout, m.node+" is healthy and closed again", func() error { return m.checkHealthy(s, "the agent ") })
	}
}

// closeBusyNodes applies a policy whose threshold every machine exceeds, so that all nodes are closed.
func (s *scene) closeBusyNodes() {
	s.Apply(`{"apiVersion":"ensurance.crane.io/v1alpha1","kind":"AvoidanceAction","metadata":{"name":"close"},"spec":{}}`,
		`{"apiVersion":"ensurance.crane.io/v1alpha1","kind":"NodeQOS","metadata":{"name":"busy","annotations":{"plimsoll.dev/rollout":"immediate"}},
		"spec":{"selector":{"matchLabels":{"pool":"machines"}},"rules":[
			{"name":"cpu","avoidanceThreshold":1,"actionName":"close","metricRule":{"name":"cpu_total_usage","value":10}}]}}`)
}

// A machine is a node with its own agent, whose wall clock is off by this much.
type machine struct {
	*plane.Process
	node  string
	ahead time.Duration
}

// machine creates a node and starts its agent.
func (s *scene) machine(name string, ahead time.Duration) *machine {
	s.T.Helper()
	// The lowest allowed threshold is one percent.
	size := corev1.ResourceList{"cpu": resource.MustParse("1"), "memory": resource.MustParse("16Gi")}
	s.agents.must(s.Kube.CoreV1().Nodes().Create(background, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"pool": "machines"}},
		Status: corev1.NodeStatus{Capacity: size, Conditions: []corev1.NodeCondition{
			{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"},
		}},
	}, metav1.CreateOptions{}))
	credentials := s.T.TempDir()
	plane.WriteFile(s.T, filepath.Join(credentials, "token"), s.agents.token(name))
	plane.WriteFile(s.T, filepath.Join(credentials, "ca.crt"), s.ReportAuthority())
	return &machine{node: name, ahead: ahead, Process: s.Plimsoll(ahead, "agent", "--node-name", name, "--kubeconfig", s.Kubeconfig,
		"--cgroup-root", "/sys/fs/cgroup", "--kubelet-cgroup-root", s.cgroup(name), "--state-dir", s.T.TempDir(),
		"--listen", fmt.Sprintf("127.0.0.1:%d", plane.FreePort(s.T)), "--namespace", "default", "--pod-name", "agent-"+name,
		"--report-service", plane.ReportService, "--report-credentials", credentials)}
}

// cgroup creates an empty cgroup in every hierarchy.
func (s *scene) cgroup(name string) string {
	s.T.Helper()
	parent := fmt.Sprintf("plimsoll-clients-%d-%s", os.Getpid(), name)
	trees, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	s.agents.must(nil, err)
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.procs"); err == nil {
		trees = []string{"/sys/fs/cgroup/cgroup.procs"}
	}
	for _, tree := range trees {
		path := filepath.Join(filepath.Dir(tree), parent)
		s.agents.must(nil, os.MkdirAll(filepath.Join(path, "kubepods", "besteffort"), 0o755))
		s.T.Cleanup(func() {
			for _, directory := range []string{"kubepods/besteffort", "kubepods", ""} {
				os.Remove(filepath.Join(path, directory))
			}
		})
	}
	return parent
}

// checkHealthy returns an error unless the node is closed and shown as healthy, with this message.
func (m *machine) checkHealthy(s *scene, message string) error {
	metric, node, err := m.read(s)
	if err != nil {
		return err
	}
	if err := m.checkClockOffset(metric); err != nil {
		return err
	}
	if found := healthy(metric); found.status != "True" || !strings.HasPrefix(found.message, message) {
		return fmt.Errorf("Healthy is %q", found)
	}
	row := strings.Fields(s.kubectlWithRetries("get", "nm", m.node, "-o", "wide", "--no-headers"))
	// The agent reports every 10 s.
	if age := row[len(row)-3]; !regexp.MustCompile(`^[0-9]s$|^[1-3][0-9]s$`).MatchString(age) {
		return fmt.Errorf("REPORTED is %s of %q", age, row)
	}
	if !m.isClosed(node) {
		return fmt.Errorf("its taints are %v", node.Spec.Taints)
	}
	return nil
}

// checkUnresponsive returns an error unless the killed agent is shown as unresponsive, and its node is open.
func (m *machine) checkUnresponsive(s *scene) error {
	metric, node, err := m.read(s)
	if err != nil {
		return err
	}
	if found := healthy(metric); found.status != "False" || found.reason != "AgentUnresponsive" {
		return fmt.Errorf("Healthy is %q", found)
	}
	if m.isClosed(node) {
		return fmt.Errorf("its taints are %v", node.Spec.Taints)
	}
	return nil
}

func (m *machine) read(s *scene) (*unstructured.Unstructured, *corev1.Node, error) {
	metric, err := s.Objects.Resource(nodemetrics).Get(background, m.node, metav1.GetOptions{})
	if err != nil {
		return nil, nil, err
	}
	node, err := s.Kube.CoreV1().Nodes().Get(background, m.node, metav1.GetOptions{})
	return metric, node, err
}

// checkClockOffset returns an error if the timestamp does not have the agent's clock offset.
func (m *machine) checkClockOffset(metric *unstructured.Unstructured) error {
	timestamp, _, _ := unstructured.NestedString(metric.Object, "status", "timestamp")
	at, err := time.Parse(time.RFC3339, timestamp)
	if err != nil {
		return err
	}
	if offset := time.Until(at) - m.ahead; offset.Abs() > 5*time.Minute {
		return fmt.Errorf("the timestamp is %s, which is off by %s", timestamp, time.Until(at))
	}
	return nil
}

func (m *machine) isClosed(node *corev1.Node) bool {
	for _, taint := range node.Spec.Taints {
		if taint.Key == "interference.crane.io" && taint.Effect == corev1.TaintEffectNoSchedule {
			return true
		}
	}
	return false
}

// A condition is the Healthy condition of a NodeMetric.
type condition struct{ status, reason, message string }

func healthy(metric *unstructured.Unstructured) (found condition) {
	conditions, _, _ := unstructured.NestedSlice(metric.Object, "status", "conditions")
	for _, entry := range conditions {
		entry := entry.(map[string]any)
		if word := func(field string) string { return fmt.Sprint(entry[field]) }; entry["type"] == "Healthy" {
			found = condition{word("status"), word("reason"), word("message")}
		}
	}
	return found
}
