package main

import (
	"bytes"
	"embed"
	"encoding/base64"
	"os"
	"path/filepath"
	"text/template"
)

// files are the configuration files: templates for the components, and our part of the guest's root file system.
//
//go:embed all:files
var files embed.FS

func render(name string, values any) ([]byte, error) {
	functions := template.FuncMap{"base64": base64.StdEncoding.EncodeToString}
	parsed, err := template.New(name).Funcs(functions).Option("missingkey=error").ParseFS(files, "files/"+name)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = parsed.Execute(&out, values)
	return out.Bytes(), err
}

// renderTo renders a file and creates its directory.
func renderTo(path, name string, values any) error {
	text, err := render(name, values)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o644)
}
