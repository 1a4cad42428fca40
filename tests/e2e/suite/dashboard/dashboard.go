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
	Title  string
	Panels []Panel
}

// Panel is a panel of a dashboard, or the title of a row of them.
type Panel struct {
	ID                 int
	Type               string // row, stat, timeseries or table
	Title, Description string
	GridPos            Place
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
	Thresholds struct{ Steps []Step }
	Mappings   []Mapping
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

// Step is the colour of values from Value on; the first step has no Value.
type Step struct {
	Color string
	Value *float64
}

// Override is the unit of one column.
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

// Query is the target's query, with the dashboard's variables set to "All", and with this $__rate_interval.
func (t Target) Query(rateInterval time.Duration) (string, error) {
	query := strings.NewReplacer("$__rate_interval", rateInterval.String(), "$node", ".*").Replace(t.Expr)
	if strings.Contains(query, "$") {
		return "", fmt.Errorf("%s: unknown dashboard variable", t.Expr)
	}
	return query, nil
}

// Key identifies a query of the dashboard.
type Key struct {
	Panel int
	RefID string
}

// unitOf is the unit of a table's column.
func (p Panel) unitOf(column string) string {
	unit := p.FieldConfig.Defaults.Unit
	for _, override := range p.FieldConfig.Overrides {
		if override.Matcher.ID != "byName" || override.Matcher.Options != column {
			continue
		}
		for _, property := range override.Properties {
			if property.ID == "unit" {
				// Non-text values are not units.
				_ = json.Unmarshal(property.Value, &unit)
			}
		}
	}
	return unit
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
