package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
)

// preprocess reads mdBook's [context, book] and writes the book with links that leave docs/ changed.
func preprocess(in io.Reader, out io.Writer) error {
	decoder := json.NewDecoder(in)
	decoder.UseNumber()
	var input []any
	if err := decoder.Decode(&input); err != nil {
		return fmt.Errorf("mdBook's input: %w", err)
	}
	if len(input) != 2 {
		return fmt.Errorf("mdBook's input has %d parts instead of a context and a book", len(input))
	}
	repository, found := lookup(input[0], "config", "output", "html", "git-repository-url").(string)
	if !found {
		return fmt.Errorf("book.toml has no output.html.git-repository-url")
	}
	rewriteChapters(input[1], repository)
	return json.NewEncoder(out).Encode(input[1])
}

// lookup returns the value at these keys, nil if there is none.
func lookup(value any, keys ...string) any {
	for _, key := range keys {
		object, _ := value.(map[string]any)
		value = object[key]
	}
	return value
}

// rewriteChapters rewrites the links of the chapters in a value. The list of chapters has another name in some versions of mdBook, so it
// searches everything.
func rewriteChapters(value any, repository string) {
	switch value := value.(type) {
	case []any:
		for _, each := range value {
			rewriteChapters(each, repository)
		}
	case map[string]any:
		content, isChapter := value["content"].(string)
		file, hasFile := value["source_path"].(string)
		if isChapter && hasFile {
			value["content"] = rewriteLinks(content, file, repository)
		}
		for _, each := range value {
			rewriteChapters(each, repository)
		}
	}
}

// rewriteLinks points those links of a page that leave docs/ to the repository. mdBook runs this program in the repository's root.
func rewriteLinks(content, file, repository string) string {
	lines := strings.Split(content, "\n")
	for i, line := range prose(content) {
		if line == "" {
			continue
		}
		lines[i] = inlineLink.ReplaceAllStringFunc(line, func(match string) string {
			link := inlineLink.FindStringSubmatch(match)[1]
			target := path.Join("docs", path.Dir(file), link)
			if strings.Contains(link, "://") || strings.HasPrefix(link, "#") || strings.HasPrefix(target, "docs/") {
				return match
			}
			kind := "/blob/main/"
			if file, err := os.Stat(target); err == nil && file.IsDir() {
				kind = "/tree/main/"
			}
			return strings.Replace(match, link, repository+kind+target, 1)
		})
	}
	return strings.Join(lines, "\n")
}
