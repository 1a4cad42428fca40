package dashboard

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// show writes a value in the units that Grafana has names for.
func show(value float64, unit string) string {
	switch unit {
	case "percent":
		return digits(value) + " %"
	case "percentunit":
		return digits(value*100) + " %"
	case "reqps":
		return digits(value) + " req/s"
	case "opm":
		return digits(value) + " /min"
	case "s":
		return seconds(value)
	case "bytes":
		return bytes(value)
	}
	return short(value)
}

// digits writes three significant digits, and no zeros behind the point that say nothing.
func digits(value float64) string {
	if value == 0 {
		return "0"
	}
	decimals := 2 - int(math.Floor(math.Log10(math.Abs(value))))
	text := strconv.FormatFloat(value, 'f', max(0, decimals), 64)
	if strings.Contains(text, ".") {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	return text
}

func seconds(value float64) string {
	for _, unit := range []struct {
		name string
		of   float64
	}{{"min", 60}, {"s", 1}, {"ms", 1e-3}} {
		if math.Abs(value) >= 2*unit.of || (unit.of < 60 && math.Abs(value) >= unit.of) {
			return digits(value/unit.of) + " " + unit.name
		}
	}
	if value == 0 {
		return "0 s"
	}
	return digits(value*1e6) + " µs"
}

func bytes(value float64) string {
	for power, unit := range []string{"GiB", "MiB", "KiB"} {
		if of := math.Pow(1024, float64(3-power)); math.Abs(value) >= of {
			return digits(value/of) + " " + unit
		}
	}
	return digits(value) + " B"
}

func short(value float64) string {
	for _, unit := range []struct {
		name string
		of   float64
	}{{"G", 1e9}, {"M", 1e6}, {"k", 1e3}} {
		if math.Abs(value) >= unit.of {
			return digits(value/unit.of) + unit.name
		}
	}
	return digits(value)
}

// scale is an axis from least to most, with a line at each multiple of step.
type scale struct{ least, most, step float64 }

// axis holds values in some four steps of 1, 2 or 5 times a power of ten, of bytes also of 1024; bounds that are given stay.
func axis(low, high float64, field Field) scale {
	if field.Min != nil {
		low = *field.Min
	}
	if field.Max != nil {
		high = *field.Max
	}
	if field.Unit == "bytes" && high > 1 {
		of := math.Pow(1024, math.Floor(math.Log2(high)/10))
		whole := axis(low/of, high/of, Field{})
		return scale{whole.least * of, whole.most * of, whole.step * of}
	}
	if high <= low {
		high = low + 1
	}
	magnitude := math.Pow(10, math.Floor(math.Log10((high-low)/4)))
	step := magnitude * 10
	for _, times := range []float64{1, 2, 5} {
		if (high-low)/(times*magnitude) <= 5 {
			step = times * magnitude
			break
		}
	}
	return scale{math.Floor(low/step) * step, math.Ceil(high/step-1e-9) * step, step}
}

// ticks are where its lines are.
func (s scale) ticks() (at []float64) {
	for i := 0; ; i++ {
		value := s.least + float64(i)*s.step
		if value > s.most+s.step/2 {
			return at
		}
		at = append(at, value)
	}
}

// since writes a time from the picture's left edge.
func since(seconds float64) string {
	whole := int(math.Round(seconds))
	return fmt.Sprintf("%d:%02d", whole/60, whole%60)
}
