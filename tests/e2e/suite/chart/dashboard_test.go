//go:build e2e

package chart

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
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
	for _, panel := range panels(t) {
		for _, target := range panel.Targets {
			query, err := target.Query(time.Minute)
			if err != nil {
				t.Errorf("panel %s: %v", panel.Title, err)
			}
			rules = append(rules, rule{fmt.Sprintf("panel:%d:%s", panel.ID, target.RefID), query})
		}
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
	for _, panel := range panels(t) {
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

// panels are the panels of the chart's dashboard.
func panels(t *testing.T) []dashboard.Panel {
	t.Helper()
	read, err := dashboard.Read(plane.Absolute(t, chart+"/files/dashboard.json"))
	if err != nil || len(read.Panels) < 20 {
		t.Fatalf("the dashboard has only %d panels (%v)", len(read.Panels), err)
	}
	return read.Panels
}
