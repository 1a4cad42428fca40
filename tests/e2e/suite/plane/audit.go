//go:build e2e

package plane

import (
	"bufio"
	"encoding/json"
	"os"
	"time"
)

// AuditEvent is one line of an API server's audit log.
type AuditEvent struct {
	Verb, RequestURI, UserAgent              string
	RequestReceivedTimestamp, StageTimestamp time.Time
	User                                     struct{ Username string }
	ObjectRef                                struct{ Namespace, Resource, Name, APIGroup, Subresource string }
	ResponseStatus                           struct{ Code int }
}

// AuditLog reads the events in an API server's audit log. An incomplete last line is skipped.
func AuditLog(path string) (all []AuditEvent, err error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var event AuditEvent
		if json.Unmarshal(lines.Bytes(), &event) == nil {
			all = append(all, event)
		}
	}
	return all, lines.Err()
}
