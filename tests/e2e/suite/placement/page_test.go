//go:build e2e

package placement

import (
	"os"
	"reflect"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"plimsoll.dev/suite/pages"
	"plimsoll.dev/suite/plane"
)

const (
	page         = "docs/scheduling.md"
	integrations = "docs/scheduling-integrations.md"
)

// TestCommandsOfThePages runs every command of docs/scheduling.md and docs/scheduling-integrations.md, and a scheduler with the configuration on the former.
func TestCommandsOfThePages(t *testing.T) {
	c := open(t)
	c.install()
	c.Apply("{apiVersion: v1, kind: Namespace, metadata: {name: web}}")
	c.Kubectl("create", "deployment", "web", "--image="+image, "--namespace", "web")
	values := c.Write("values.yaml", "waitForAgents: {enabled: false}")
	read := func(file string) *pages.Page {
		p := pages.Read(t, plane.Absolute(t, "."), file, "/bin/false", "KUBECONFIG="+c.Kubeconfig, "HOME="+t.TempDir())
		p.Helm(plane.Tool(t, plane.Helm()), values)
		return p
	}
	p, others := read(page), read(integrations)

	c.scheduler(c.Kubeconfig, plane.FreePort(t), "--config="+c.Write("own.yaml", c.configOnPage()))
	own := way{name: "the configuration on the page", namespace: "web", scheduler: "default-scheduler", labelled: true}
	c.scene(own, func(s *scene) {
		p.Run(t, "Scheduling by load")
		if nodes := p.Run(t, "Watch it"); !strings.Contains(nodes, "LOAD") {
			t.Errorf("the commands under Watch it show no loads: %s", nodes)
		}
		if found := s.burst(10, small); found.on("cool") != 10 {
			t.Errorf("pods are on the hot node: %v", found)
		}
	}, []node{{name: "hot", load: "100"}, {name: "cool", load: "60", cpu: 50, memory: 50}})
	if printed := p.Run(t, "Your own scheduler"); !strings.Contains(printed, "schedulerName: plimsoll") {
		t.Errorf("the chart prints no configuration: %s", printed)
	}

	p.Run(t, "Admission policy")
	c.untilPolicyIsInForce(own)
	p.Run(t, "Second scheduler")
	if found := c.Kubectl("get", "deployment", "web", "-n", "web", "-o", "jsonpath={.spec.template.spec.schedulerName}"); found != "plimsoll" {
		t.Errorf("the Deployment's pods name the scheduler %q", found)
	}
	c.config()
	p.Run(t, "Soft taint")
	if agent := c.agentArgs(); !strings.Contains(agent, "--soft-taint") {
		t.Errorf("agents set no taint: %s", agent)
	}
	if service := others.Run(t, "Trimaran"); !strings.Contains(service, "plimsoll-scheduler-api") {
		t.Errorf("there is no Service for schedulers: %s", service)
	}
	others.Run(t, "Polling")
	if controller := c.Kubectl("get", "deployment", "plimsoll-controller", "-n", namespace, "-o", "jsonpath={.spec.template.spec.containers[0].args}"); !strings.Contains(controller, "--poll=") {
		t.Errorf("the controller polls nothing: %s", controller)
	}
	others.Run(t, "crane-scheduler")
	if agent := c.agentArgs(); !strings.Contains(agent, "--crane-annotations=Asia/Shanghai") {
		t.Errorf("agents write no annotations: %s", agent)
	}
	p.Run(t, "Turn it off")
	if agent := c.agentArgs(); !strings.Contains(agent, "--load-label=false") || strings.Contains(agent, "--soft-taint") || strings.Contains(agent, "--crane-annotations") {
		t.Errorf("agents still write load signs: %s", agent)
	}
	if left := c.Kubectl("get", "mutatingadmissionpolicies,mutatingadmissionpolicybindings,deployments", "-A", "-o", "name"); strings.Contains(left, "plimsoll-placement") ||
		strings.Contains(left, "plimsoll-scheduler") {
		t.Errorf("not deleted: %s", left)
	}
	// These need the NodeMetrics of running agents: tests/api/top.rs.
	p.RunElsewhere("Why this node")
	// These need a node with a load: tests/api/polling.rs.
	others.RunElsewhere("One value of a node")
	p.CheckAllRun()
	others.CheckAllRun()
}

func (c *cluster) agentArgs() string {
	return c.Kubectl("get", "daemonset", "plimsoll-agent-v2", "-n", namespace, "-o", "jsonpath={.spec.template.spec.containers[0].args}")
}

// configOnPage is the scheduler's configuration on the page, with this cluster's kubeconfig. Its terms must be the same as the chart's.
func (c *cluster) configOnPage() string {
	c.T.Helper()
	text, err := os.ReadFile(plane.Absolute(c.T, page))
	if err != nil {
		c.T.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "```yaml\n")
	snippet, _, ended := strings.Cut(rest, "```")
	if !found || !ended {
		c.T.Fatal("the page has no configuration")
	}
	if terms := addedAffinity(c.T, snippet); !reflect.DeepEqual(terms, addedAffinity(c.T, renderedConfig(c.T))) {
		c.T.Errorf("the terms on the page are not the chart's: %v", terms)
	}
	kubeconfig := "/etc/kubernetes/scheduler.conf"
	if strings.Count(snippet, kubeconfig) != 1 {
		c.T.Fatalf("the configuration on the page does not name %s", kubeconfig)
	}
	// Only one replica.
	return strings.Replace(snippet, kubeconfig, c.Kubeconfig, 1) + "leaderElection: {leaderElect: false}\n"
}

// renderedConfig is the configuration of the second scheduler that Helm renders without a cluster.
func renderedConfig(t *testing.T) string {
	t.Helper()
	rendered, err := run(t, plane.Helm(), "template", "plimsoll", plane.Absolute(t, chart), "--set", "placement.scheduler.enabled=true",
		"--show-only", "templates/scheduler-config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var object struct{ Data map[string]string }
	if err := yaml.Unmarshal([]byte(rendered), &object); err != nil {
		t.Fatal(err)
	}
	return object.Data["scheduler.yaml"]
}
