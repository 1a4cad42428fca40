// Command chart writes the generated parts of the Helm chart: in values.schema.json the descriptions, the rejection of unknown names and
// suggestions, and in README.md the table of values. Both come from the comments of values.yaml.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	directory := flag.String("chart", "../../charts/plimsoll", "directory of the chart")
	check := flag.Bool("check", false, "write nothing; fail if a file is out of date")
	flag.Parse()
	if err := run(*directory, *check); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(directory string, check bool) error {
	values, err := readValues(filepath.Join(directory, "values.yaml"))
	if err != nil {
		return err
	}
	for _, file := range []struct {
		name string
		make func([]byte, *value) ([]byte, error)
	}{
		{"values.schema.json", completeSchema},
		{"README.md", completeReadme},
	} {
		path := filepath.Join(directory, file.name)
		old, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		made, err := file.make(old, values)
		if err != nil {
			return fmt.Errorf("failed to write %s: %w", path, err)
		}
		if bytes.Equal(old, made) {
			continue
		}
		if check {
			return fmt.Errorf("%s is out of date; run `make generate`", path)
		}
		if err := os.WriteFile(path, made, 0o644); err != nil {
			return err
		}
	}
	return nil
}
