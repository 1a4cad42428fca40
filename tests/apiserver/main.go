// Command apiserver validates custom resource definitions and manifests with the API server's own code:
// k8s.io/apiextensions-apiserver. The tests compare `plimsoll check` with it.
//
//	apiserver CRD_DIR [MANIFEST...]
//	apiserver quantities < LIST
//
// It prints one JSON object: what is wrong with the definitions (CEL compilation and cost included), and for each
// document of each manifest whether a create with strict field validation would be accepted, why not, and the object
// with its defaults. For a JSON list of strings it prints each as a quantity: billionths, or null.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"

	"gopkg.in/inf.v0"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	crdvalidation "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/listtype"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/objectmeta"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apimachinery/pkg/api/resource"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"sigs.k8s.io/yaml"
)

type report struct {
	Definitions []definitionReport `json:"definitions"`
	Manifests   []manifestReport   `json:"manifests"`
}

type definitionReport struct {
	File   string   `json:"file"`
	Errors []string `json:"errors"`
}

type manifestReport struct {
	File      string           `json:"file"`
	Documents []documentReport `json:"documents"`
}

type documentReport struct {
	Kind      string         `json:"kind"`
	Name      string         `json:"name"`
	Known     bool           `json:"known"`
	Accepted  bool           `json:"accepted"`
	Errors    []problem      `json:"errors"`
	Defaulted map[string]any `json:"defaulted,omitempty"`
}

type problem struct {
	Field   string `json:"field"`
	Message string `json:"message"`
}

// kind is the API server's data of one served version.
type kind struct {
	structural *structuralschema.Structural
	schema     validation.SchemaValidator
	rules      *cel.Validator
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: apiserver CRD_DIR [MANIFEST...]")
		os.Exit(2)
	}
	var result any
	var err error
	if os.Args[1] == "quantities" {
		result, err = quantities(os.Stdin)
	} else {
		result, err = run(os.Args[1], os.Args[2:])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "apiserver:", err)
		os.Exit(2)
	}
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetIndent("", " ")
	if err := encoder.Encode(result); err != nil {
		os.Exit(2)
	}
}

func run(dir string, manifests []string) (*report, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return nil, err
	}
	sort.Strings(files)
	result := &report{}
	kinds := map[string]*kind{}
	for _, file := range files {
		definition, errs, err := load(file, kinds)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		result.Definitions = append(result.Definitions, definitionReport{definition, errs})
	}
	for _, file := range manifests {
		documents, err := judgeFile(file, kinds)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		result.Manifests = append(result.Manifests, manifestReport{file, documents})
	}
	return result, nil
}

// load validates a definition as a create would, and returns what validating objects needs.
func load(file string, kinds map[string]*kind) (string, []string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", nil, err
	}
	var external apiextensionsv1.CustomResourceDefinition
	if err := yaml.UnmarshalStrict(text, &external); err != nil {
		return "", nil, err
	}
	apiextensionsv1.SetDefaults_CustomResourceDefinition(&external)
	apiextensionsv1.SetDefaults_CustomResourceDefinitionSpec(&external.Spec)
	var internal apiextensions.CustomResourceDefinition
	if err := apiextensionsv1.Convert_v1_CustomResourceDefinition_To_apiextensions_CustomResourceDefinition(&external, &internal, nil); err != nil {
		return "", nil, err
	}
	// Like the registry's strategy before validation.
	for _, version := range internal.Spec.Versions {
		if version.Storage {
			internal.Status.StoredVersions = []string{version.Name}
		}
	}
	errs := []string{}
	for _, err := range crdvalidation.ValidateCustomResourceDefinition(context.Background(), &internal) {
		errs = append(errs, err.Error())
	}
	for i := range internal.Spec.Versions {
		version := &internal.Spec.Versions[i]
		schema := version.Schema
		if schema == nil {
			schema = internal.Spec.Validation
		}
		key := internal.Spec.Group + "/" + version.Name + "/" + internal.Spec.Names.Kind
		if kinds[key], err = newKind(schema); err != nil {
			return "", nil, err
		}
	}
	return filepath.Base(file), errs, nil
}

func newKind(schema *apiextensions.CustomResourceValidation) (*kind, error) {
	structural, err := structuralschema.NewStructural(schema.OpenAPIV3Schema)
	if err != nil {
		return nil, err
	}
	validator, _, err := validation.NewSchemaValidator(schema.OpenAPIV3Schema)
	if err != nil {
		return nil, err
	}
	return &kind{structural, validator, cel.NewValidator(structural, true, celconfig.PerCallLimit)}, nil
}

