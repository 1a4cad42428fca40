//go:build e2e

package suite

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// setEmergencyStop annotates the object that stops all agents, as docs/emergency-stop.md says; an empty reason removes the annotation.
func (s *scene) setEmergencyStop(reason string) {
	s.Helper()
	annotation := "plimsoll.dev/stop-"
	if reason != "" {
		annotation = "plimsoll.dev/stop=" + reason
	}
	kubectl(s, "annotate", "configmap", "plimsoll-stop", "-n", "plimsoll-node-lease", "--overwrite", annotation)
}

// TestEmergencyStopReleasesAllNodesAndSurvivesRestartsAndUpgrades locks all nodes, because the stop applies to the whole cluster.
func TestEmergencyStopReleasesAllNodesAndSurvivesRestartsAndUpgrades(t *testing.T) {
	t.Parallel()
	lockAllNodes(t)
	var scenes []*scene
	var baselines []*baseline
	for _, node := range nodes {
		s := newScene(t, node)
		t.Cleanup(func() { s.setEmergencyStop("") })
		o, _ := underPressure(t, s)
		scenes, baselines = append(scenes, s), append(baselines, o)
	}
	first := scenes[0]

	deadline := time.Now().Add(15 * time.Second)
	first.setEmergencyStop("seen from the suite")
	for _, o := range baselines {
		for _, v := range o.before {
			o.scene.waitRestored(max(time.Second, time.Until(deadline)), v.directory, v.before)
		}
		o.scene.waitNoTaint(max(time.Second, time.Until(deadline)))
	}
	restored := func(s *scene) error {
		if found, err := taint(s.node); err != nil || found != nil {
			return fmt.Errorf("taint is %v (%v)", found, err)
		}
		now, err := watermarkOf(s.node)
		if err != nil || now.Status.Counts.Throttled != 0 {
			return fmt.Errorf("the status reports %+v (%v)", now.Status.Counts, err)
		}
		return nil
	}
	released := func(s *scene) error {
		if err := restored(s); err != nil {
			return err
		}
		row := kubectl(s, "get", "nodewatermark", s.node, "--no-headers")
		if !strings.Contains(row, "Released") {
			return fmt.Errorf("kubectl printed %s", row)
		}
		return nil
	}
	for i, s := range scenes {
		baselines[i].waitAccounted(5 * time.Second)
		eventually(s, 15*time.Second, "kubectl shows the stop", func() error { return released(s) })
		reported := strings.Join(events(s, "Node", "default", s.node), "\n")
		if !strings.Contains(reported, "EmergencyStop: stopped: seen from the suite") {
			s.Errorf("no event reports the emergency stop:\n%s", reported)
		}
	}

	// The metric is far above its threshold the whole time: a restarted agent and an upgrade change nothing.
	kubectl(t, "delete", "pod", "-n", namespace, agentPod(first.node), "--wait=false")
	if err := install(); err != nil {
		t.Fatal(err)
	}
	for _, s := range scenes {
		eventually(s, 60*time.Second, "an agent runs", func() error {
			if agentPod(s.node) == "" {
				return fmt.Errorf("no agent runs")
			}
			return released(s)
		})
		always(s, 5*time.Second, "nothing is done", func() error { return restored(s) })
		eventually(s, 15*time.Second, "kubectl still shows the stop", func() error { return released(s) })
	}

	first.setEmergencyStop("")
	for _, s := range scenes {
		s.waitTaint(30*time.Second, corev1.TaintEffectNoSchedule)
		eventually(s, 30*time.Second, "pods are throttled again", func() error {
			if s.throttled("free") == nil {
				return fmt.Errorf("pod free is not throttled")
			}
			return nil
		})
		s.set(cold)
	}
	for _, o := range baselines {
		o.waitAllRestored(60 * time.Second)
	}
}

// TestAgentWithDroppedConnectionsSeesEmergencyStop: a packet filter drops the packets of the agent's open connections, while new ones work.
func TestAgentWithDroppedConnectionsSeesEmergencyStop(t *testing.T) {
	t.Parallel()
	lockAllNodes(t)
	node := nodes[0]
	tables := packetFilter(t)
	if out, err := tryOnNode(node, "command -v nsenter ss "+tables); err != nil {
		t.Skipf("%s lacks a program that the test needs: %s", node, out)
	}
	s := newScene(t, node)
	t.Cleanup(func() { s.setEmergencyStop("") })
	o, _ := underPressure(t, s)
	inside := fmt.Sprintf("nsenter --target %s --net ", processOf(t, node, "agent"))
	ports := strings.Fields(onNode(t, node, inside+`ss -Htn state established dst :443 | sed 's/.*:\([0-9]*\) .*:443 *$/\1/'`))
	if len(ports) == 0 {
		t.Fatal("the agent has no connection to the API server")
	}
	t.Cleanup(func() { tryOnNode(node, inside+tables+" --flush INPUT") })
	for _, port := range ports {
		onNode(t, node, inside+tables+" --append INPUT --protocol tcp --dport "+port+" --jump DROP")
	}
	started := time.Now()
	s.setEmergencyStop("seen from the suite")
	for _, v := range o.before {
		s.waitRestored(25*time.Second-time.Since(started), v.directory, v.before)
	}
	s.waitNoTaint(25*time.Second - time.Since(started))
	t.Logf("%d connections were cut: everything was restored after %s", len(ports), time.Since(started).Round(time.Second))
	s.set(cold)
	s.setEmergencyStop("")
	o.waitAllRestored(60 * time.Second)
}
