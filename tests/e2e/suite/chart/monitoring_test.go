//go:build e2e

package chart

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"sigs.k8s.io/yaml"

	"plimsoll.dev/suite/plane"
)

// decoded is a rendered object of the Prometheus operator.
func decoded[T any](t *testing.T, rendered, kind string) (into T) {
	t.Helper()
	text, err := yaml.Marshal(one(t, rendered, kind, "plimsoll-monitoring"))
	if err == nil {
		err = yaml.UnmarshalStrict(text, &into)
	}
	if err != nil {
		t.Fatal(err)
	}
	return into
}

func TestMonitorsHaveTheConfiguredOptions(t *testing.T) {
	for _, kind := range []string{"podMonitor", "serviceMonitor"} {
		options := `monitoring.` + kind + `={"enabled":true,"namespace":"observability","scrapeTimeout":"9s","annotations":{"a":"b"},"labels":{"c":"d"},` +
			`"relabelings":[{"action":"replace","targetLabel":"cluster","replacement":"eu"}],"metricRelabelings":[{"action":"drop","sourceLabels":["__name__"],"regex":"x"}]}`
		rendered, err := render(t, "--set-json", options)
		if err != nil {
			t.Fatal(err)
		}
		var object interface {
			GetNamespace() string
			GetAnnotations() map[string]string
			GetLabels() map[string]string
		}
		var selected monitoring.NamespaceSelector
		var timeout, interval monitoring.Duration
		var relabelings, series []monitoring.RelabelConfig
		if kind == "podMonitor" {
			monitor := decoded[monitoring.PodMonitor](t, rendered, monitoring.PodMonitorsKind)
			endpoint := monitor.Spec.PodMetricsEndpoints[0]
			object, selected, timeout, interval = &monitor, monitor.Spec.NamespaceSelector, endpoint.ScrapeTimeout, endpoint.Interval
			relabelings, series = endpoint.RelabelConfigs, endpoint.MetricRelabelConfigs
		} else {
			monitor := decoded[monitoring.ServiceMonitor](t, rendered, monitoring.ServiceMonitorsKind)
			endpoint := monitor.Spec.Endpoints[0]
			object, selected, timeout, interval = &monitor, monitor.Spec.NamespaceSelector, endpoint.ScrapeTimeout, endpoint.Interval
			relabelings, series = endpoint.RelabelConfigs, endpoint.MetricRelabelConfigs
		}
		if object.GetNamespace() != "observability" || !slices.Equal(selected.MatchNames, []string{"plimsoll"}) {
			t.Errorf("the %s is in namespace %s and selects %v", kind, object.GetNamespace(), selected)
		}
		if object.GetAnnotations()["a"] != "b" || object.GetLabels()["c"] != "d" || timeout != "9s" || interval != "30s" {
			t.Errorf("the %s has the annotations %v, labels %v, timeout %s and interval %s", kind, object.GetAnnotations(), object.GetLabels(), timeout, interval)
		}
		if len(relabelings) != 2 || relabelings[0].TargetLabel != "node" || relabelings[1].TargetLabel != "cluster" || len(series) != 1 || series[0].Action != "drop" {
			t.Errorf("the %s relabels targets %+v and series %+v", kind, relabelings, series)
		}
	}
}

// alerts are the rules of a PrometheusRule, by name.
func alerts(groups []monitoring.RuleGroup) map[string]monitoring.Rule {
	found := map[string]monitoring.Rule{}
	for _, group := range groups {
		for _, rule := range group.Rules {
			found[rule.Alert] = rule
		}
	}
	return found
}

