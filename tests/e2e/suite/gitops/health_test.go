//go:build e2e

// Package gitops tests what Argo CD, Flux and kustomize see of an installation, without any of them.
package gitops

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	lua "github.com/yuin/gopher-lua"
	"sigs.k8s.io/yaml"

	"plimsoll.dev/suite/plane"
)

// scripts are the health scripts for Argo CD by group and kind.
func scripts(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(plane.Absolute(t, "docs/argocd/health.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var patch struct{ Data map[string]string }
	if err := yaml.UnmarshalStrict(text, &patch); err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for key, script := range patch.Data {
		kind, is := strings.CutPrefix(key, "resource.customizations.health.")
		if !is {
			t.Errorf("Argo CD does not read %s", key)
		}
		found[kind] = script
	}
	return found
}

// health runs a script as Argo CD does for a script in its ConfigMap: without Lua's libraries for strings, files and the like, and for at most
// a second.
func health(t *testing.T, script string, object map[string]any) (status, message string) {
	t.Helper()
	l := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer l.Close()
	for name, open := range map[string]lua.LGFunction{lua.LoadLibName: lua.OpenPackage, lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable} {
		if err := l.CallByParam(lua.P{Fn: l.NewFunction(open), Protect: true}, lua.LString(name)); err != nil {
			t.Fatal(err)
		}
	}
	within, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	l.SetContext(within)
	l.SetGlobal("obj", asLua(l, object))
	if err := l.DoString(script); err != nil {
		t.Fatal(err)
	}
	result, is := l.Get(-1).(*lua.LTable)
	if !is {
		t.Fatalf("the script returns a %s instead of a table", l.Get(-1).Type())
	}
	return l.GetField(result, "status").String(), l.GetField(result, "message").String()
}

// asLua converts a JSON value to Lua, which has one type for all numbers.
func asLua(l *lua.LState, value any) lua.LValue {
	switch value := value.(type) {
	case bool:
		return lua.LBool(value)
	case float64:
		return lua.LNumber(value)
	case string:
		return lua.LString(value)
	case []any:
		table := l.NewTable()
		for _, item := range value {
			table.Append(asLua(l, item))
		}
		return table
	case map[string]any:
		table := l.NewTable()
		for key, item := range value {
			table.RawSetString(key, asLua(l, item))
		}
		return table
	default:
		return lua.LNil
	}
}

// conditions are conditions in JSON, each written as "Ready=False Invalid": type, status and reason.
func conditions(written ...string) string {
	var all []string
	for _, one := range written {
		words := regexp.MustCompile(`[= ]`).Split(one, 3)
		all = append(all, fmt.Sprintf(`{"type": %q, "status": %q, "reason": %q, "message": "why"}`, words[0], words[1], words[2]))
	}
	return "[" + strings.Join(all, ", ") + "]"
}

// policies have the conditions that src/reconcilers/status writes. Stalled and Reconciling, the conditions of kstatus, are those that another
// version may write.
var policies = []struct{ status, health, message string }{
	{`null`, "Progressing", "the controller has not reported about it yet"},
	{`{"observedGeneration": 2}`, "Progressing", "the controller has not reported about it yet"},
	{`{"observedGeneration": 1, "conditions": ` + conditions("Accepted=True Accepted", "Ready=True Ready") + `}`, "Progressing", "the controller has not reported about the last edit yet"},
	{`{"observedGeneration": 2, "conditions": ` + conditions("Accepted=True Accepted", "ActionsResolved=True ActionsResolved", "Ready=True Ready") + `}`, "Healthy", "why"},
	{`{"observedGeneration": 2, "conditions": ` + conditions("Accepted=True Accepted", "FieldsNotEnforced=True FieldsNotEnforced", "Ready=True Ready") + `}`, "Healthy", "why"},
	{`{"observedGeneration": 2, "conditions": ` + conditions("Accepted=False Invalid", "Ready=False Invalid") + `}`, "Degraded", "Invalid: why"},
	{`{"observedGeneration": 2, "conditions": ` + conditions("ActionsResolved=False UnknownAction", "Ready=False UnknownAction") + `}`, "Degraded", "UnknownAction: why"},
	{`{"observedGeneration": 2, "conditions": ` + conditions("Ready=True Ready", "RolledOut=False Canaries") + `}`, "Progressing", "Canaries: why"},
	{`{"observedGeneration": 2, "conditions": ` + conditions("Ready=True Ready", "RolledOut=False NoCanary") + `}`, "Progressing", "NoCanary: why"},
	{`{"observedGeneration": 2, "conditions": ` + conditions("Ready=True Ready", "RolledOut=False CanariesAct") + `}`, "Degraded", "CanariesAct: why"},
	{`{"observedGeneration": 2, "conditions": ` + conditions("Ready=False Invalid", "RolledOut=False Progressing") + `}`, "Degraded", "Invalid: why"},
	{`{"observedGeneration": 2, "conditions": ` + conditions("Ready=False Invalid", "Stalled=True Invalid") + `}`, "Degraded", "Invalid: why"},
	{`{"observedGeneration": 2, "conditions": ` + conditions("Ready=True Ready", "Reconciling=True Canaries", "RolledOut=False Canaries") + `}`, "Progressing", "Canaries: why"},
	{`{"observedGeneration": 2, "conditions": ` + conditions("Ready=False Canaries", "Reconciling=True Canaries") + `}`, "Progressing", "Canaries: why"},
}

// watermarks have the conditions that src/agent/report writes.
var watermarks = []struct{ status, health, message string }{
	{`null`, "Progressing", "the agent of this node has not reported yet"},
	{`{"observedHash": "b", "conditions": ` + conditions("Ready=True RulesEnforced", "ActionIneffective=False ActionsEffective", "Degraded=False AllInOrder") + `}`, "Healthy", "why"},
	{`{"observedHash": "a", "conditions": ` + conditions("Ready=True RulesEnforced") + `}`, "Progressing", "the agent does not enforce the last rules yet"},
	{`{"observedHash": "a", "conditions": ` + conditions("Ready=False PreviousRulesEnforced") + `}`, "Degraded", "PreviousRulesEnforced: why"},
	{`{"observedHash": "b", "conditions": ` + conditions("Ready=False NoRuleEvaluated") + `}`, "Degraded", "NoRuleEvaluated: why"},
	{`{"observedHash": "b", "conditions": ` + conditions("Ready=False Starting") + `}`, "Progressing", "Starting: why"},
	{`{"observedHash": "b", "conditions": ` + conditions("Ready=False AgentEnded") + `}`, "Progressing", "AgentEnded: why"},
	{`{"observedHash": "b", "conditions": ` + conditions("Ready=False Stopped", "Stopped=True Releasing") + `}`, "Suspended", "Releasing: why"},
	{`{"observedHash": "b", "conditions": ` + conditions("Ready=True RulesEnforced", "Degraded=True NodeNotUpdated") + `}`, "Degraded", "NodeNotUpdated: why"},
	{`{"observedHash": "b", "conditions": ` + conditions("Ready=True RulesEnforced", "ActionIneffective=True Contested") + `}`, "Degraded", "Contested: why"},
	{`{"observedHash": "b", "conditions": ` + conditions("Ready=False Starting", "Reconciling=True Starting") + `}`, "Progressing", "Starting: why"},
	{`{"observedHash": "b", "conditions": ` + conditions("Ready=False PreviousRulesEnforced", "Stalled=True PreviousRulesEnforced") + `}`, "Degraded", "PreviousRulesEnforced: why"},
}

func TestArgoCDKnowsTheHealthOfOurKinds(t *testing.T) {
	scripts := scripts(t)
	for kind, cases := range map[string][]struct{ status, health, message string }{
		"ensurance.crane.io_NodeQOS": policies, "ensurance.crane.io_PodQOS": policies, "ensurance.crane.io_AvoidanceAction": policies,
		"plimsoll.dev_NodeWatermark": watermarks,
	} {
		for _, c := range cases {
			var object map[string]any
			if err := json.Unmarshal([]byte(`{"metadata": {"generation": 2}, "spec": {"hash": "b"}, "status": `+c.status+`}`), &object); err != nil {
				t.Fatal(err)
			}
			if status, message := health(t, scripts[kind], object); status != c.health || message != c.message {
				t.Errorf("%s with %s is %s (%s), not %s (%s)", kind, c.status, status, message, c.health, c.message)
			}
		}
		delete(scripts, kind)
	}
	if len(scripts) > 0 {
		t.Errorf("not tested: %v", scripts)
	}
}

// TestTheScriptsKnowOnlyDocumentedConditions: a test of the documentation compares docs/events.md with the program.
func TestTheScriptsKnowOnlyDocumentedConditions(t *testing.T) {
	events, err := os.ReadFile(plane.Absolute(t, "docs/events.md"))
	if err != nil {
		t.Fatal(err)
	}
	// Values of Argo CD and of conditions, and the conditions of kstatus.
	others := []string{"True", "False", "Healthy", "Progressing", "Degraded", "Suspended", "Stalled", "Reconciling"}
	found := 0
	for kind, script := range scripts(t) {
		for _, word := range regexp.MustCompile(`"([A-Z][A-Za-z]+)"|found\.([A-Z][A-Za-z]+)`).FindAllStringSubmatch(script, -1) {
			name := word[1] + word[2]
			found++
			if !slices.Contains(others, name) && !strings.Contains(string(events), "`"+name+"`") {
				t.Errorf("%s: %s is not in docs/events.md", kind, name)
			}
		}
	}
	if found < 20 {
		t.Errorf("only %d names were found", found)
	}
}
