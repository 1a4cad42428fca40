//go:build e2e

package suite

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"plimsoll.dev/suite/plane"
)

// checkUnused makes the run fail if a permission of the chart was not used.
var checkUnused = flag.Bool("permissions", false, "fail if a permission that the chart grants was not used; all scenes together, with -long, use every one")

// A permission is one verb on one resource or path for one of our accounts.
type permission struct {
	account, namespace    string // an empty namespace means all
	group, resource, name string // resource includes the subresource, or is a non-resource path; an empty name means all
	verb                  string
}

func (p permission) String() string {
	scope := "the cluster"
	if p.namespace != "" {
		scope = p.namespace
	}
	return strings.TrimSpace(fmt.Sprintf("%s may %s %s in %s %s", p.account, p.verb, strings.Trim(p.resource+"."+p.group, "."), scope, p.name))
}

// covers reports whether this permission allows the requested one.
func (p permission) covers(requested permission) bool {
	prefix, any := strings.CutSuffix(p.resource, "*")
	return p.account == requested.account && p.verb == requested.verb && p.group == requested.group &&
		(p.resource == requested.resource || any && strings.HasPrefix(requested.resource, prefix)) &&
		(p.namespace == "" || p.namespace == requested.namespace) && (p.name == "" || p.name == requested.name)
}

// permissionsGranted are the permissions of the release, including its hooks.
func permissionsGranted() (all []permission, err error) {
	type role struct{ kind, namespace, name string }
	rules := map[role][]rbacv1.PolicyRule{}
	var bindings []rbacv1.RoleBinding
	for _, part := range []string{"manifest", "hooks"} {
		out, err := helm("", "get", part, "plimsoll", "--namespace", namespace)
		if err != nil {
			return nil, err
		}
		objects, err := plane.Objects(out)
		if err != nil {
			return nil, err
		}
		for _, object := range objects {
			switch kind := object.GetKind(); kind {
			case "ClusterRole", "Role":
				var of rbacv1.Role
				err = runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &of)
				rules[role{kind, of.Namespace, of.Name}] = of.Rules
			case "ClusterRoleBinding", "RoleBinding":
				var binding rbacv1.RoleBinding
				err = runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &binding)
				bindings = append(bindings, binding)
			}
			if err != nil {
				return nil, err
			}
		}
	}
	for _, binding := range bindings {
		of := role{kind: binding.RoleRef.Kind, name: binding.RoleRef.Name}
		if of.kind == "Role" {
			of.namespace = binding.Namespace
		}
		for _, subject := range binding.Subjects {
			for _, rule := range rules[of] {
				all = append(all, expand(rule, subject.Name, binding.Namespace)...)
			}
		}
	}
	return all, nil
}

// expand splits a rule into permissions.
func expand(rule rbacv1.PolicyRule, account, namespace string) (all []permission) {
	names := rule.ResourceNames
	if len(names) == 0 {
		names = []string{""}
	}
	for _, verb := range rule.Verbs {
		for _, path := range rule.NonResourceURLs {
			all = append(all, permission{account: account, resource: path, verb: verb})
		}
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, name := range names {
					all = append(all, permission{account, namespace, group, resource, name, verb})
				}
			}
		}
	}
	return all
}

// permissionsUsed are the permissions that Plimsoll's accounts have used since then, according to the API server's audit log.
func permissionsUsed(since time.Time) ([]permission, error) {
	events, err := plane.AuditLog(absolute("target/e2e/logs/audit.log"))
	if err != nil {
		return nil, err
	}
	used := map[permission]bool{}
	for _, event := range events {
		account, ours := strings.CutPrefix(event.User.Username, "system:serviceaccount:"+namespace+":")
		if !ours || !strings.HasPrefix(event.UserAgent, "plimsoll/") || event.StageTimestamp.Before(since) || event.ResponseStatus.Code == http.StatusForbidden {
			continue // tests use these accounts' tokens, too; older releases set no user agent
		}
		path, _, _ := strings.Cut(event.RequestURI, "?")
		requested := permission{account: account, resource: path, verb: event.Verb}
		if object := event.ObjectRef; object.Resource != "" {
			requested.namespace, requested.group, requested.name = object.Namespace, object.APIGroup, object.Name
			requested.resource = strings.Trim(object.Resource+"/"+object.Subresource, "/")
		}
		used[requested] = true
		if event.Verb == "patch" && event.ResponseStatus.Code == http.StatusCreated { // server-side apply needs create, too
			requested.verb = "create"
			used[requested] = true
		}
	}
	return slices.Collect(maps.Keys(used)), nil
}

// checkPermissions returns an error that lists the unused permissions.
func checkPermissions(since time.Time) error {
	if given != "" {
		fmt.Println("skipped: the check for unused permissions needs the audit log of our own cluster")
		return nil
	}
	granted, err := permissionsGranted()
	if err != nil {
		return err
	}
	if len(granted) == 0 {
		return errors.New("the release grants no permissions")
	}
	used, err := permissionsUsed(since)
	if err != nil {
		return err
	}
	var unused []string
	for _, permission := range granted {
		if !slices.ContainsFunc(used, permission.covers) {
			unused = append(unused, permission.String())
		}
	}
	fmt.Printf("%d of %d permissions were used\n", len(granted)-len(unused), len(granted))
	if len(unused) > 0 {
		return fmt.Errorf("these permissions were not used:\n  %s", strings.Join(unused, "\n  "))
	}
	return nil
}
