//go:build e2e && prometheus

package suite

import (
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/prometheus/client_golang/api"
	promv1 "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"plimsoll.dev/suite/dashboard"
)

// picture is the file that the dashboard is drawn to.
var picture = flag.String("picture", absolute("target/e2e/dashboard.svg"), "file for the dashboard's picture")

const (
	scrapeInterval = 2 * time.Second
	// rateInterval is longer than Grafana's $__rate_interval would be: the picture shows only some minutes.
	rateInterval = 10 * scrapeInterval
)

// prometheus is a server on node v1, which is this machine.
type prometheus struct {
	*testing.T
	promv1.API
	// alerts are the chart's alerts.
	alerts []monitoring.RuleGroup
}

// monitoringObjects are the chart's PodMonitor and PrometheusRule, rendered for release plimsoll.
func monitoringObjects(t *testing.T) (monitor monitoring.PodMonitor, rules monitoring.PrometheusRule) {
	t.Helper()
	rendered, err := helm("", "template", "plimsoll", absolute("charts/plimsoll"), "--namespace", namespace, "--show-only", "templates/monitoring.yaml",
		"--set", "monitoring.podMonitor.enabled=true,monitoring.alerts.enabled=true,monitoring.podMonitor.interval="+scrapeInterval.String())
	if err != nil {
		t.Fatal(err)
	}
	for _, document := range strings.Split(rendered, "\n---\n") {
		into := any(&monitor)
		if strings.Contains(document, "kind: PrometheusRule") {
			into = &rules
		}
		if err := yaml.UnmarshalStrict([]byte(document), into); err != nil {
			t.Fatal(err, document)
		}
	}
	return monitor, rules
}

// relabelling is one of Prometheus's relabel_configs.
type relabelling struct {
	SourceLabels []string `json:"source_labels,omitempty"`
	Regex        string   `json:"regex,omitempty"`
	TargetLabel  string   `json:"target_label,omitempty"`
	Replacement  string   `json:"replacement,omitempty"`
	Action       string   `json:"action,omitempty"`
}

// ofPod is the name that Prometheus's discovery gives a label of a pod.
func ofPod(kind, label string) string {
	return "__meta_kubernetes_pod_" + kind + "_" + regexp.MustCompile(`\W`).ReplaceAllString(label, "_")
}

// selecting are the relabellings that keep only pods that a label selector matches.
func selecting(t *testing.T, selector metav1.LabelSelector) (all []relabelling) {
	t.Helper()
	keep := func(label string, values ...string) {
		all = append(all, relabelling{Action: "keep", SourceLabels: []string{ofPod("label", label), ofPod("labelpresent", label)}, Regex: "(" + strings.Join(values, "|") + ");true"})
	}
	for label, value := range selector.MatchLabels {
		keep(label, value)
	}
	for _, expression := range selector.MatchExpressions {
		if expression.Operator != metav1.LabelSelectorOpIn {
			t.Fatalf("%v: this test supports only In", expression)
		}
		keep(expression.Key, expression.Values...)
	}
	return all
}

