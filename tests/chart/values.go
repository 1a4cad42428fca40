package main

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A value is an entry of values.yaml, with the comment above it.
type value struct {
	name, comment string
	node          *yaml.Node
	// children are the values of a map, or of the first item of an array.
	children []*value
	isArray  bool
}

func readValues(path string) (*value, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		return nil, fmt.Errorf("failed to read %s: %w", path, err)
	}
	root := &value{node: document.Content[0]}
	root.read()
	return root, nil
}

// read reads the children of a map, or of the first item of an array; values in flow style have none.
func (v *value) read() {
	object := v.node
	if object.Kind == yaml.SequenceNode && object.Style&yaml.FlowStyle == 0 && len(object.Content) > 0 {
		v.isArray = true
		object = object.Content[0]
	}
	if object.Kind != yaml.MappingNode || object.Style&yaml.FlowStyle != 0 {
		return
	}
	for i := 0; i+1 < len(object.Content); i += 2 {
		key := object.Content[i]
		comment := key.HeadComment
		if i == 0 && comment == "" && v.isArray {
			comment = object.HeadComment
		}
		child := &value{name: key.Value, comment: plain(comment), node: object.Content[i+1]}
		child.read()
		v.children = append(v.children, child)
	}
	if !slices.ContainsFunc(v.children, (*value).isExplained) {
		v.children = nil // a default whose fields Kubernetes documents
	}
}

func (v *value) isExplained() bool { return v.comment != "" || len(v.children) > 0 }

// plain is the last paragraph of a comment as one line; earlier ones are about the file.
func plain(comment string) string {
	paragraphs := strings.Split(comment, "\n\n")
	var words []string
	for _, line := range strings.Split(paragraphs[len(paragraphs)-1], "\n") {
		words = append(words, strings.Fields(strings.TrimLeft(line, "# "))...)
	}
	return strings.Join(words, " ")
}

// find is the value of this name.
func (v *value) find(name string) *value {
	if v == nil {
		return nil
	}
	for _, child := range v.children {
		if child.name == name {
			return child
		}
	}
	return nil
}

// path is the path of a child as `--set` takes it.
func (v *value) path(prefix, child string) string {
	if v.isArray {
		prefix += "[]"
	}
	return strings.TrimPrefix(prefix+"."+child, ".")
}

// written is the value as one line of YAML.
func (v *value) written() string {
	flow(v.node)
	text, err := yaml.Marshal(v.node)
	if err != nil {
		return err.Error()
	}
	return strings.Join(strings.Fields(string(text)), " ")
}

// flow removes comments and sets the flow style, so that the YAML fits into one line.
func flow(node *yaml.Node) {
	node.HeadComment, node.LineComment, node.FootComment = "", "", ""
	if len(node.Content) > 0 {
		node.Style |= yaml.FlowStyle
	}
	for _, child := range node.Content {
		flow(child)
	}
}
