//go:build e2e

package placement

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// TestPlacement runs each scene in each way, one after the other: how much an image attracts pods depends on all nodes of the cluster.
func TestPlacement(t *testing.T) {
	c := start(t)
	t.Logf("Kubernetes %s", c.Version())
	t.Run("SecondSchedulerWorks", c.secondSchedulerWorks)
	t.Run("PolicyAddsTheSameTerms", c.policyAddsTheSameTerms)
	for _, as := range ways {
		t.Run(strings.ReplaceAll(as.name, " ", "-"), func(t *testing.T) {
			for _, each := range []struct {
				name string
				test func(*cluster, way)
			}{
				{"HotNodesAreAvoided", hotNodesAreAvoided},
				{"PodsGoWhereThereIsRoom", podsGoWhereThereIsRoom},
				{"IdleNodeIsNotStormed", idleNodeIsNotStormed},
				{"OwnPreferencesCount", ownPreferencesCount},
				{"NodesWithoutLabel", nodesWithoutLabel},
				{"Garbage", garbage},
				{"AllNodesHot", allNodesHot},
				{"DaemonPodsReachAllNodes", daemonPodsReachAllNodes},
				{"ChangesAreSeenAtOnce", changesAreSeenAtOnce},
				{"StreamsFollowTheLabel", streamsFollowTheLabel},
				{"WhatOutweighsIt", whatOutweighsIt},
			} {
				t.Run(each.name, func(t *testing.T) {
					of := *c
					plane := *c.Plane
					plane.T, of.Plane = t, &plane
					each.test(&of, as)
				})
			}
		})
	}
	t.Run("SecondSchedulerLacksNothing", c.secondSchedulerLacksNothing)
}

// hotNodesAreAvoided although nothing of them is requested, and half of each other node.
func hotNodesAreAvoided(c *cluster, as way) {
	hot, cool := some(5, node{name: "hot", load: "100"}), some(5, node{name: "cool", load: "50", cpu: 50, memory: 50})
	hot[0].load, hot[1].load = "95", "95"
	c.scene(as, func(s *scene) {
		found := s.burst(60, small)
		s.T.Logf("of 60 pods %d on hot nodes", found.on("hot"))
		switch {
		case as == bare && found.on("hot") < 40:
			s.T.Errorf("the bare scheduler does not prefer the nodes with low requests: %v", found)
		case as != bare && found.on("hot") > 0:
			s.T.Errorf("pods are on hot nodes: %v", found)
		}
	}, hot, cool)
}

// podsGoWhereThereIsRoom although requests are higher there.
func podsGoWhereThereIsRoom(c *cluster, as way) {
	c.scene(as, func(s *scene) {
		found := s.burst(5, small)
		wanted := "idle"
		if as == bare {
			wanted = "busy"
		}
		if found.on(wanted) != 5 {
			s.T.Errorf("not all are on %s: %v", wanted, found)
		}
	}, []node{{name: "idle", load: "20", cpu: 80, memory: 80}, {name: "busy", load: "100"}})
}

// idleNodeIsNotStormed by a burst: of 100 pods it gets its fair share of five, or at most two more.
func idleNodeIsNotStormed(c *cluster, as way) {
	nodes := append(some(19, node{name: "other", load: "60"}), node{name: "idle", load: "0"})
	for _, each := range []struct {
		what   string
		shapes []shape
	}{{"no requests", nil}, {"2.5 %", []shape{small}}} {
		c.scene(as, func(s *scene) {
			found := s.burst(100, each.shapes...)
			s.T.Logf("pods with %s: %d of 100 on the idle node, at most %d on another", each.what, found["idle"], found.highest("other"))
			if found["idle"] > 7 || found.highest("other") > 7 {
				s.T.Errorf("pods are not spread: %v", found)
			}
		}, nodes)
	}
}

