package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
)

// object is a JSON object.
type object = map[string]any

// completeSchema adds to a schema what follows from it and the values: an object accepts only the names that it lists,
// suggests the one that was probably meant, and requires those with a default.
func completeSchema(old []byte, values *value) ([]byte, error) {
	var schema object
	if err := json.Unmarshal(old, &schema); err != nil {
		return nil, err
	}
	definitions, _ := schema["definitions"].(object)
	if err := describe(schema, definitions, values, ""); err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(definitions)) {
		seal(definitions[name].(object), "", nil)
	}
	seal(schema, "", nestedPaths(schema, definitions))
	var made bytes.Buffer
	encoder := json.NewEncoder(&made)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	err := encoder.Encode(schema)
	return made.Bytes(), err
}

// describe copies the comments of values into the schema as descriptions, and makes the values required. Schemas without a value, such as
// those of the items of an empty list, must have their own description.
func describe(schema, definitions object, values *value, at string) error {
	for name, property := range properties(schema) {
		path, child := at+"."+name, values.find(name)
		switch described := property["description"]; {
		case child != nil && child.comment != "":
			property["description"] = child.comment
		case child == nil && described == nil:
			return fmt.Errorf("%s is neither in values.yaml nor described here", path)
		}
		if inner := resolve(property, definitions); inner["properties"] != nil || inner["items"] != nil {
			if items, isArray := inner["items"].(object); isArray {
				inner = items
			}
			if err := describe(inner, definitions, child, path); err != nil {
				return err
			}
		}
	}
	require(schema, values)
	return nil
}

// require makes values with a default required: Helm removes the default if a user sets null. (The items of an array have
// no defaults.)
func require(schema object, values *value) {
	if values == nil || values.isArray || len(values.children) == 0 {
		return
	}
	names := make([]string, len(values.children))
	for i, child := range values.children {
		names[i] = child.name
	}
	slices.Sort(names)
	schema["required"] = names
}

func properties(schema object) map[string]object {
	found := map[string]object{}
	listed, _ := schema["properties"].(object)
	for name, property := range listed {
		found[name] = property.(object)
	}
	return found
}

// resolve follows a reference to a definition.
func resolve(schema, definitions object) object {
	name, isReference := schema["$ref"].(string)
	if !isReference {
		return schema
	}
	return definitions[strings.TrimPrefix(name, "#/definitions/")].(object)
}

// seal forbids unknown names in an object and in the objects below it, unless its schema allows them, as that of the global values does.
func seal(schema object, path string, elsewhere map[string][]string) {
	inner := properties(schema)
	if schema["additionalProperties"] != true && len(inner) > 0 {
		schema["additionalProperties"] = false
		schema["propertyNames"] = suggest(slices.Sorted(maps.Keys(inner)), path, elsewhere)
	}
	for name, property := range inner {
		seal(property, path+name+".", nil)
	}
	if items, isArray := schema["items"].(object); isArray {
		seal(items, strings.TrimSuffix(path, ".")+"[].", nil)
	}
}

// suggest is a schema of names whose error suggests a name with the same prefix, or the path of the same name elsewhere in the values,
// or else all names. (A validation error only says what would have been valid.)
func suggest(names []string, path string, elsewhere map[string][]string) object {
	all := make([]string, len(names))
	for i, name := range names {
		all[i] = path + name
	}
	schema := object{"enum": all}
	byLength := slices.SortedStableFunc(slices.Values(names), func(a, b string) int { return len(distinct(a, names)) - len(distinct(b, names)) })
	for _, name := range byLength { // the longest prefix first
		pattern := "^" + anyCase(distinct(name, names))
		schema = object{"if": object{"pattern": pattern}, "then": object{"const": path + name}, "else": schema}
	}
	for _, name := range slices.Backward(slices.Sorted(maps.Keys(elsewhere))) {
		schema = object{"if": object{"const": name}, "then": object{"enum": elsewhere[name]}, "else": schema}
	}
	return object{"if": object{"enum": names}, "else": schema}
}

// distinct is the shortest unique prefix of a name, of three letters or more; the whole name if it is a prefix of another.
func distinct(name string, names []string) string {
	for length := min(3, len(name)); length < len(name); length++ {
		beginning := strings.ToLower(name[:length])
		alike := func(other string) bool {
			return other != name && strings.HasPrefix(strings.ToLower(other), beginning)
		}
		if !slices.ContainsFunc(names, alike) {
			return beginning
		}
	}
	return strings.ToLower(name)
}

func anyCase(word string) string {
	var pattern strings.Builder
	for _, letter := range word {
		fmt.Fprintf(&pattern, "[%c%c]", letter, unicode.ToUpper(letter))
	}
	return pattern.String()
}

// nestedPaths maps names of the second level to their paths.
func nestedPaths(schema, definitions object) map[string][]string {
	found := map[string][]string{}
	top := properties(schema)
	for _, outer := range slices.Sorted(maps.Keys(top)) {
		for name := range properties(resolve(top[outer], definitions)) {
			if top[name] == nil {
				found[name] = append(found[name], outer+"."+name)
			}
		}
	}
	return found
}