// jobs are the scrape configs that the Prometheus operator generates from the chart's PodMonitor.
func jobs(t *testing.T, monitor monitoring.PodMonitor, kubeconfig string) (jobs []any) {
	t.Helper()
	left := *monitor.Spec.DeepCopy()
	left.Selector, left.PodMetricsEndpoints = metav1.LabelSelector{}, nil
	if !reflect.DeepEqual(left, monitoring.PodMonitorSpec{}) {
		t.Fatalf("a part of the PodMonitor is not rendered here: %+v", left)
	}
	name := monitor.Namespace + "/" + monitor.Name
	for i, endpoint := range monitor.Spec.PodMetricsEndpoints {
		left := *endpoint.DeepCopy()
		left.Port, left.Interval, left.HonorLabels, left.RelabelConfigs = nil, "", false, nil
		if !reflect.DeepEqual(left, monitoring.PodMetricsEndpoint{}) {
			t.Fatalf("a part of the PodMonitor is not rendered here: %+v", left)
		}
		relabel := append([]relabelling{{Action: "drop", SourceLabels: []string{"__meta_kubernetes_pod_phase"}, Regex: "(Failed|Succeeded)"}}, selecting(t, monitor.Spec.Selector)...)
		relabel = append(relabel,
			relabelling{Action: "keep", SourceLabels: []string{"__meta_kubernetes_pod_container_port_name"}, Regex: *endpoint.Port},
			relabelling{SourceLabels: []string{"__meta_kubernetes_namespace"}, TargetLabel: "namespace"},
			relabelling{SourceLabels: []string{"__meta_kubernetes_pod_container_name"}, TargetLabel: "container"},
			relabelling{SourceLabels: []string{"__meta_kubernetes_pod_name"}, TargetLabel: "pod"},
			relabelling{TargetLabel: "job", Replacement: name},
			relabelling{TargetLabel: "endpoint", Replacement: *endpoint.Port})
		for _, config := range endpoint.RelabelConfigs {
			var sources []string
			for _, label := range config.SourceLabels {
				sources = append(sources, string(label))
			}
			if config.Separator != nil || config.Replacement != nil || config.Modulus != 0 {
				t.Fatalf("a part of the PodMonitor is not rendered here: %+v", config)
			}
			relabel = append(relabel, relabelling{SourceLabels: sources, Regex: config.Regex, TargetLabel: config.TargetLabel, Action: config.Action})
		}
		jobs = append(jobs, map[string]any{
			"job_name": fmt.Sprintf("podMonitor/%s/%d", name, i), "scrape_interval": endpoint.Interval, "scrape_timeout": endpoint.Interval,
			"honor_labels":          endpoint.HonorLabels,
			"kubernetes_sd_configs": []any{map[string]any{"role": "pod", "kubeconfig_file": kubeconfig, "namespaces": map[string]any{"names": []string{monitor.Namespace}}}},
			"relabel_configs":       relabel,
		})
	}
	return jobs
}

