package dashboard

import (
	"encoding/json"
	"encoding/xml"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
)

func TestNumbersAreFormattedForPeople(t *testing.T) {
	for want, got := range map[string]string{
		"12.3 %": show(12.34, "percent"), "180 %": show(1.8, "percentunit"), "0": show(0, "short"), "1.5k": show(1500, "short"),
		"90 s": show(90, "s"), "3 min": show(180, "s"), "250 ms": show(0.25, "s"), "30 µs": show(30e-6, "s"), "0 s": show(0, "s"),
		"0.05 req/s": show(0.05, "reqps"), "6 /min": show(6, "opm"), "1.5 GiB": show(1.5*(1<<30), "bytes"), "12 B": show(12, "bytes"), "1234": digits(1234.4),
	} {
		if got != want {
			t.Errorf("%s is written as %s", want, got)
		}
	}
}

func TestAxisCoversValuesInFewSteps(t *testing.T) {
	zero, hundred := 0.0, 100.0
	for _, c := range []struct {
		low, high float64
		field     Field
		want      scale
	}{
		{3, 3, Field{Min: &zero}, scale{0, 3, 1}},
		{0, 0, Field{Min: &zero}, scale{0, 1, 0.2}},
		{20, 100.4, Field{Min: &zero, Max: &hundred}, scale{0, 100, 20}},
		{-5, 5, Field{}, scale{-6, 6, 2}},
		{0, 9 << 20, Field{Unit: "bytes"}, scale{0, 10 << 20, 2 << 20}},
	} {
		got := axis(c.low, c.high, c.field)
		if got != c.want {
			t.Errorf("%v to %v: %v, not %v", c.low, c.high, got, c.want)
		}
		if ticks := got.ticks(); len(ticks) < 3 || len(ticks) > 7 {
			t.Errorf("%v has the ticks %v", got, ticks)
		}
	}
}

func TestUnknownVariableIsAnError(t *testing.T) {
	query, err := Target{Expr: `rate(a{node=~"$node"}[$__rate_interval])`}.Query(20 * time.Second)
	if err != nil || query != `rate(a{node=~".*"}[20s])` {
		t.Errorf("the query is %s (%v)", query, err)
	}
	if query, err := (Target{Expr: "a[$__range]"}).Query(time.Second); err == nil {
		t.Errorf("the query is %s", query)
	}
}

func TestPictureShowsAnswersAndMissingData(t *testing.T) {
	one := 1.0
	drawn := Dashboard{Panels: []Panel{
		{ID: 1, Type: "row", Title: "A < row", GridPos: Place{0, 0, 24, 1}},
		{ID: 2, Type: "timeseries", Title: "Course", GridPos: Place{0, 1, 8, 8}, Targets: []Target{{RefID: "A", LegendFormat: "{{node}} & more"}}},
		{ID: 3, Type: "timeseries", Title: "Empty", GridPos: Place{8, 1, 8, 8}, Targets: []Target{{RefID: "A"}}},
		{ID: 4, Type: "stat", Title: "Now", GridPos: Place{16, 1, 4, 4}, Targets: []Target{{RefID: "A"}}},
		{ID: 5, Type: "stat", Title: "Mapped", GridPos: Place{20, 1, 4, 4}, Targets: []Target{{RefID: "A"}}},
	}}
	drawn.Annotations.List = []Annotation{{Name: "Acts", IconColor: "orange"}, {Name: "Elsewhere"}}
	drawn.Annotations.List[0].Filter.IDs = []int{2}
	drawn.Panels[3].FieldConfig.Defaults.Thresholds.Steps = []Step{{Color: "green"}, {Color: "red", Value: &one}}
	drawn.Panels[4].FieldConfig.Defaults.Mappings = []Mapping{{"value", map[string]json.RawMessage{"1": json.RawMessage(`{"text":"yes"}`)}}}
	points := []model.SamplePair{{Timestamp: 0, Value: 1}, {Timestamp: 1000, Value: 2}, {Timestamp: 5000, Value: 3}, {Timestamp: 6000, Value: 3}}
	picture := drawn.Draw(Answers{
		Courses: map[Key]model.Matrix{{2, "A"}: {{Metric: model.Metric{"node": "v1"}, Values: points}}},
		Values:  map[Key]model.Vector{{4, "A"}: {{Value: 7}}, {5, "A"}: {{Value: 1}}},
		Moments: map[string][]model.Time{"Acts": {3000}, "Elsewhere": {3000}},
		To:      6000,
	})
	decoder := xml.NewDecoder(strings.NewReader(picture))
	for {
		if _, err := decoder.Token(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err, picture)
		}
	}
	for _, part := range []string{"A &lt; row", "v1 &amp; more", "No data", `fill="` + named["red"] + `">7<`, ">yes<", ">00:00:03<", "<title>Acts<"} {
		if !strings.Contains(picture, part) {
			t.Errorf("%s is not in\n%s", part, picture)
		}
	}
	if strings.Contains(picture, "<title>Elsewhere<") {
		t.Error("an annotation is in a panel that it does not name")
	}
	if got := Titles(picture); !slices.Equal(got, []string{"A < row", "Course", "Empty", "Now", "Mapped"}) {
		t.Errorf("the titles are %q", got)
	}
	if strings.Count(picture, "No data") != 1 {
		t.Error("a panel with data shows No data, or one without data does not")
	}
	// There is no data for four seconds: the line has two parts.
	for _, part := range strings.Split(picture, "\n") {
		if strings.Contains(part, `stroke-width="1.5"`) && strings.Count(part, "M") != 2 {
			t.Errorf("the line is %s", part)
		}
	}
}