// TestAlertsAreThoseOfTheFile by default: it can be loaded without the operator.
func TestAlertsAreThoseOfTheFile(t *testing.T) {
	text, err := os.ReadFile(plane.Absolute(t, chart+"/files/alerts.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var file monitoring.PrometheusRuleSpec
	if err := yaml.UnmarshalStrict(text, &file); err != nil {
		t.Fatal(err)
	}
	rendered, err := render(t, "--set", "monitoring.alerts.enabled=true")
	if err != nil {
		t.Fatal(err)
	}
	byDefault := decoded[monitoring.PrometheusRule](t, rendered, monitoring.PrometheusRuleKind)
	if !equality.Semantic.DeepEqual(byDefault.Spec, file) {
		t.Errorf("by default the PrometheusRule has\n%+v\ninstead of\n%+v", byDefault.Spec, file)
	}
	// Their runbook has these headings.
	page, err := os.ReadFile(plane.Absolute(t, "docs/runbook.md"))
	if err != nil {
		t.Fatal(err)
	}
	anchors := map[string]bool{}
	for line := range strings.Lines(string(page)) {
		if heading, is := strings.CutPrefix(strings.TrimSpace(line), "## "); is {
			anchors[strings.ReplaceAll(strings.ToLower(heading), " ", "-")] = true
		}
	}
	for name, rule := range alerts(file.Groups) {
		url, anchor, _ := strings.Cut(rule.Annotations["runbook_url"], "#")
		if !anchors[anchor] || !strings.HasSuffix(url, "/docs/runbook.md") {
			t.Errorf("the runbook of %s is %s, but docs/runbook.md has no such heading", name, rule.Annotations["runbook_url"])
		}
	}
}

func TestAlertsCanBeLeftOutLabelledAndLinked(t *testing.T) {
	spec := func(set ...string) monitoring.PrometheusRuleSpec {
		t.Helper()
		rendered, err := render(t, "--set", strings.Join(append(set, "monitoring.alerts.enabled=true"), ","))
		if err != nil {
			t.Fatal(err)
		}
		return decoded[monitoring.PrometheusRule](t, rendered, monitoring.PrometheusRuleKind).Spec
	}
	all := alerts(spec().Groups)
	some := alerts(spec("monitoring.alerts.disabled={PlimsollCapReached,PlimsollStopped}", "monitoring.alerts.additionalLabels.team=platform",
		"monitoring.alerts.additionalLabels.severity=none", "monitoring.alerts.runbookURL=https://wiki.example/plimsoll").Groups)
	names := slices.Sorted(maps.Keys(all))
	wanted := slices.DeleteFunc(names, func(name string) bool { return name == "PlimsollCapReached" || name == "PlimsollStopped" })
	if found := slices.Sorted(maps.Keys(some)); !slices.Equal(found, wanted) {
		t.Errorf("without two alerts these are left: %v", found)
	}
	for name, rule := range some {
		if rule.Labels["team"] != "platform" || rule.Labels["severity"] != all[name].Labels["severity"] {
			t.Errorf("%s has the labels %v", name, rule.Labels)
		}
		if url := rule.Annotations["runbook_url"]; url != "https://wiki.example/plimsoll#"+strings.ToLower(name) || rule.Annotations["summary"] != all[name].Annotations["summary"] {
			t.Errorf("%s has the annotations %v", name, rule.Annotations)
		}
	}
	for name, rule := range alerts(spec("monitoring.alerts.runbookURL=").Groups) {
		if _, found := rule.Annotations["runbook_url"]; found || len(rule.Annotations) != 2 {
			t.Errorf("%s has the annotations %v", name, rule.Annotations)
		}
	}
	everyone := "monitoring.alerts.disabled={" + strings.Join(slices.Sorted(maps.Keys(all)), ",") + "}"
	if left := spec(everyone); len(left.Groups) != 0 {
		t.Errorf("all alerts are left out, but there are %v", left)
	}
	_, err := render(t, "--set", "monitoring.alerts.enabled=true,monitoring.alerts.disabled={PlimsollCap}")
	if err == nil || !strings.Contains(fmt.Sprint(err), "monitoring.alerts.disabled: there is no alert PlimsollCap; the alerts are PlimsollNoLeader, ") {
		t.Errorf("an unknown alert is not refused as expected: %v", err)
	}
}