// startPrometheus starts a Prometheus that stops with the test or with this process.
func startPrometheus(t *testing.T, node string) prometheus {
	t.Helper()
	monitor, rules := monitoringObjects(t)
	directory := t.TempDir()
	write := func(name string, content any) string {
		text, err := json.Marshal(content) // JSON is YAML too
		if err == nil {
			err = os.WriteFile(filepath.Join(directory, name), text, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		return filepath.Join(directory, name)
	}
	config := write("prometheus.yaml", map[string]any{
		"global":         map[string]any{"evaluation_interval": scrapeInterval.String()},
		"rule_files":     []string{write("rules.yaml", rules.Spec)},
		"scrape_configs": jobs(t, monitor, onNode(t, node, "echo $KUBECONFIG")),
	})
	const port = "9090"
	address := addressOf(t, node) + ":" + port
	// It stops when the shell's stdin is closed.
	process := exec.Command(clusterTool, "on", node, "sh", "-c", `"$@" & read -r _; kill $!; wait $!`, "sh",
		absolute("target/e2e/bin/prometheus"), "--config.file="+config, "--storage.tsdb.path="+filepath.Join(directory, "data"), "--web.listen-address="+address)
	var log strings.Builder
	process.Stdout, process.Stderr = &log, &log
	input, err := process.StdinPipe()
	if err == nil {
		err = process.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		input.Close()
		process.Wait()
		if t.Failed() {
			t.Logf("Prometheus: %s", log.String())
		}
	})
	p := prometheus{t, promv1.NewAPI(proxied(t, node, port)), rules.Spec.Groups}
	eventually(t, 60*time.Second, "Prometheus responds", func() error {
		_, err := p.Buildinfo(background)
		return err
	})
	return p
}

// addressOf is a node's address inside its cluster.
func addressOf(t *testing.T, node string) string {
	t.Helper()
	object, err := kube.CoreV1().Nodes().Get(background, node, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, address := range object.Status.Addresses {
		if address.Type == corev1.NodeInternalIP {
			return address.Address
		}
	}
	t.Fatalf("node %s has no address", node)
	return ""
}

// proxied is a client for a port of a node through the API server, because the cluster has its own network.
func proxied(t *testing.T, node, port string) api.Client {
	t.Helper()
	transport, err := rest.TransportFor(access)
	if err != nil {
		t.Fatal(err)
	}
	client, err := api.NewClient(api.Config{Address: access.Host + "/api/v1/nodes/http:" + node + ":" + port + "/proxy", Client: &http.Client{Transport: transport, Timeout: time.Minute}})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// waitTargets waits until exactly the controllers and agents are scraped, each with its node as a label.
func (p prometheus) waitTargets() {
	p.Helper()
	eventually(p, 3*time.Minute, "controller and agents are scraped", func() error {
		var pods, scraped []string
		for _, pod := range append(componentPods(p.T, "controller"), componentPods(p.T, "agent")...) {
			pods = append(pods, pod.Name+" on "+pod.Spec.NodeName+": up")
		}
		targets, err := p.Targets(background)
		if err != nil {
			return err
		}
		for _, target := range targets.Active {
			scraped = append(scraped, fmt.Sprintf("%s on %s: %s", target.Labels["pod"], target.Labels["node"], target.Health))
		}
		slices.Sort(pods)
		slices.Sort(scraped)
		if len(pods) < 3 || !slices.Equal(pods, scraped) {
			return fmt.Errorf("pods are %v, targets %v", pods, scraped)
		}
		return nil
	})
}

// waitRules waits until each of the chart's alerts was evaluated, without an error.
func (p prometheus) waitRules() {
	p.Helper()
	var expected []string
	for _, group := range p.alerts {
		for _, rule := range group.Rules {
			expected = append(expected, rule.Alert)
		}
	}
	slices.Sort(expected)
	eventually(p, time.Minute, "all alerts are evaluated", func() error {
		rules, err := p.Rules(background, nil)
		if err != nil {
			return err
		}
		var evaluated []string
		for _, group := range rules.Groups {
			for _, each := range group.Rules {
				rule, isAlert := each.(promv1.AlertingRule)
				if !isAlert || rule.Health != promv1.RuleHealthGood || rule.LastError != "" {
					return fmt.Errorf("%+v", each)
				}
				evaluated = append(evaluated, rule.Name)
			}
		}
		slices.Sort(evaluated)
		if len(evaluated) < 15 || !slices.Equal(expected, evaluated) {
			return fmt.Errorf("the chart has %v, evaluated are %v", expected, evaluated)
		}
		return nil
	})
}

// waitFor waits until a query, which may compare, has a result.
func (p prometheus) waitFor(limit time.Duration, query string) {
	p.Helper()
	eventually(p, limit, query, func() error {
		result, _, err := p.Query(background, query, time.Now())
		if err != nil {
			return err
		}
		if vector, ok := result.(model.Vector); !ok || len(vector) == 0 {
			return fmt.Errorf("unexpected result: %v", result)
		}
		return nil
	})
}

// waitNoAlerts waits until no alert is firing or pending.
func (p prometheus) waitNoAlerts(limit time.Duration) {
	p.Helper()
	eventually(p, limit, "there is no alert", func() error {
		result, err := p.Alerts(background)
		if err == nil && len(result.Alerts) > 0 {
			err = fmt.Errorf("alerts are %v", result.Alerts)
		}
		return err
	})
}

// waitSeries waits until every series exists that alerts and dashboard read.
func (p prometheus) waitSeries(shown dashboard.Dashboard) {
	p.Helper()
	read := map[string]bool{}
	for _, group := range p.alerts {
		for _, rule := range group.Rules {
			for _, selector := range dashboard.Selectors(rule.Expr.String()) {
				read[selector] = true
			}
		}
	}
	for _, panel := range shown.All() {
		for _, target := range panel.Targets {
			query, err := target.Query(rateInterval)
			if err != nil {
				p.Fatal(err)
			}
			for _, selector := range dashboard.Selectors(query) {
				read[selector] = true
			}
		}
	}
	if len(read) < 40 {
		p.Fatalf("the queries read only %d series: %v", len(read), read)
	}
	for selector := range read {
		if !onlyOnV2(selector) {
			p.waitFor(time.Minute, selector)
		}
	}
}

// onlyOnV2 reports whether a series exists only on cgroup v2 nodes and there is none here.
func onlyOnV2(what string) bool {
	waits := strings.Contains(what, "plimsoll_agent_pod_stalled_percent") || strings.Contains(what, "plimsoll_agent_node_protected_stalled_percent")
	return waits && !slices.Contains(nodes, "v2")
}

func TestPrometheusHasTheSeriesOfDashboardAndAlerts(t *testing.T) {
	needShell(t)
	const node = "v1" // where Prometheus runs, too
	if !slices.Contains(nodes, node) {
		t.Skip("needs node v1")
	}
	for _, each := range nodes { // always in this order. No alert may fire in a healthy cluster, so no other test may act.
		busy[each].Lock()
		t.Cleanup(busy[each].Unlock)
	}
	shown, err := dashboard.Read(absolute("charts/plimsoll/files/dashboard.json"))
	if err != nil {
		t.Fatal(err)
	}
	s := newScene(t, node)
	p := startPrometheus(t, node)
	p.waitTargets()
	p.waitRules()
	from := time.Now()
	s.exerciseAll(p)
	p.waitSeries(shown)
	var answers dashboard.Answers
	eventually(t, time.Minute, "each query of the dashboard has a result", func() error {
		answers, err = shown.Ask(p.API, from, time.Now(), rateInterval)
		if missing := slices.DeleteFunc(shown.Missing(answers), onlyOnV2); err == nil && len(missing) > 0 {
			err = fmt.Errorf("no result for\n%s", strings.Join(missing, "\n"))
		}
		return err
	})
	if err := os.WriteFile(*picture, []byte(shown.Draw(answers)), 0o644); err != nil {
		t.Fatal(err)
	}
	s.set(cold)
	p.waitFor(time.Minute, `plimsoll_agent_throttled_pods{node="v1"} == 0`)
	p.waitNoAlerts(2 * time.Minute)
}

// exerciseAll has one pod throttled, one skipped and one evicted, the node closed, and a Preview rule on the same metric; then nothing in
// force; then the throttle again. Each step waits until Prometheus shows it.
func (s *scene) exerciseAll(p prometheus) {
	s.Helper()
	throttle, closeNode, evict, preview := s.name+"-throttle", s.name+"-close", s.name+"-evict", s.name+"-preview"
	s.running(
		work{name: "batch", args: []string{"burn", "150"}, limits: "200m", requests: "10m"},
		work{name: "spared", args: []string{"burn", "20"}, requests: "10m", annotations: map[string]string{"plimsoll.dev/protected": "true"}},
	)
	s.owned(work{name: "moved", args: []string{"burn", "30"}, requests: "10m"})
	s.action(throttle, "{coolDownSeconds: 2, throttle: {cpuThrottle: {stepCPURatio: 10, minCPURatio: 30}}}")
	s.action(closeNode, "{coolDownSeconds: 2}")
	s.action(evict, "{coolDownSeconds: 2, eviction: {terminationGracePeriodSeconds: 1}}")
	s.allow(throttle+"-batch", "batch", throttle)
	s.allow(throttle+"-spared", "spared", throttle)
	s.allow(evict, "moved", evict)
	evictMetric := s.metric() + "_evict"
	s.Cleanup(func() { s.setMetric(evictMetric, 0) })
	s.setMetric(evictMetric, cold)
	s.rule(throttle, rule{action: throttle})
	s.rule(closeNode, rule{action: closeNode})
	s.rule(preview, rule{action: throttle, strategy: "Preview"})
	// The dashboard shows its threshold; it has a value only on cgroup v2.
	s.rule(s.name+"-waits", rule{action: throttle, strategy: "Preview", metric: "protected_cpu_delay_p95", threshold: 100})
	s.rule(evict, rule{action: evict, metric: evictMetric})
	for _, name := range []string{throttle, closeNode, preview, evict} {
		s.waitRulesEnforced(name)
	}
	p.waitFor(time.Minute, fmt.Sprintf(`count(plimsoll_agent_rule_value{node="v1",rule=~"%s-.*"} < plimsoll_agent_rule_threshold) == 4`, s.name))

	throttled := fmt.Sprintf(`plimsoll_agent_throttled_pod_cpu_percent{node="v1",namespace="%s",pod="batch"} == 30`, s.name)
	s.set(hot)
	p.waitFor(2*time.Minute, throttled)
	p.waitFor(time.Minute, `plimsoll_agent_scheduling_disabled{node="v1",effect="NoSchedule"} == 1`)
	p.waitFor(time.Minute, `plimsoll_agent_would{node="v1"} > 0`)
	s.setMetric(evictMetric, hot)
	p.waitFor(2*time.Minute, `plimsoll_agent_evictions_total{node="v1",outcome="accepted"} > 0`)
	s.setMetric(evictMetric, cold)
	s.set(cold)
	p.waitFor(2*time.Minute, `plimsoll_agent_throttled_pods{node="v1"} == 0`)
	p.waitFor(time.Minute, `plimsoll_agent_scheduling_disabled{node="v1",effect="NoSchedule"} == 0`)
	s.set(hot)
	p.waitFor(2*time.Minute, throttled)
}