// ownPreferencesCount: a pod's own preference counts as much as headroom of the same number.
func ownPreferencesCount(c *cluster, as way) {
	for _, each := range []struct {
		weight         int32
		load           string
		byTerms, taint bool
	}{
		{1, "60", true, true},
		{1, "80", false, true},
		{5, "80", true, true},
		{5, "95", false, false},
		{7, "100", false, false},
		{9, "100", true, false},
		{100, "100", true, false},
	} {
		wins := each.byTerms
		if !as.labelled {
			wins = each.taint || !as.tainted
		}
		c.scene(as, func(s *scene) {
			found := s.burst(1, small, prefers(each.weight, "preferred"))
			if (found["preferred"] == 1) != wins {
				s.T.Errorf("a preference of weight %d for a node at %s, beside an idle node: %v", each.weight, each.load, found)
			}
		}, []node{{name: "preferred", load: each.load}, {name: "idle", load: "0"}})
	}
}

// nodesWithoutLabel count as nodes at 80: they are neither preferred nor starved.
func nodesWithoutLabel(c *cluster, as way) {
	const pods = 30
	for _, others := range []string{"60", "75", "80", "85", "100"} {
		wanted := pods / 2
		switch {
		case as.labelled && (others == "60" || others == "75"):
			wanted = 0
		case as.labelled && others != "80", as.tainted && others == "100":
			wanted = pods
		}
		c.scene(as, func(s *scene) {
			found := s.burst(pods, small).on("without")
			s.T.Logf("beside nodes at %s: %d of %d pods on those without the label", others, found, pods)
			if found < wanted-2 || found > wanted+2 {
				s.T.Errorf("expected about %d", wanted)
			}
		}, some(3, node{name: "without", load: none}), some(3, node{name: "other", load: others}))
	}
	c.scene(as, func(s *scene) {
		s.service("web")
		found := s.burst(12, small, labelled("app", "web"))
		s.T.Logf("of 12 pods of a Service %d on the nodes without the label", found.on("without"))
		if found.on("without") < 3 {
			s.T.Errorf("the Service is not spread: %v", found)
		}
	}, some(3, node{name: "without", load: none}), some(3, node{name: "other", load: "60"}))
	c.scene(as, func(s *scene) {
		if found := s.burst(10, small); found.on("without") != 10 {
			s.T.Errorf("pods stay away from the only node with room: %v", found)
		}
	}, []node{{name: "without", load: none}, {name: "full", load: "0", cpu: 99, memory: 99}})
}

// garbage in the label never stops scheduling, and does not make a node look idle.
func garbage(c *cluster, as way) {
	if !as.labelled {
		return
	}
	var nodes []node
	for i, text := range []string{"abc", "", "007", "1e1", "101", "99", "5.0", none} {
		nodes = append(nodes, node{name: fmt.Sprintf("garbage-%d", i), load: text})
	}
	c.scene(as, func(s *scene) {
		found := s.burst(40, small)
		if found.on("garbage") != 40 || found.highest("garbage") > 6 {
			s.T.Errorf("pods are not spread: %v", found)
		}
	}, nodes)
	c.scene(as, func(s *scene) {
		if found := s.burst(10, small); found.on("idle") != 10 {
			s.T.Errorf("nodes with garbage are preferred: %v", found)
		}
	}, nodes, some(2, node{name: "idle", load: "60"}))
}

// allNodesHot: pods are still scheduled, and spread.
func allNodesHot(c *cluster, as way) {
	c.scene(as, func(s *scene) {
		found := s.burst(40, small)
		if found.highest("hot") > 12 {
			s.T.Errorf("pods are not spread: %v", found)
		}
	}, some(4, node{name: "hot", load: "100"}))
}

// daemonPodsReachAllNodes: the DaemonSet controller requires a certain node for each pod.
func daemonPodsReachAllNodes(c *cluster, as way) {
	c.scene(as, func(s *scene) {
		for _, each := range s.nodes {
			s.createPod(s.pod(small, func(pod *corev1.Pod) {
				pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
					NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{
						{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{s.nodeName(each.name)}},
					}}},
				}}}
			}))
		}
		if found := s.untilBound(); len(found) != len(s.nodes) {
			s.T.Errorf("not one on each node: %v", found)
		}
	}, []node{{name: "idle", load: "0"}, {name: "busy", load: "80"}, {name: "hot", load: "100"}, {name: "without", load: none}, {name: "garbage", load: "abc"}})
}

