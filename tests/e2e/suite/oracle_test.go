//go:build e2e

package suite

import (
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// record is a line of the agent's journal: a cgroup file that it changed.
type record struct{ UID, Cgroup, Lever, File, Original, Ours string }

func journal(node string) ([]record, error) {
	text, err := tryOnNode(node, "cat /var/lib/plimsoll/journal")
	if err != nil {
		return nil, err
	}
	return records(text)
}

func records(text string) (records []record, err error) {
	for _, line := range strings.Split(text, "\n") {
		if !strings.HasPrefix(line, "{") {
			continue
		}
		var read record
		if err := json.Unmarshal([]byte(line), &read); err != nil {
			return nil, err
		}
		records = append(records, read)
	}
	return records, nil
}

// oracle holds what the pods of a scene were before, and judges what they are later.
type oracle struct {
	scene  *scene
	before map[string]*victim // by UID
}

func (s *scene) oracle(pods ...string) *oracle {
	s.Helper()
	o := &oracle{s, map[string]*victim{}}
	for _, pod := range pods {
		o.before[string(s.pod(pod).UID)] = s.victim(pod)
	}
	return o
}

// waitAccounted waits until every file that differs from before has its one entry in the journal, and the reverse (I1), and
// every cap is between the floor and the original (I2).
func (o *oracle) waitAccounted(limit time.Duration, floor int) {
	o.scene.Helper()
	eventually(o.scene, limit, "cgroup files and journal agree", func() error { return o.account(floor) })
}

func (o *oracle) account(floor int) error {
	entries, err := journal(o.scene.node)
	if err != nil {
		return err
	}
	journalled := map[string]map[string]bool{}
	for _, entry := range entries {
		if _, ours := o.before[entry.UID]; !ours {
			continue
		}
		level := "containers/"
		if entry.Lever == "" {
			level = "pod/"
		}
		key := level + strings.Trim(entry.File, `"`) + entry.Lever
		if journalled[entry.UID][key] {
			return fmt.Errorf("two entries for %s of %s", key, entry.UID)
		}
		if journalled[entry.UID] == nil {
			journalled[entry.UID] = map[string]bool{}
		}
		journalled[entry.UID][key] = true
	}
	for uid, v := range o.before {
		now, err := readSettings(o.scene.node, v.folder)
		if err != nil {
			return err
		}
		changed := !maps.Equal(now, v.before)
		if changed != (len(journalled[uid]) > 0) {
			return fmt.Errorf("%s: changed: %v (%v), journalled: %v", v.name, changed, checkRestored(v.before, now), slices.Collect(maps.Keys(journalled[uid])))
		}
		held, original := now.millicores(), v.before.millicores()
		if changed && (held < floor-1 || (original > 0 && held > original)) {
			return fmt.Errorf("%s may use %dm: the floor is %dm, it had %dm", v.name, held, floor, original)
		}
	}
	return nil
}

// leftByKilling kills the agent, and returns the files of the scene's pods that hold something else than before and that no entry of
// the journal tells of: what nobody would ever restore. All of it is read in one go before another agent starts.
func (o *oracle) leftByKilling(pid string) (left []string, err error) {
	script := fmt.Sprintf("set -e; kill -KILL %s; n=0; while [ -d /proc/%s ]; do n=$((n + 1)); [ $n -lt 500 ]; sleep 0.01; done; cat /var/lib/plimsoll/journal; ", pid, pid)
	files := settingFiles + " */" + strings.ReplaceAll(settingFiles, " ", " */")
	for uid, v := range o.before {
		script += fmt.Sprintf("cd %s; grep -sH '' %s | sed 's|^|%s |'; ", v.folder, files, uid)
	}
	out, err := tryOnNode(o.scene.node, script)
	if err != nil {
		return nil, err
	}
	entries, err := records(out)
	if err != nil {
		return nil, err
	}
	journalled := map[string]bool{}
	for _, entry := range entries {
		journalled[entry.UID+" "+path.Join(entry.Lever, entry.File)] = true
	}
	for _, line := range strings.Split(out, "\n") {
		uid, setting, _ := strings.Cut(line, " ")
		if v := o.before[uid]; v != nil {
			if file, value, _ := strings.Cut(setting, ":"); !v.had(file, value) && !journalled[uid+" "+file] {
				left = append(left, fmt.Sprintf("%s of %s, which holds %q", file, v.name, value))
			}
		}
	}
	return left, nil
}

// had tells whether a file of the pod, or of one of its containers, held this before.
func (v *victim) had(file, value string) bool {
	if folder, name := path.Split(file); folder != "" {
		return slices.Contains(strings.Split(v.before["containers/"+name], ", "), value)
	}
	return v.before["pod/"+file] == value
}

// waitUndone waits until all is as before: files, journal, taint, status (I6, I7).
func (o *oracle) waitUndone(limit time.Duration) {
	o.scene.Helper()
	deadline := time.Now().Add(limit)
	for _, v := range o.before {
		o.scene.waitRestored(time.Until(deadline), v.folder, v.before)
	}
	o.waitAccounted(5*time.Second, 0)
	o.scene.waitNoTaint(max(time.Second, time.Until(deadline)))
	// But for whether the node is closed, a status is written at most every ten seconds.
	eventually(o.scene, max(15*time.Second, time.Until(deadline)), "the status says that nothing is in force", o.tellsNothing)
}

func (o *oracle) tellsNothing() error {
	now, err := watermarkOf(o.scene.node)
	if err != nil {
		return err
	}
	for _, entry := range now.Status.Throttled {
		if entry.Namespace == o.scene.name {
			return fmt.Errorf("%+v is throttled", entry)
		}
	}
	if state := now.Status.Scheduling.State; state != "Enabled" {
		return fmt.Errorf("scheduling is %q", state)
	}
	return nil
}

// waitAgent waits until the agent of a node is ready, and its container is not the one before.
func waitAgent(s *scene, not string) {
	s.Helper()
	eventually(s, 90*time.Second, "the agent is ready", func() error { return s.agentReady(not) })
}

func (s *scene) agentReady(not string) error {
	name := agentPod(s.node)
	pod, err := kube.CoreV1().Pods(namespace).Get(background, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if !isReady(pod) || pod.Status.ContainerStatuses[0].ContainerID == not {
		return fmt.Errorf("%s: %+v", name, pod.Status.ContainerStatuses)
	}
	return nil
}

// agentContainer is the id of the agent's container on a node.
func agentContainer(s *scene) string {
	s.Helper()
	pod, err := kube.CoreV1().Pods(namespace).Get(background, agentPod(s.node), metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	return pod.Status.ContainerStatuses[0].ContainerID
}
