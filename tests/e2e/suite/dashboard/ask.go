package dashboard

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"time"

	prometheus "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"
)

// points is the number of points per line.
const points = 120

// Ask runs all queries of the dashboard's panels for a time range, with rates over rateInterval.
func (d Dashboard) Ask(api prometheus.API, from, to time.Time, rateInterval time.Duration) (Answers, error) {
	answers := Answers{
		Courses: map[Key]model.Matrix{}, Values: map[Key]model.Vector{}, Moments: map[string][]model.Time{},
		From: model.TimeFromUnixNano(from.UnixNano()), To: model.TimeFromUnixNano(to.UnixNano()),
	}
	span := prometheus.Range{Start: from, End: to, Step: max(time.Second, to.Sub(from)/points)}
	for _, annotation := range d.Annotations.List {
		if err := answers.askMoments(api, annotation, span); err != nil {
			return answers, fmt.Errorf("annotation %s: %w", annotation.Name, err)
		}
	}
	for _, panel := range d.All() {
		for _, target := range panel.Targets {
			if err := answers.ask(api, panel, target, span, rateInterval); err != nil {
				return answers, fmt.Errorf("panel %s: %w", panel.Title, err)
			}
		}
	}
	return answers, nil
}

// askMoments finds when the annotation's query begins to have a result.
func (a Answers) askMoments(api prometheus.API, annotation Annotation, span prometheus.Range) error {
	query, err := annotation.Query()
	if err != nil {
		return err
	}
	result, _, err := api.QueryRange(context.Background(), query, span)
	if err != nil {
		return fmt.Errorf("%s: %w", query, err)
	}
	matrix, ok := result.(model.Matrix)
	if !ok {
		return fmt.Errorf("%s: unexpected type of result: %s", query, result.Type())
	}
	for _, stream := range matrix {
		for i, point := range stream.Values {
			if i == 0 || point.Timestamp-stream.Values[i-1].Timestamp > model.Time(span.Step.Milliseconds()) {
				a.Moments[annotation.Name] = append(a.Moments[annotation.Name], point.Timestamp)
			}
		}
	}
	return nil
}

func (a Answers) ask(api prometheus.API, panel Panel, target Target, span prometheus.Range, rateInterval time.Duration) error {
	query, err := target.Query(rateInterval)
	if err != nil {
		return err
	}
	background, key := context.Background(), Key{panel.ID, target.RefID}
	var result model.Value
	if target.Instant {
		result, _, err = api.Query(background, query, span.End)
	} else {
		result, _, err = api.QueryRange(background, query, span)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", query, err)
	}
	switch result := result.(type) {
	case model.Vector:
		a.Values[key] = result
	case model.Matrix:
		a.Courses[key] = result
	default:
		return fmt.Errorf("%s: unexpected type of result: %s", query, result.Type())
	}
	return nil
}

// Missing are the queries without a numeric result, each after the title of its panel.
func (d Dashboard) Missing(answers Answers) (missing []string) {
	for _, panel := range d.All() {
		for _, target := range panel.Targets {
			if key := (Key{panel.ID, target.RefID}); !slices.ContainsFunc(answers.numbers(key), isNumber) {
				missing = append(missing, panel.Title+": "+target.Expr)
			}
		}
	}
	return missing
}

// numbers are all values of a query's result.
func (a Answers) numbers(key Key) (all []float64) {
	for _, sample := range a.Values[key] {
		all = append(all, float64(sample.Value))
	}
	for _, stream := range a.Courses[key] {
		for _, point := range stream.Values {
			all = append(all, float64(point.Value))
		}
	}
	return all
}

var selector = regexp.MustCompile(`\b(?:plimsoll|cpu_usage|mem_usage)_\w+(?:{[^}]*})?`)

// Selectors are the selectors of our series in a query.
func Selectors(query string) []string { return selector.FindAllString(query, -1) }
