//go:build e2e

package placement

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"plimsoll.dev/suite/plane"
)

// byExtender is for pods of a scheduler that uses the controller as its extender.
var byExtender = way{name: "extender", namespace: "extender", scheduler: "default-scheduler"}

// extenderConfig is the configuration with the extender in docs/scheduling-integrations.md.
func extenderConfig(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(plane.Absolute(t, integrations))
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "\n## Extender\n")
	_, rest, found := strings.Cut(section, "```yaml\n")
	config, _, ended := strings.Cut(rest, "```")
	if !found || !ended {
		t.Fatal("the page has no configuration with the extender")
	}
	return config
}

// A gate is a proxy between scheduler and controller, which can break the extender.
type gate struct {
	port int
	// requests counts the scheduler's requests.
	requests atomic.Int64
	// fault, if set, responds instead of the controller.
	fault atomic.Pointer[http.HandlerFunc]
	// open starts to listen.
	open func() *http.Server
}

// gate creates a gate to the controller, which does not listen yet.
func (c *cluster) gate(to *controller) *gate {
	target, err := url.Parse(plane.Local("http", to.extender))
	if err != nil {
		c.T.Fatal(err)
	}
	g := &gate{port: plane.FreePort(c.T)}
	pass := httputil.NewSingleHostReverseProxy(target)
	pass.ErrorHandler = func(answer http.ResponseWriter, _ *http.Request, _ error) { answer.WriteHeader(http.StatusBadGateway) }
	handler := http.HandlerFunc(func(answer http.ResponseWriter, request *http.Request) {
		g.requests.Add(1)
		if fault := g.fault.Load(); fault != nil {
			(*fault)(answer, request)
			return
		}
		pass.ServeHTTP(answer, request)
	})
	g.open = func() *http.Server {
		listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", g.port))
		if err != nil {
			c.T.Fatal(err)
		}
		server := &http.Server{Handler: handler}
		go server.Serve(listener)
		return server
	}
	return g
}

// schedulerWithExtender runs a scheduler with an extender at this port, until the test ends.
func (c *cluster) schedulerWithExtender(port int, names, filter bool, flags ...string) *plane.Process {
	c.T.Helper()
	// By default it binds 50 pods a second: most pods of a burst would be bound, and reported, only after they are no longer in flight.
	config := strings.Replace(c.configWithExtender(port, names, filter), "kubeconfig: "+c.Kubeconfig, "kubeconfig: "+c.Kubeconfig+", qps: 1000, burst: 1000", 1)
	return c.scheduler(c.Kubeconfig, plane.FreePort(c.T), append(flags, "--config="+c.Write("extender.yaml", config))...)
}

// configWithExtender is the configuration on the page with an extender at this port. The scheduler sends names or complete Nodes, and may use
// Filter, too.
func (c *cluster) configWithExtender(port int, names, filter bool) string {
	c.T.Helper()
	config := extenderConfig(c.T)
	change := func(old, new string) {
		if strings.Count(config, old) != 1 {
			c.T.Fatalf("the configuration on the page has no %q", old)
		}
		config = strings.Replace(config, old, new, 1)
	}
	change("/etc/kubernetes/scheduler.conf", c.Kubeconfig)
	change("10.96.0.80/", fmt.Sprintf("127.0.0.1:%d/", port))
	change("nodeCacheCapable: true", fmt.Sprintf("nodeCacheCapable: %t", names))
	if filter {
		config += "  filterVerb: filter\n"
	}
	// Only one replica.
	return config + "leaderElection: {leaderElect: false}\n"
}

// TestExtender: a real scheduler uses a real controller as extender, to which simulated agents report.
func TestExtender(t *testing.T) {
	c := &cluster{Plane: plane.Start(t, nil, "controller")}
	t.Logf("Kubernetes %s", c.Version())
	c.Apply(fmt.Sprintf("{apiVersion: v1, kind: Namespace, metadata: {name: %s}}", byExtender.namespace))
	it := c.controller()
	c.reportTo = it
	run := func(name string, test func(*cluster)) {
		t.Run(name, func(t *testing.T) {
			of, plane := *c, *c.Plane
			plane.T, of.Plane = t, &plane
			test(&of)
		})
	}
	run("Names", func(c *cluster) {
		scheduler := c.schedulerWithExtender(it.extender, true, false)
		hotNodesAreAvoided(c, byExtender)
		allNodesHot(c, byExtender)
		daemonPodsReachAllNodes(c, byExtender)
		extenderKnowsBursts(c)
		scheduler.Kill()
	})
	run("WholeNodesAndFilter", func(c *cluster) {
		scheduler := c.schedulerWithExtender(it.extender, false, true)
		hotNodesAreAvoided(c, byExtender)
		filterClosesHotNodes(c)
		scheduler.Kill()
	})
	run("NamesAndFilter", func(c *cluster) {
		scheduler := c.schedulerWithExtender(it.extender, true, true)
		filterClosesHotNodes(c)
		allNodesHot(c, byExtender)
		scheduler.Kill()
	})
	run("Batching", func(c *cluster) {
		if strings.Contains(c.Version(), "v1.34.") {
			c.T.Skip("Kubernetes 1.34 has no OpportunisticBatching")
		}
		for _, on := range []bool{true, false} {
			c.T.Logf("OpportunisticBatching=%t", on)
			scheduler := c.schedulerWithExtender(it.extender, true, false, fmt.Sprintf("--feature-gates=OpportunisticBatching=%t", on))
			extenderKnowsBursts(c)
			onePodPerNode(c)
			scheduler.Kill()
		}
	})
	run("Broken", func(c *cluster) { brokenExtender(c, it) })
}

