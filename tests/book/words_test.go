package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestWordsAreCounted(t *testing.T) {
	if found := words("# A page\n| `one` | -- |\n\n1. two, three\n"); found != 6 {
		t.Errorf("%d words", found)
	}
}

func TestLongPagesAreFound(t *testing.T) {
	root := t.TempDir()
	write := func(page string, count int) {
		file := filepath.Join(root, page)
		os.MkdirAll(filepath.Dir(file), 0o700)
		os.WriteFile(file, []byte(strings.Repeat("word ", count)), 0o600)
	}
	expect := func(wanted ...string) {
		t.Helper()
		found, err := checkWords(root)
		if err != nil {
			t.Fatal(err)
		}
		for i, problem := range found {
			found[i], _, _ = strings.Cut(problem, ":")
		}
		if !slices.Equal(found, wanted) {
			t.Errorf("%q instead of %q", found, wanted)
		}
	}
	write("README.md", maxWordsPage)
	write("docs/metrics.md", maxWordsTotal)
	write("docs/internals/load.md", maxWordsInternal)
	expect()
	write("docs/long.md", maxWordsPage+1)
	write("docs/internals/decisions/long.md", maxWordsInternal+1)
	expect("docs/long.md has 3051 words, the limit is 3050", "docs/internals/decisions/long.md has 3201 words, the limit is 3200")
	write("docs/long.md", maxWordsPage)
	write("docs/internals/decisions/long.md", 1)
	for _, page := range strings.Fields("a b c d e f") {
		write("docs/"+page+".md", maxWordsPage)
	}
	write("docs/h.md", maxWordsTotal-8*maxWordsPage)
	expect()
	write("docs/i.md", 1)
	expect("README.md and docs/*.md have 25201 words, the limit is 25200")
}
