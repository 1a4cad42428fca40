package dashboard

import (
	"fmt"
	"html"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/prometheus/common/model"
)

// Answers are Prometheus' results: a range for each time series panel, values at the end of the range for other panels, and the times that each
// annotation marks.
type Answers struct {
	Courses map[Key]model.Matrix
	Values  map[Key]model.Vector
	Moments map[string][]model.Time
	From    model.Time
	To      model.Time
}

const (
	column, line, gap = 50, 30, 8 // pixels
	width             = 24*column + gap
	letter            = 5.7 // pixels, the mean width of a letter at font size 10
	maxLegend         = 58  // letters of a legend's entry
)

// palette is Grafana's, for series; named has the colours of its thresholds.
var (
	palette = []string{"#56a64b", "#e0b400", "#3274d9", "#e02f44", "#8f3bb8", "#ff780a", "#37872d", "#1f60c4", "#c4162a", "#7c2ea3"}
	named   = map[string]string{"green": "#37872d", "red": "#c4162a", "orange": "#ff780a", "blue": "#1f60c4", "text": "#24292e", "": "#24292e"}
)

// Draw draws the panels as an SVG, in Grafana's arrangement and its light colours; of collapsed rows the title.
func (d Dashboard) Draw(answers Answers) string {
	height := 0
	var out strings.Builder
	for _, panel := range d.Panels {
		height = max(height, (panel.GridPos.Y+panel.GridPos.H)*line+gap)
		out.WriteString(panel.draw(answers, d.moments(panel, answers)))
	}
	head := fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="Inter, Helvetica, Arial, sans-serif" font-size="10" fill="#24292e">`+"\n",
		width, height, width, height)
	return head + `<rect width="100%" height="100%" fill="#f4f5f5"/>` + "\n" + out.String() + "</svg>\n"
}

// moment is a time that a panel marks.
type moment struct {
	what, colour string
	at           model.Time
}

// moments are those of the annotations of a panel.
func (d Dashboard) moments(panel Panel, answers Answers) (all []moment) {
	for _, annotation := range d.Annotations.List {
		if !slices.Contains(annotation.Filter.IDs, panel.ID) {
			continue
		}
		for _, at := range answers.Moments[annotation.Name] {
			all = append(all, moment{annotation.Name, named[annotation.IconColor], at})
		}
	}
	return all
}

// titleStyle is that of the titles of panels and rows, and of nothing else.
const titleStyle = `class="title" font-weight="600"`

var title = regexp.MustCompile(`<text [^>]*class="title"[^>]*>([^<]*)</text>`)

// Titles are the titles of panels and rows in a picture that Draw drew.
func Titles(picture string) (all []string) {
	for _, found := range title.FindAllStringSubmatch(picture, -1) {
		all = append(all, html.UnescapeString(found[1]))
	}
	return all
}

// box is a rectangle in pixels.
type box struct{ x, y, w, h float64 }

func (p Place) box() box {
	return box{float64(p.X*column + gap), float64(p.Y*line + gap), float64(p.W*column - gap), float64(p.H*line - gap)}
}

func (p Panel) draw(answers Answers, moments []moment) string {
	at := p.GridPos.box()
	if p.Type == "row" {
		return text(at.x, at.y+15, p.Title, titleStyle+` font-size="14"`)
	}
	frame := fmt.Sprintf(`<rect x="%.0f" y="%.0f" width="%.0f" height="%.0f" rx="2" fill="#ffffff" stroke="#d8d9da"><title>%s</title></rect>`+"\n",
		at.x, at.y, at.w, at.h, html.EscapeString(p.Description))
	frame += text(at.x+8, at.y+16, p.Title, titleStyle+` font-size="11"`)
	frame += text(at.x+at.w-8, at.y+16, p.FieldConfig.Defaults.Custom.AxisLabel, `text-anchor="end" fill="#6e7687" font-size="9"`)
	at = box{at.x + 8, at.y + 22, at.w - 16, at.h - 28}
	switch p.Type {
	case "stat":
		return frame + p.stat(at, answers)
	case "table":
		return frame + p.table(at, answers)
	}
	return frame + p.course(at, answers, moments)
}

// text is an SVG text element with these attributes.
func text(x, y float64, words, attributes string) string {
	if words == "" {
		return ""
	}
	return fmt.Sprintf(`<text x="%.0f" y="%.0f" %s>%s</text>`+"\n", x, y, attributes, html.EscapeString(words))
}

func (p Panel) stat(at box, answers Answers) string {
	field := p.FieldConfig.Defaults
	for _, target := range p.Targets {
		for _, sample := range answers.Values[Key{p.ID, target.RefID}] {
			value := float64(sample.Value)
			words, isMapped := field.mapped(value)
			if !isMapped {
				words = show(value, field.Unit)
			}
			attributes := fmt.Sprintf(`font-size="28" font-weight="600" text-anchor="middle" fill="%s"`, named[field.colour(value)])
			return text(at.x+at.w/2, at.y+at.h/2+16, words, attributes)
		}
	}
	return nothing(at)
}

func nothing(at box) string {
	return text(at.x+at.w/2, at.y+at.h/2+6, "No data", `text-anchor="middle" fill="#8e8e8e"`)
}

// table draws a row for each set of labels, sorted by the first column, the highest value first.
func (p Panel) table(at box, answers Answers) string {
	rows, cells := []string{}, map[string]map[string]float64{}
	for _, target := range p.Targets {
		vector := slices.Clone(answers.Values[Key{p.ID, target.RefID}])
		slices.SortFunc(vector, func(a, b *model.Sample) int { return int(math.Copysign(1, float64(b.Value-a.Value))) })
		for _, sample := range vector {
			row := legend("", sample.Metric)
			if cells[row] == nil {
				rows, cells[row] = append(rows, row), map[string]float64{}
			}
			cells[row][target.RefID] = float64(sample.Value)
		}
	}
	wide := at.w / float64(len(p.Targets)+1)
	out := text(at.x, at.y+14, "Node", `font-weight="600" fill="#1f60c4"`)
	for i, target := range p.Targets {
		out += text(at.x+wide*float64(i+1), at.y+14, p.column(target.RefID), `font-weight="600" fill="#1f60c4"`)
	}
	for n, row := range rows[:min(len(rows), int(at.h/20)-1)] {
		y := at.y + 34 + 20*float64(n)
		out += text(at.x, y, row, "")
		for i, target := range p.Targets {
			if value, found := cells[row][target.RefID]; found {
				column := p.column(target.RefID)
				out += text(at.x+wide*float64(i+1), y, show(value, p.unitOf(column)), fmt.Sprintf(`fill="%s"`, named[p.colourOf(column, value)]))
			}
		}
	}
	return out
}

// series is one line of a panel.
type series struct {
	name, colour string
	dashed       bool
	points       []model.SamplePair
}

func (p Panel) series(answers Answers) (all []series) {
	for _, target := range p.Targets {
		for _, stream := range answers.Courses[Key{p.ID, target.RefID}] {
			fixed, dashed := p.style(target.RefID)
			colour := palette[len(all)%len(palette)]
			if fixed != "" {
				colour = named[fixed]
			}
			all = append(all, series{legend(target.LegendFormat, stream.Metric), colour, dashed, stream.Values})
		}
	}
	return all
}

var label = regexp.MustCompile(`{{\s*(\w+)\s*}}`)

// legend is the name of a series according to the format; without a format, the values of its labels.
func legend(format string, labels model.Metric) string {
	if format != "" {
		return label.ReplaceAllStringFunc(format, func(found string) string {
			return string(labels[model.LabelName(label.FindStringSubmatch(found)[1])])
		})
	}
	var values []string
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		values = append(values, string(labels[name]))
	}
	return strings.Join(values, " ")
}

// course draws lines over time, with a legend below.
func (p Panel) course(at box, answers Answers, moments []moment) string {
	all := p.series(answers)
	if len(all) == 0 {
		return nothing(at)
	}
	names, lines := p.legends(at, all)
	at.h -= 13 * float64(lines)
	plot := box{at.x + 46, at.y + 4, at.w - 50, at.h - 22}
	field := p.FieldConfig.Defaults
	low, high := bounds(all)
	if field.Custom.ThresholdsStyle.Mode != "" {
		for _, step := range field.Thresholds.Steps {
			if step.Value != nil {
				high = max(high, *step.Value)
			}
		}
	}
	graph := graph{plot, axis(low, high, field), answers.From, answers.To}
	out := graph.grid(field.Unit) + names
	if field.Custom.ThresholdsStyle.Mode != "" {
		out += graph.thresholds(field.Thresholds.Steps)
	}
	for _, each := range moments {
		out += graph.moment(each)
	}
	for _, one := range all {
		out += graph.line(one)
	}
	return out
}

// legends draws the names of the series above the panel's lower edge, in as many lines as they need, up to a limit.
func (p Panel) legends(at box, all []series) (out string, lines int) {
	const maxLines = 3
	x, rows := 0.0, [][]int{nil}
	wide := func(name string) float64 { return 16 + letter*float64(min(maxLegend, len([]rune(name)))) }
	for i, one := range all {
		if x > 0 && x+wide(one.name) > at.w {
			x, rows = 0, append(rows, nil)
		}
		rows[len(rows)-1] = append(rows[len(rows)-1], i)
		x += wide(one.name)
	}
	lines = min(maxLines, len(rows))
	for n, row := range rows[:lines] {
		x, y := at.x, at.y+at.h-13*float64(lines-1-n)
		for _, i := range row {
			out += fmt.Sprintf(`<rect x="%.0f" y="%.0f" width="10" height="3" fill="%s"/>`+"\n", x, y-5, all[i].colour)
			out += text(x+13, y, shorten(all[i].name), `font-size="9"`)
			x += wide(all[i].name)
		}
	}
	return out, lines
}

func shorten(name string) string {
	letters := []rune(name)
	if len(letters) <= maxLegend {
		return name
	}
	return string(letters[:maxLegend-1]) + "…"
}

// bounds are the lowest and the highest of all values that are numbers.
func bounds(all []series) (low, high float64) {
	low, high = math.Inf(1), math.Inf(-1)
	for _, one := range all {
		for _, point := range one.points {
			if value := float64(point.Value); isNumber(value) {
				low, high = min(low, value), max(high, value)
			}
		}
	}
	if low > high {
		return 0, 0
	}
	return low, high
}

func isNumber(value float64) bool { return !math.IsNaN(value) && !math.IsInf(value, 0) }

// graph maps values and times to positions in a panel.
type graph struct {
	box      box
	scale    scale
	from, to model.Time
}

func (g graph) x(at model.Time) float64 {
	return g.box.x + g.box.w*float64(at-g.from)/float64(max(1, g.to-g.from))
}

func (g graph) y(value float64) float64 {
	return g.box.y + g.box.h*(1-(value-g.scale.low)/(g.scale.high-g.scale.low))
}

// grid draws a line for each tick of the values, and the time below.
func (g graph) grid(unit string) (out string) {
	for _, value := range g.scale.ticks() {
		y := g.y(value)
		out += fmt.Sprintf(`<path d="M%.0f %.1fh%.0f" stroke="#e5e6e7"/>`+"\n", g.box.x, y, g.box.w)
		out += text(g.box.x-4, y+3, show(value, unit), `text-anchor="end" fill="#6e7687" font-size="9"`)
	}
	const parts = 6
	for i := range parts + 1 {
		at := g.from + (g.to-g.from)*model.Time(i)/parts
		side := "middle"
		if i == parts { // within the panel
			side = "end"
		}
		out += text(g.x(at), g.box.y+g.box.h+12, clock(at, g.to.Sub(g.from)), `text-anchor="`+side+`" fill="#6e7687" font-size="9"`)
	}
	return out
}

// moment draws a vertical line.
func (g graph) moment(m moment) string {
	return fmt.Sprintf(`<path d="M%.1f %.1fv%.1f" stroke="%s" stroke-dasharray="3 3"><title>%s</title></path>`+"\n",
		g.x(m.at), g.box.y, g.box.h, m.colour, html.EscapeString(m.what))
}

// thresholds draws the thresholds as dashed lines.
func (g graph) thresholds(steps []Step) (out string) {
	for _, step := range steps {
		if step.Value != nil {
			out += fmt.Sprintf(`<path d="M%.0f %.1fh%.0f" stroke="%s" stroke-dasharray="6 4"/>`+"\n", g.box.x, g.y(*step.Value), g.box.w, named[step.Color])
		}
	}
	return out
}

// line draws the course of a series, with gaps where values are missing.
func (g graph) line(one series) string {
	points, style := one.points, ""
	if one.dashed {
		style = ` stroke-dasharray="6 4"`
	}
	var path strings.Builder
	step := interval(points)
	for i, point := range points {
		if !isNumber(float64(point.Value)) {
			continue
		}
		verb := "L"
		if i == 0 || !isNumber(float64(points[i-1].Value)) || point.Timestamp-points[i-1].Timestamp > step*3/2 {
			verb = "M"
		}
		fmt.Fprintf(&path, "%s%.0f %.1f", verb, g.x(point.Timestamp), g.y(float64(point.Value)))
	}
	return fmt.Sprintf(`<path d="%s" fill="none" stroke="%s" stroke-width="1.5" stroke-linejoin="round" stroke-linecap="round"%s/>`+"\n", path.String(), one.colour, style)
}

// interval is the smallest time between two points: the query's step.
func interval(points []model.SamplePair) (step model.Time) {
	for i := 1; i < len(points); i++ {
		if between := points[i].Timestamp - points[i-1].Timestamp; step == 0 || between < step {
			step = between
		}
	}
	return step
}
