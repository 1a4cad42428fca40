// Package dashboard reads the chart's Grafana dashboard, runs the queries of its panels, and draws them.
package dashboard

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"
)

// Dashboard has the fields of a Grafana dashboard that this package uses.
type Dashboard struct {
	Title       string
	Panels      []Panel
	Annotations struct{ List []Annotation }
}

// Annotation marks the times at which its query has a result, in these panels.
type Annotation struct {
	Name, Expr, IconColor string
	Filter                struct{ IDs []int }
}

// Panel is a panel of a dashboard, or the title of a row of them; a collapsed row has its panels itself.
type Panel struct {
	ID                 int
	Type               string // row, stat, timeseries or table
	Title, Description string
	GridPos            Place
	Panels             []Panel
	FieldConfig        struct {
		Defaults  Field
		Overrides []Override
	}
	Targets         []Target
	Transformations []Transformation
}

// Place is in units of the grid: 24 columns, and rows of 30 pixels.
type Place struct{ X, Y, W, H int }

// Target is one query.
type Target struct {
	RefID, Expr, LegendFormat, Format string
	Instant                           bool
}

// Field is how values are shown.
type Field struct {
	Unit       string
	Min, Max   *float64
	Thresholds Thresholds
	Mappings   []Mapping
	Links      []Link
	Custom     struct {
		AxisLabel       string
		ThresholdsStyle struct{ Mode string }
	}
}

// Mapping maps values to text; only type value is used.
type Mapping struct {
	Type    string
	Options map[string]json.RawMessage
}

// Link is where a click on a value leads.
type Link struct{ Title, URL string }

// Thresholds are the colours of values.
type Thresholds struct{ Steps []Step }

// Step is the colour of values from Value on; the first step has no Value.
type Step struct {
	Color string
	Value *float64
}

// Override has properties of one column, by its name, or of one query.
type Override struct {
	Matcher    struct{ ID, Options string }
	Properties []struct {
		ID    string
		Value json.RawMessage
	}
}

// Transformation is one of a table's transformations; organize names its columns.
type Transformation struct {
	ID      string
	Options struct{ RenameByName map[string]string }
}

// Read reads a dashboard's file.
func Read(file string) (Dashboard, error) {
	var read Dashboard
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &read)
	}
	return read, err
}

// All are all panels, those of collapsed rows too.
func (d Dashboard) All() (all []Panel) {
	for _, panel := range d.Panels {
		all = append(append(all, panel), panel.Panels...)
	}
	return all
}

// Rows is the dashboard with its first rows only.
func (d Dashboard) Rows(count int) Dashboard {
	var first []Panel
	for _, panel := range d.Panels {
		if panel.Type == "row" {
			count--
		}
		if count >= 0 {
			first = append(first, panel)
		}
	}
	d.Panels = first
	return d
}

// Query is the target's query, with the dashboard's variables set to "All", and with this $__rate_interval.
func (t Target) Query(rateInterval time.Duration) (string, error) { return query(t.Expr, rateInterval) }

// Query is the annotation's query, likewise.
func (a Annotation) Query() (string, error) { return query(a.Expr, 0) }

func query(expr string, rateInterval time.Duration) (string, error) {
	if rateInterval > 0 {
		expr = strings.ReplaceAll(expr, "$__rate_interval", rateInterval.String())
	}
	query := strings.ReplaceAll(expr, "$node", ".*")
	if strings.Contains(query, "$") {
		return "", fmt.Errorf("%s: unknown dashboard variable", query)
	}
	return query, nil
}

// Key identifies a query of the dashboard.
type Key struct {
	Panel int
	RefID string
}

// override reads a property that a column (byName) or a query (byFrameRefID) has instead of the panel's.
func (p Panel) override(matcher, of, property string, into any) {
	for _, override := range p.FieldConfig.Overrides {
		if override.Matcher.ID != matcher || override.Matcher.Options != of {
			continue
		}
		for _, each := range override.Properties {
			if each.ID == property {
				// A value of another form is left out.
				_ = json.Unmarshal(each.Value, into)
			}
		}
	}
}

// unitOf is the unit of a table's column.
func (p Panel) unitOf(column string) string {
	unit := p.FieldConfig.Defaults.Unit
	p.override("byName", column, "unit", &unit)
	return unit
}

// colourOf is the colour of a cell of a table, by the thresholds of its column.
func (p Panel) colourOf(column string, value float64) string {
	var field Field
	p.override("byName", column, "thresholds", &field.Thresholds)
	return field.colour(value)
}

// style is how a query's series are drawn: their colour if it is fixed, and whether they are dashed.
func (p Panel) style(refID string) (colour string, dashed bool) {
	var fixed struct{ FixedColor string }
	var line struct{ Fill string }
	p.override("byFrameRefID", refID, "color", &fixed)
	p.override("byFrameRefID", refID, "custom.lineStyle", &line)
	return fixed.FixedColor, line.Fill == "dash"
}

// column is the title of a table's column with the values of a query.
func (p Panel) column(refID string) string {
	for _, transformation := range p.Transformations {
		if name, found := transformation.Options.RenameByName["Value #"+refID]; found {
			return name
		}
	}
	return refID
}

// mapped is the text that a panel shows instead of a number, if any.
func (f Field) mapped(number float64) (text string, found bool) {
	for _, mapping := range f.Mappings {
		var shown struct{ Text string }
		option, found := mapping.Options[fmt.Sprint(number)]
		if mapping.Type == "value" && found && json.Unmarshal(option, &shown) == nil {
			return shown.Text, true
		}
	}
	return "", false
}

// colour is the colour of a value by the thresholds, as Grafana names it.
func (f Field) colour(value float64) (name string) {
	for _, step := range f.Thresholds.Steps {
		if step.Value == nil || value >= *step.Value {
			name = step.Color
		}
	}
	return name
}
