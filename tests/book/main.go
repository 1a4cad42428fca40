// Checks the links and the lengths of the pages of the documentation, and adapts it to mdBook.
//
// usage: links check            every link in Markdown files of the repository, that docs/SUMMARY.md has each page once, and that pages are not too long
//
//	links site DIRECTORY      every link of a built site that leads to the site
//	links preprocess       mdBook's preprocessor: points links that leave docs/ to the repository
package main

import (
	"fmt"
	"os"
)

func main() {
	problems, err := run(os.Args[1:])
	for _, problem := range problems {
		fmt.Fprintln(os.Stderr, problem)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "links:", err)
	}
	if err != nil || len(problems) > 0 {
		os.Exit(1)
	}
}

func run(args []string) ([]string, error) {
	switch {
	case len(args) == 1 && args[0] == "check":
		return checkRepository("../..")
	case len(args) == 2 && args[0] == "site":
		return checkSite(args[1])
	case len(args) >= 1 && args[0] == "preprocess":
		// mdBook first asks whether a renderer is supported (all are), then sends the book.
		if len(args) > 1 {
			return nil, nil
		}
		return nil, preprocess(os.Stdin, os.Stdout)
	}
	return nil, fmt.Errorf("usage: links check | site DIRECTORY | preprocess")
}
