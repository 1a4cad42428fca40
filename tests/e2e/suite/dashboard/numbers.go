package dashboard

import (
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/common/model"
)

// show formats a value in a unit that Grafana has a name for.
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

// digits formats a value with three significant digits, without trailing zeros after the decimal point.
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

// scale is an axis from low to high, with a line at each multiple of step.
type scale struct{ low, high, step float64 }

// axis covers the values in about four steps of 1, 2 or 5 times a power of ten, for bytes also times a power of 1024. Bounds of the field are
// used as they are.
func axis(low, high float64, field Field) scale {
	if field.Min != nil {
		low = *field.Min
	}
	if field.Max != nil {
		high = *field.Max
	}
	if field.Unit == "bytes" && high > 1 {
		of := math.Pow(1024, math.Floor(math.Log2(high)/10))
		scaled := axis(low/of, high/of, Field{})
		return scale{scaled.low * of, scaled.high * of, scaled.step * of}
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

// ticks are the values of its lines.
func (s scale) ticks() (at []float64) {
	for i := 0; ; i++ {
		value := s.low + float64(i)*s.step
		if value > s.high+s.step/2 {
			return at
		}
		at = append(at, value)
	}
}

// clock formats a time of day in UTC, with seconds where the whole graph covers only some minutes.
func clock(at model.Time, covered time.Duration) string {
	if covered < 10*time.Minute {
		return at.Time().UTC().Format("15:04:05")
	}
	return at.Time().UTC().Format("15:04")
}