func judgeFile(file string, kinds map[string]*kind) ([]documentReport, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	reports := []documentReport{}
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return reports, nil
		}
		if err != nil {
			return nil, err
		}
		reports = append(reports, judgeText(document, kinds)...)
	}
}

func judgeText(document []byte, kinds map[string]*kind) []documentReport {
	converted, err := yaml.YAMLToJSONStrict(document)
	if err != nil {
		return []documentReport{{Errors: []problem{{"", err.Error()}}}}
	}
	var object map[string]any
	if err := utiljson.Unmarshal(converted, &object); err != nil {
		return []documentReport{{Errors: []problem{{"", err.Error()}}}}
	}
	if len(object) == 0 {
		return nil
	}
	if items, ok := object["items"].([]any); ok && object["kind"] == "List" {
		reports := []documentReport{}
		for _, item := range items {
			if item, ok := item.(map[string]any); ok {
				reports = append(reports, judge(item, kinds))
			}
		}
		return reports
	}
	return []documentReport{judge(object, kinds)}
}

// judge validates as the API server does on create with fieldValidation=Strict, in its order.
func judge(object map[string]any, kinds map[string]*kind) documentReport {
	u := &unstructured.Unstructured{Object: object}
	result := documentReport{Kind: u.GetKind(), Name: u.GetName()}
	known := kinds[u.GetAPIVersion()+"/"+u.GetKind()]
	if known == nil {
		return result
	}
	result.Known = true
	refuse := func(field, message string) {
		result.Errors = append(result.Errors, problem{field, message})
	}

	defaulting.PruneNonNullableNullsWithoutDefaults(object, known.structural)
	defaulting.Default(object, known.structural)
	options := structuralschema.UnknownFieldPathOptions{TrackUnknownFieldPaths: true}
	unknown := pruning.PruneWithOptions(object, known.structural, true, options)
	coerceErr, unknownMeta := objectmeta.CoerceWithOptions(nil, object, known.structural, true, objectmeta.CoerceOptions{ReturnUnknownFieldPaths: true})
	if coerceErr != nil {
		refuse(coerceErr.Field, coerceErr.Error())
		return result
	}
	for _, path := range append(unknown, unknownMeta...) {
		refuse(path, fmt.Sprintf("unknown field %q", path))
	}

	for _, err := range known.validate(u) {
		refuse(err.Field, err.ErrorBody())
	}
	result.Accepted = len(result.Errors) == 0
	result.Defaulted = object
	return result
}

func (k *kind) validate(u *unstructured.Unstructured) field.ErrorList {
	var errs field.ErrorList
	// BeforeCreate drops the namespace of a cluster-scoped object.
	u.SetNamespace("")
	errs = append(errs, apivalidation.ValidateObjectMetaAccessor(u, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))...)
	errs = append(errs, validation.ValidateCustomResource(nil, u.Object, k.schema)...)
	errs = append(errs, objectmeta.Validate(nil, u.Object, k.structural, false)...)
	errs = append(errs, listtype.ValidateListSetsAndMaps(nil, k.structural, u.Object)...)
	if blocking(errs) || k.rules == nil {
		return errs
	}
	ruleErrs, _ := k.rules.Validate(context.Background(), nil, k.structural, u.Object, nil, celconfig.RuntimeCELCostBudget)
	return append(errs, ruleErrs...)
}

// blocking is hasBlockingErr of the registry's strategy: CEL rules wait until the schema holds.
func blocking(errs field.ErrorList) bool {
	for _, err := range errs {
		switch err.Type {
		case field.ErrorTypeNotSupported, field.ErrorTypeRequired, field.ErrorTypeTooLong, field.ErrorTypeTooMany, field.ErrorTypeTypeInvalid:
			return true
		}
	}
	return false
}

// quantities parses each string of a JSON list; null if it is not a quantity.
func quantities(in io.Reader) ([]*string, error) {
	var texts []string
	if err := json.NewDecoder(in).Decode(&texts); err != nil {
		return nil, err
	}
	found := make([]*string, len(texts))
	for i, text := range texts {
		quantity, err := resource.ParseQuantity(text)
		if err != nil {
			continue
		}
		nanos := new(inf.Dec).Mul(quantity.AsDec(), inf.NewDec(1_000_000_000, 0))
		rounded := new(inf.Dec).Round(nanos, 0, inf.RoundUp).String()
		found[i] = &rounded
	}
	return found, nil
}
