package main

import (
	"fmt"
	"html"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
)

var (
	hrefs = regexp.MustCompile(`\s(?:href|src)="([^"]*)"`)
	ids   = regexp.MustCompile(`\sid="([^"]*)"`)
)

// checkSite checks the internal links of a built site.
func checkSite(root string) ([]string, error) {
	pages := map[string]string{}
	err := filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".html" {
			return err
		}
		text, err := os.ReadFile(path)
		pages[path] = string(text)
		return err
	})
	if err != nil {
		return nil, err
	}
	if len(pages) < 20 {
		return nil, fmt.Errorf("%s has only %d pages", root, len(pages))
	}
	anchors := map[string]map[string]bool{}
	for path, text := range pages {
		anchors[path] = map[string]bool{"": true}
		for _, id := range ids.FindAllStringSubmatch(text, -1) {
			anchors[path][html.UnescapeString(id[1])] = true
		}
	}
	var problems []string
	for path, text := range pages {
		// The links in these two are relative to other pages.
		if name := filepath.Base(path); name == "404.html" || name == "toc.html" {
			continue
		}
		for _, match := range hrefs.FindAllStringSubmatch(text, -1) {
			link, err := url.Parse(html.UnescapeString(match[1]))
			if err != nil || link.Scheme != "" || link.Host != "" {
				continue
			}
			target := path
			if link.Path != "" {
				target = filepath.Join(filepath.Dir(path), link.Path)
			}
			_, missing := os.Stat(target)
			known, isPage := anchors[target]
			if missing != nil || isPage && !known[link.Fragment] {
				problems = append(problems, fmt.Sprintf("%s: broken link %s", path, match[1]))
			}
		}
	}
	slices.Sort(problems)
	return slices.Compact(problems), nil
}
