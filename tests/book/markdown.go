package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

var (
	inlineLink = regexp.MustCompile(`\]\(([^()\s]+)(?:\s+"[^"]*")?\)`)
	inlineCode = regexp.MustCompile("`+[^`]*`+")
	heading    = regexp.MustCompile(`^#{1,6}\s+(.*?)\s*#*$`)
	htmlID     = regexp.MustCompile(`<a (?:id|name)="([^"]+)"`)
	linkText   = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
)

// prose returns the lines of a page; those of fenced code blocks are empty.
func prose(text string) []string {
	lines, fence := strings.Split(text, "\n"), ""
	for i, line := range lines {
		trimmed := strings.TrimSpace(line)
		switch {
		case fence == "" && (strings.HasPrefix(trimmed, "```") || strings.HasPrefix(trimmed, "~~~")):
			fence, lines[i] = trimmed[:3], ""
		case fence != "":
			if strings.HasPrefix(trimmed, fence) {
				fence = ""
			}
			lines[i] = ""
		}
	}
	return lines
}

// slug is the anchor that GitHub makes for a heading.
func slug(heading string) string {
	heading = linkText.ReplaceAllString(heading, "$1")
	var out strings.Builder
	for _, letter := range strings.ToLower(heading) {
		switch {
		case letter == ' ':
			out.WriteRune('-')
		case letter == '-', letter == '_', unicode.IsLetter(letter), unicode.IsDigit(letter):
			out.WriteRune(letter)
		}
	}
	return out.String()
}

// anchors are the fragments that a link to a page can have.
func anchors(text string) map[string]bool {
	found, times := map[string]bool{}, map[string]int{}
	for _, line := range prose(text) {
		for _, id := range htmlID.FindAllStringSubmatch(line, -1) {
			found[id[1]] = true
		}
		if match := heading.FindStringSubmatch(line); match != nil {
			name := slug(match[1])
			if before := times[name]; before > 0 {
				found[fmt.Sprintf("%s-%d", name, before)] = true
			} else {
				found[name] = true
			}
			times[name]++
		}
	}
	return found
}

// checkRepository checks the links in all Markdown files of the repository, and the lengths of pages.
func checkRepository(root string) ([]string, error) {
	out, err := exec.Command("git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard", "*.md").Output()
	if err != nil {
		return nil, fmt.Errorf("git ls-files: %w", err)
	}
	var problems []string
	for _, file := range strings.Fields(string(out)) {
		text, err := os.ReadFile(filepath.Join(root, file))
		if os.IsNotExist(err) { // deleted, and not committed yet
			continue
		} else if err != nil {
			return nil, err
		}
		for number, line := range prose(string(text)) {
			for _, link := range inlineLink.FindAllStringSubmatch(inlineCode.ReplaceAllString(line, ""), -1) {
				if why := checkLink(root, file, string(text), link[1]); why != "" {
					problems = append(problems, fmt.Sprintf("%s:%d: %s: %s", file, number+1, link[1], why))
				}
			}
		}
	}
	inSummary, err := checkSummary(root)
	if err != nil {
		return nil, err
	}
	tooLong, err := checkWords(root)
	return slices.Concat(problems, inSummary, tooLong), err
}

// checkLink returns what is wrong with a link in a file, and nothing for links to other sites.
func checkLink(root, file, text, link string) string {
	if strings.Contains(link, "://") || strings.HasPrefix(link, "mailto:") {
		return ""
	}
	path, anchor, _ := strings.Cut(link, "#")
	target := filepath.Join(root, file)
	if path != "" {
		target = filepath.Join(root, filepath.Dir(file), path)
		if _, err := os.Stat(target); err != nil {
			return "no such file"
		}
		if anchor == "" {
			return ""
		}
		other, err := os.ReadFile(target)
		if err != nil {
			return err.Error()
		}
		text = string(other)
	}
	if strings.HasSuffix(target, ".md") && !anchors(text)[anchor] {
		return "the page has no such heading"
	}
	return ""
}

// checkSummary checks that docs/SUMMARY.md has every page of docs/ once.
func checkSummary(root string) ([]string, error) {
	docs := filepath.Join(root, "docs")
	summary, err := os.ReadFile(filepath.Join(docs, "SUMMARY.md"))
	if err != nil {
		return nil, err
	}
	times := map[string]int{}
	for _, link := range inlineLink.FindAllStringSubmatch(string(summary), -1) {
		times[link[1]]++
	}
	var problems []string
	err = filepath.WalkDir(docs, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".md" || entry.Name() == "SUMMARY.md" {
			return err
		}
		page, err := filepath.Rel(docs, path)
		if times[page] != 1 {
			problems = append(problems, fmt.Sprintf("docs/SUMMARY.md has %s %d times instead of once", page, times[page]))
		}
		return err
	})
	return problems, err
}
