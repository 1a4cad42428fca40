//go:build e2e

package chart

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"plimsoll.dev/suite/dashboard"
	"plimsoll.dev/suite/plane"
)

func TestPrometheusParsesDashboardQueries(t *testing.T) {
	type rule struct {
		Record string `json:"record"`
		Expr   string `json:"expr"`
	}
	var rules []rule
	parse := func(where, name, query string, err error) {
		if err != nil {
			t.Errorf("%s: %v", where, err)
		}
		rules = append(rules, rule{name, query})
	}
	shown := read(t)
	for _, panel := range shown.All() {
		for _, target := range panel.Targets {
			query, err := target.Query(time.Minute)
			parse("panel "+panel.Title, fmt.Sprintf("panel:%d:%s", panel.ID, target.RefID), query, err)
		}
	}
	for i, annotation := range shown.Annotations.List {
		query, err := annotation.Query()
		parse("annotation "+annotation.Name, fmt.Sprintf("annotation:%d", i), query, err)
	}
	text, err := json.Marshal(map[string]any{"groups": []any{map[string]any{"name": "dashboard", "rules": rules}}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := run(t, "", "promtool", "check", "rules", file); err != nil {
		t.Error(err, out)
	}
}

func TestEachPanelHasAPositionAndADescription(t *testing.T) {
	ids, taken := map[int]bool{}, map[[2]int]string{}
	for _, panel := range read(t).All() {
		if ids[panel.ID] || panel.Title == "" {
			t.Errorf("panel %d, %q: its id is not unique, or it has no title", panel.ID, panel.Title)
		}
		ids[panel.ID] = true
		if panel.Type != "row" && (panel.Description == "" || panel.FieldConfig.Defaults.Unit == "" || len(panel.Targets) == 0) {
			t.Errorf("panel %s has no description, unit or query", panel.Title)
		}
		for _, target := range panel.Targets {
			if panel.Type == "timeseries" && target.LegendFormat == "" {
				t.Errorf("panel %s: query %s has no legend", panel.Title, target.Expr)
			}
		}
		for x := range panel.GridPos.W {
			for y := range panel.GridPos.H {
				at := [2]int{panel.GridPos.X + x, panel.GridPos.Y + y}
				if other, found := taken[at]; found || at[0] > 23 {
					t.Fatalf("panel %s overlaps %s, or is outside the grid", panel.Title, other)
				}
				taken[at] = panel.Title
			}
		}
	}
}

// A series of a node leads to the dashboard with only that node.
func TestSeriesOfNodesLinkToTheNode(t *testing.T) {
	linked := 0
	for _, panel := range read(t).All() {
		for _, target := range panel.Targets {
			if !strings.Contains(target.LegendFormat, "{{node}}") {
				continue
			}
			linked++
			if links := panel.FieldConfig.Defaults.Links; len(links) != 1 || !strings.HasPrefix(links[0].URL, "/d/plimsoll?var-node=${__field.labels.node}&") {
				t.Errorf("panel %s has the links %v", panel.Title, links)
			}
		}
	}
	if linked < 5 {
		t.Errorf("only %d queries have a series for each node", linked)
	}
}

func TestAnnotationsAreInPanelsThatExist(t *testing.T) {
	shown := read(t)
	if len(shown.Annotations.List) == 0 {
		t.Fatal("there are no annotations")
	}
	for _, annotation := range shown.Annotations.List {
		if annotation.Filter.IDs == nil {
			t.Errorf("annotation %s is in all panels", annotation.Name)
		}
		for _, id := range annotation.Filter.IDs {
			isIt := func(panel dashboard.Panel) bool { return panel.ID == id && panel.Type == "timeseries" }
			if !slices.ContainsFunc(shown.All(), isIt) {
				t.Errorf("annotation %s: there is no time series with the id %d", annotation.Name, id)
			}
		}
	}
}

// read reads the chart's dashboard.
func read(t *testing.T) dashboard.Dashboard {
	t.Helper()
	shown, err := dashboard.Read(plane.Absolute(t, chart+"/files/dashboard.json"))
	if err != nil || len(shown.All()) < 40 {
		t.Fatalf("the dashboard has only %d panels (%v)", len(shown.All()), err)
	}
	return shown
}