// changesAreSeenAtOnce: a node that was emptied is chosen again, and a node that became hot is avoided.
func changesAreSeenAtOnce(c *cluster, as way) {
	if as == bare {
		return
	}
	c.scene(as, func(s *scene) {
		var slowest time.Duration
		for i, from := range []string{"b", "a", "b", "a"} {
			to := map[string]string{"a": "b", "b": "a"}[from]
			s.setLoad(from, "100")
			s.setLoad(to, "50")
			changed := time.Now()
			for {
				before := s.untilBound()[to]
				if s.burst(1, small)[to] > before {
					break
				}
				if time.Since(changed) > 10*time.Second {
					s.T.Fatalf("change %d: pods still do not go to %s", i, to)
				}
			}
			slowest = max(slowest, time.Since(changed))
		}
		s.T.Logf("at most %s from the change until a pod was bound accordingly", slowest.Round(time.Millisecond))
	}, []node{{name: "a", load: "50"}, {name: "b", load: "50"}})
}

// A vote has what makes schedulers prefer node a to b, which is at 60.
type vote struct {
	what string
	// cpu and memory are the percentages of b that are requested.
	cpu, memory int64
	// service is the number of pods on b of the pod's own Service.
	service int
	// image is whether a has the pod's image, of 4 GB.
	image bool
	// byLabel are the winners with a at 80, 90 and 100, byTaint the winner with the taint on a.
	byLabel, byTaint string
}

// whatOutweighsIt checks what outweighs the load: the table in docs/scheduling.md.
func whatOutweighsIt(c *cluster, as way) {
	loads := []string{"80", "90", "100"}
	switch as {
	case bare, byPolicy: // the policy and the second scheduler give the same results
		return
	case byTaint:
		loads = loads[2:]
	}
	for _, v := range []vote{
		{what: "50 % of b requested", cpu: 50, memory: 50, byLabel: "bbb", byTaint: "b"},
		{what: "95 % of b requested", cpu: 95, memory: 95, byLabel: "bbb", byTaint: "b"},
		{what: "95 % of b's CPU requested", cpu: 95, byLabel: "bbb", byTaint: "b"},
		{what: "1 pod of the Service on b", service: 1, byLabel: "bbb", byTaint: "b"},
		{what: "5 pods of the Service on b", service: 5, byLabel: "aab", byTaint: "b"},
		{what: "95 % of b requested, image on a", cpu: 95, memory: 95, image: true, byLabel: "aab", byTaint: "b"},
		{what: "5 pods of the Service on b, 50 % requested", cpu: 50, memory: 50, service: 5, byLabel: "aaa", byTaint: "b"},
		{what: "5 pods of the Service on b, 90 % requested", cpu: 90, memory: 90, service: 5, byLabel: "aaa", byTaint: "b"},
		{what: "5 pods of the Service on b, 90 % requested, image on a", cpu: 90, memory: 90, service: 5, image: true, byLabel: "aaa", byTaint: "a"},
	} {
		winners, wanted := "", v.byLabel
		if as.tainted {
			wanted = v.byTaint
		}
		for _, load := range loads {
			winners += c.winner(as, v, load)
		}
		c.T.Logf("%s: with a at %s the pod goes to %s", v.what, strings.Join(loads, ", "), strings.Join(strings.Split(winners, ""), ", "))
		if winners != wanted {
			c.T.Errorf("expected %s", wanted)
		}
	}
}

// winner is the node that gets a pod.
func (c *cluster) winner(as way, v vote, load string) (winner string) {
	a, b := node{name: "a", load: load}, node{name: "b", load: "60", cpu: v.cpu, memory: v.memory}
	if v.image {
		a.image = image
	}
	c.scene(as, func(s *scene) {
		if v.service > 0 {
			s.service("web")
		}
		for range v.service {
			s.bound("b", labelled("app", "web"))
		}
		s.untilSeen()
		for winner = range s.burst(1, small, labelled("app", "web")) {
		}
	}, []node{a, b})
	return winner
}