// extenderKnowsBursts: a burst is spread over a hundred nodes as if each pod were measured at once.
func extenderKnowsBursts(c *cluster) {
	const pods = 500
	nodes := append(some(99, node{name: "other", load: "60"}), node{name: "idle", load: "0"})
	c.scene(byExtender, func(s *scene) {
		started := time.Now()
		found := s.burst(pods, small)
		took := time.Since(started)
		plan := (99*60 + pods*expectedPodLoad) / 100
		highest := float64(0)
		for _, each := range s.nodes {
			base := 60.0
			if each.name == "idle" {
				base = 0
			}
			highest = max(highest, base+expectedPodLoad*float64(found[each.name]))
		}
		s.T.Logf("%d pods in %s, %d on the idle node; the highest load is %.0f, %.1f over the plan", pods, took.Round(time.Millisecond), found["idle"], highest, highest-plan)
		// A pod adds 2.7, and on a busy machine some requests take longer than the scheduler waits.
		if highest > plan+6 {
			s.T.Errorf("pods are not spread: %v", found)
		}
	}, nodes)
}

// filterClosesHotNodes: Filter closes at most 30 % of the nodes. With more hot nodes than that, all pods must be bound all the same.
func filterClosesHotNodes(c *cluster) {
	for _, each := range []struct {
		hot, cool, pods int
		closes          bool
	}{{2, 8, 40, true}, {6, 4, 40, false}} {
		full := node{name: "full", load: "50", cpu: 99, memory: 99}
		c.scene(byExtender, func(s *scene) {
			found := s.burst(each.pods, requests(10, 20))
			s.T.Logf("%d of %d nodes are hot: %d of %d pods on hot nodes", each.hot, each.hot+each.cool, found.on("hot"), each.pods)
			if each.closes && found.on("hot") > 0 {
				s.T.Errorf("pods are on hot nodes: %v", found)
			}
		}, some(each.hot, node{name: "hot", load: "120"}), some(each.cool, node{name: "cool", load: "50"}), []node{full})
	}
}

// onePodPerNode: each pod fills a node, and the scheduler may reuse the scores of the first one for the others.
func onePodPerNode(c *cluster) {
	c.scene(byExtender, func(s *scene) {
		found := s.burst(20, requests(2500, 1024))
		s.T.Logf("of 20 pods that fill a node each %d are on hot nodes", found.on("hot"))
		if found.on("hot") > 0 {
			s.T.Errorf("pods are on hot nodes: %v", found)
		}
	}, some(20, node{name: "cool", load: "10"}), some(20, node{name: "hot", load: "100"}))
}

// brokenExtender: scheduling continues whatever the extender does, and uses it again once it works.
func brokenExtender(c *cluster, it *controller) {
	g := c.gate(it)
	server := g.open()
	for _, filter := range []bool{false, true} {
		scheduler := c.schedulerWithExtender(g.port, true, filter)
		hot, cool := some(5, node{name: "hot", load: "100"}), some(5, node{name: "cool", load: "50", cpu: 50, memory: 50})
		place := func(what string, pods int) {
			c.scene(byExtender, func(s *scene) {
				before, started := g.requests.Load(), time.Now()
				found := s.burst(pods, small)
				s.T.Logf("%s (filter %t): %d pods in %s, %d requests, %d on hot nodes", what, filter, pods, time.Since(started).Round(time.Millisecond), g.requests.Load()-before, found.on("hot"))
				if what == "working" && found.on("hot") > 0 {
					s.T.Errorf("pods are on hot nodes: %v", found)
				}
			}, hot, cool)
		}
		place("working", 20)
		for _, each := range []struct {
			what string
			http.HandlerFunc
		}{
			{"slow", func(answer http.ResponseWriter, _ *http.Request) { time.Sleep(time.Second); fmt.Fprint(answer, "[]") }},
			{"answering garbage", func(answer http.ResponseWriter, _ *http.Request) { fmt.Fprint(answer, "<html>") }},
			{"answering points of another type", func(answer http.ResponseWriter, _ *http.Request) { fmt.Fprint(answer, `{"Host": 7}`) }},
			{"answering 500", func(answer http.ResponseWriter, _ *http.Request) { answer.WriteHeader(http.StatusInternalServerError) }},
			{"closing connections", func(answer http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) }},
		} {
			if filter && each.what == "answering points of another type" {
				continue // to Filter this is a response without names: the scheduler takes it for "no node passes", and no setting changes that
			}
			g.fault.Store(&each.HandlerFunc)
			place(each.what, 10)
		}
		g.fault.Store(nil)
		server.Close()
		place("not listening", 10)
		server = g.open()
		place("working", 20)
		scheduler.Kill()
	}
	server.Close()
	scheduler := c.schedulerWithExtender(it.extender, true, false)
	defer scheduler.Kill()
	it.Kill()
	c.reportTo = nil
	c.scene(byExtender, func(s *scene) {
		started := time.Now()
		s.burst(20, small)
		s.T.Logf("controller killed: 20 pods in %s", time.Since(started).Round(time.Millisecond))
	}, some(4, node{name: "node", load: "50"}))
}