func TestOverridesAreOfTheirColumnOrQuery(t *testing.T) {
	const text = `{"fieldConfig": {"defaults": {"unit": "short"}, "overrides": [
		{"matcher": {"id": "byName", "options": "CPU"}, "properties": [{"id": "unit", "value": "percent"},
			{"id": "thresholds", "value": {"mode": "absolute", "steps": [{"color": "text", "value": null}, {"color": "red", "value": 1}]}}]},
		{"matcher": {"id": "byFrameRefID", "options": "B"}, "properties": [{"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [6, 4]}},
			{"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}}]}]}}`
	var panel Panel
	if err := json.Unmarshal([]byte(text), &panel); err != nil {
		t.Fatal(err)
	}
	if got := []string{panel.unitOf("CPU"), panel.unitOf("B"), panel.colourOf("CPU", 0.9), panel.colourOf("CPU", 1), panel.colourOf("B", 1)}; !slices.Equal(got, []string{"percent", "short", "text", "red", ""}) {
		t.Errorf("units and colours are %q", got)
	}
	for query, want := range map[string]bool{"A": false, "B": true, "CPU": false} {
		if colour, dashed := panel.style(query); dashed != want || (colour == "red") != want {
			t.Errorf("query %s is %s, dashed: %v", query, colour, dashed)
		}
	}
}

// The picture in docs is of the first rows of the chart's dashboard: whoever changes a title draws it again.
func TestPictureHasTheTitlesOfTheDashboard(t *testing.T) {
	picture, err := os.ReadFile("../../../../docs/dashboard.svg")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, panel := range inDocs(t).Panels {
		want = append(want, panel.Title)
	}
	if got := Titles(string(picture)); len(want) < 10 || !slices.Equal(got, want) {
		t.Errorf("the dashboard has the titles\n%q\nits picture\n%q: run make dashboard-picture", want, got)
	}
}

// inDocs is the part of the chart's dashboard that docs/dashboard.svg shows.
func inDocs(t *testing.T) Dashboard {
	t.Helper()
	read, err := Read("../../../../charts/plimsoll/files/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	return read.Rows(2)
}

func TestQueryNamesItsSeries(t *testing.T) {
	got := strings.Join(Selectors(`max(plimsoll_a_total{b="c", d=~".*"} and on (instance) plimsoll_leader == 1) > 0.1 * rate(cpu_usage_avg_5m[5m])`), "; ")
	if want := `plimsoll_a_total{b="c", d=~".*"}; plimsoll_leader; cpu_usage_avg_5m`; got != want {
		t.Errorf("the selectors are %s", got)
	}
}

func TestQueryWithoutNumberIsMissing(t *testing.T) {
	nan := model.SampleValue(math.NaN())
	queried := Dashboard{Panels: []Panel{{ID: 1, Title: "One", Targets: []Target{{RefID: "A", Expr: "a"}, {RefID: "B", Expr: "b"}, {RefID: "C", Expr: "c"}}}}}
	got := queried.Missing(Answers{
		Values:  map[Key]model.Vector{{1, "A"}: {{Value: 0}}, {1, "B"}: {{Value: nan}}},
		Courses: map[Key]model.Matrix{{1, "C"}: {{Values: []model.SamplePair{{Value: nan}, {Value: 1}}}}},
	})
	if len(got) != 1 || got[0] != "One: b" {
		t.Errorf("missing are %v", got)
	}
}
