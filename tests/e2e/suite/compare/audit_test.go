//go:build e2e

package compare

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"plimsoll.dev/suite/plane"
)

// users are the API server's users whose requests are counted.
var users = []string{"metrics-server", "plimsoll-0", "plimsoll-1", agents}

// audit returns the path of an audit log, and the API server's flags to record each request of the users once.
func audit(t *testing.T, directory string) (string, []string) {
	log := filepath.Join(directory, "audit.log")
	policy := marshal(object{
		"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": []string{"ResponseStarted", "ResponseComplete", "Panic"},
		"rules": []object{{"level": "Metadata", "users": users}, {"level": "None"}},
	})
	return log, []string{"--audit-log-path=" + log, "--audit-policy-file=" + plane.WriteFile(t, filepath.Join(directory, "audit.json"), policy)}
}

// requests counts the requests in this time, by user, verb and resource.
func (s *scene) requests(from, to time.Time) map[string]map[string]int {
	events, err := plane.AuditLog(s.audit)
	if err != nil {
		s.T.Fatal(err)
	}
	counts := map[string]map[string]int{}
	for _, user := range users {
		counts[user] = map[string]int{}
	}
	for _, r := range events {
		if r.RequestReceivedTimestamp.Before(from) || r.RequestReceivedTimestamp.After(to) {
			continue
		}
		what := r.ObjectRef.Resource
		if what == "" {
			what = r.RequestURI
		}
		counts[r.User.Username][fmt.Sprintf("%s %s", r.Verb, what)]++
	}
	return counts
}
