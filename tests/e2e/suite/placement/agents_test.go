//go:build e2e

package placement

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"plimsoll.dev/suite/plane"
	"plimsoll.dev/suite/report"
)

const (
	// line is the load line of simulated nodes, in percent of a node.
	line = 80
	// expectedPodLoad is what each pod with small requests adds to the load: 85 % of the CPU that it requests.
	expectedPodLoad = 100.0 * 0.85 / 4000 * 100 / line * 100
	reportInterval  = 500 * time.Millisecond
)

// A controller is the project's controller, with the ports for probes, for agents' reports and for schedulers.
type controller struct {
	*plane.Process
	probes, reports, extender int
	signer                    *report.Signer
	// interval is the time between two reports of an agent.
	interval time.Duration
}

// controller starts the project's controller.
func (c *cluster) controller(args ...string) *controller {
	c.T.Helper()
	c.Apply(`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"plimsoll-node-lease"}}`,
		`{"apiVersion":"v1","kind":"ServiceAccount","metadata":{"name":"plimsoll-agent","namespace":"default"}}`)
	signer, err := report.NewSigner(c.SigningKey())
	if err != nil {
		c.T.Fatal(err)
	}
	it := &controller{probes: plane.FreePort(c.T), reports: plane.FreePort(c.T), extender: plane.FreePort(c.T), signer: signer, interval: reportInterval}
	local := func(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }
	it.Process = c.Controller("controller", append([]string{"--listen", local(it.probes), "--pod-ip", "127.0.0.1",
		"--report-listen", local(it.reports), "--scheduler-listen", local(it.extender)}, args...)...)
	c.Eventually(waitTimeout, "the controller is ready", func() error {
		response, err := http.Get(plane.Local("http", it.probes) + "/readyz")
		if err != nil {
			return err
		}
		response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("it answers %s", response.Status)
		}
		return nil
	})
	return it
}

// agents starts the agents of the scene's nodes, which report their loads until the returned function is called.
func (it *controller) agents(s *scene) func() {
	running, end := context.WithCancel(background)
	var all sync.WaitGroup
	for index, each := range s.nodes {
		if each.load == none {
			continue
		}
		all.Go(func() { it.agent(running, s, index) })
	}
	s.Eventually(waitTimeout, "the controller knows the loads", func() error {
		scores, err := it.prioritize(s)
		if err != nil {
			return err
		}
		unknown, err := plane.Metric(it.probes, "plimsoll_controller_scheduler_unknown_nodes")
		if err == nil && int(unknown) != s.unreported() {
			err = fmt.Errorf("%g nodes are unknown: %s", unknown, scores)
		}
		return err
	})
	return func() {
		end()
		all.Wait()
	}
}

// unreported is the number of nodes without an agent.
func (s *scene) unreported() (count int) {
	for _, each := range s.nodes {
		if each.load == none {
			count++
		}
	}
	return count
}

// agent reports a node's load: its own, and that of the pods bound to it.
func (it *controller) agent(running context.Context, s *scene, index int) {
	of := s.nodes[index]
	name := s.nodeName(of.name)
	token, err := it.signer.Token(name)
	if err != nil {
		s.T.Error(err)
		return
	}
	to := report.Connect(fmt.Sprintf("127.0.0.1:%d", it.reports), &tls.Config{InsecureSkipVerify: true})
	for sequence := 1; running.Err() == nil; sequence++ {
		load, _ := strconv.Atoi(of.load)
		percent := float64(load) + expectedPodLoad*float64(s.boundTo(of.name))
		to.Post(running, token, reportBody(name, sequence, percent)) // errors are ignored: the next one may succeed
		select {
		case <-running.Done():
		case <-time.After(it.interval):
		}
	}
}

// reportBody is the report of a node with this load.
func reportBody(name string, sequence int, percent float64) []byte {
	resource := func(expected float64) map[string]any {
		return map[string]any{"percent": expected / line * 100, "expected": expected, "newcomers": 0.0, "line": line}
	}
	boot := "00000000-0000-4000-8000-000000000000"
	body, _ := json.Marshal(map[string]any{
		"node": name, "bootID": boot, "agentStartedMillis": 1000, "sequence": sequence, "intervalSeconds": 10, "status": map[string]any{
			"timestamp": time.Now().UTC().Format(time.RFC3339), "window": "10s",
			"agent":    map[string]any{"version": "0.1.0", "bootID": boot, "sequence": sequence},
			"capacity": map[string]any{"cpu": "4", "memory": "8Gi"},
			"load":     map[string]any{"percent": percent, "worst": "cpu", "cpu": resource(percent * line / 100), "memory": resource(10)},
		},
	})
	return body
}

// boundTo is the number of the scene's pods on a node, counted at most once per report interval.
func (s *scene) boundTo(short string) int {
	s.reportedLock.Lock()
	defer s.reportedLock.Unlock()
	if time.Since(s.reportedAt) > s.reportTo.interval {
		if found, err := s.bindings(); err == nil {
			s.reported, s.reportedAt = found, time.Now()
		}
	}
	return s.reported[short]
}

// prioritize requests the extender's scores for a pod that uses next to nothing.
func (it *controller) prioritize(s *scene) (string, error) {
	var names []string
	for _, each := range s.nodes {
		names = append(names, s.nodeName(each.name))
	}
	pod := newPod(s.way, "probe", nil)
	pod.UID = "probe"
	pod.Spec.Containers[0].Resources.Requests = quantities(1, 1)
	body, err := json.Marshal(map[string]any{"Pod": pod, "NodeNames": names})
	if err != nil {
		return "", err
	}
	response, err := http.Post(plane.Local("http", it.extender)+"/extender/prioritize", "application/json", strings.NewReader(string(body)))
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	var found []struct {
		Host  string
		Score int
	}
	if err := json.NewDecoder(response.Body).Decode(&found); err != nil {
		return "", err
	}
	return fmt.Sprint(found), nil
}
