package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unicode"
)

// Limits in words keep the documentation short: who adds a page or a section cuts or merges another.
const (
	maxWordsTotal    = 25200 // README.md and docs/*.md
	maxWordsPage     = 3050  // of each of these
	maxWordsInternal = 3200  // of each page of docs/internals, which has no total
)

// Not counted: pages that are generated, and the list of pages.
var uncounted = map[string]bool{"docs/metrics.md": true, "docs/permissions.md": true, "docs/SUMMARY.md": true}

// words counts the words of a page: what is between spaces and has a letter or a digit, also in code and tables.
func words(text string) int {
	count := 0
	for _, word := range strings.Fields(text) {
		if strings.ContainsFunc(word, func(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }) {
			count++
		}
	}
	return count
}

// checkWords returns the pages with too many words, and whether all together have too many.
func checkWords(root string) ([]string, error) {
	var problems []string
	total := 0
	for _, group := range []struct {
		pattern string
		limit   int
		counts  bool
	}{
		{"README.md", maxWordsPage, true},
		{"docs/*.md", maxWordsPage, true},
		{"docs/internals/*.md", maxWordsInternal, false},
		{"docs/internals/*/*.md", maxWordsInternal, false},
	} {
		files, err := filepath.Glob(filepath.Join(root, group.pattern))
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			page, err := filepath.Rel(root, file)
			if err != nil {
				return nil, err
			}
			if uncounted[page] {
				continue
			}
			text, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			count := words(string(text))
			if group.counts {
				total += count
			}
			if count > group.limit {
				problems = append(problems, fmt.Sprintf("%s has %d words, the limit is %d: cut it, or split off what only developers read to docs/internals", page, count, group.limit))
			}
		}
	}
	if total > maxWordsTotal {
		problems = append(problems, fmt.Sprintf("README.md and docs/*.md have %d words, the limit is %d: cut what repeats, or what a reader cannot act on", total, maxWordsTotal))
	}
	return problems, nil
}
