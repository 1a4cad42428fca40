//go:build e2e

package suite

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"plimsoll.dev/suite/plane"
)

// record is a line of the agent's journal: a cgroup file that it changed.
type record struct{ UID, Cgroup, Lever, File, Original, Ours string }

// journal reads the journal of a node's agent.
func journal(node string) ([]record, error) {
	text, err := tryOnNode(node, "cat /var/lib/plimsoll/journal")
	if err != nil {
		return nil, err
	}
	return records(text)
}

// records parses a journal. Other lines than records are skipped.
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

// minMillicores is the smallest quota that a pod gets, 2 ms of 100 ms.
const minMillicores = 20

// baseline is the state of a scene's pods before the test, to compare with.
type baseline struct {
	scene  *scene
	before map[string]*victim // by UID
	floors map[string]int     // by UID: the floor in millicores
	// bystander is a pod that no policy selects. May be nil.
	bystander    *victim
	bystanderUID string
}

// baseline reads the current state of pods that are not throttled yet.
func (s *scene) baseline(pods ...string) *baseline {
	s.Helper()
	o := &baseline{scene: s, before: map[string]*victim{}, floors: map[string]int{}}
	for _, name := range pods {
		pod := s.pod(name)
		uid := string(pod.UID)
		o.before[uid], o.floors[uid] = s.victim(name), max(minMillicores, requested(pod))
	}
	return o
}

// watchBystander adds a pod that no policy selects: its cgroup must never change.
func (o *baseline) watchBystander(pod string) {
	o.scene.Helper()
	o.bystander, o.bystanderUID = o.scene.victim(pod), string(o.scene.pod(pod).UID)
}

// checkBystander fails the test as soon as the pod that no policy selects has changed (I3). It returns an error if the files cannot be read.
func (o *baseline) checkBystander() error {
	o.scene.Helper()
	if o.bystander == nil {
		return nil
	}
	now, err := readSettings(o.scene.node, o.bystander.directory)
	if err != nil {
		return err
	}
	if err := checkRestored(o.bystander.before, now); err != nil {
		o.scene.Fatalf("%s, which no policy selects, was touched: %v", o.bystander.name, err)
	}
	return nil
}

// inForce checks that the pod still has the throttle's quota, that the node is closed, and that the bystander is unchanged.
func (o *baseline) inForce(v *victim) error {
	o.scene.Helper()
	if err := o.scene.inForce(v); err != nil {
		return err
	}
	return o.checkBystander()
}

// requested is the sum of a pod's CPU requests in millicores.
func requested(pod *corev1.Pod) (millicores int) {
	for _, container := range pod.Spec.Containers {
		millicores += int(container.Resources.Requests.Cpu().MilliValue())
	}
	return millicores
}

// waitAccounted waits until each changed file has exactly one journal entry and each entry a changed file
// (I1), and every quota is between the floor and the original (I2).
func (o *baseline) waitAccounted(limit time.Duration) {
	o.scene.Helper()
	eventually(o.scene, limit, "cgroup files and journal agree", o.checkJournal)
}

// checkJournal returns an error unless journal and changed files correspond, and all quotas are in bounds.
func (o *baseline) checkJournal() error {
	out, err := tryOnNode(o.scene.node, "set -e; "+o.snapshotScript())
	if err != nil {
		return err
	}
	now, err := o.parseSnapshot(out)
	if err != nil {
		return err
	}
	if left := o.unjournalled(now); len(left) > 0 {
		return fmt.Errorf("the journal has no entry for %s", strings.Join(left, "; "))
	}
	for key, entry := range now.entries {
		if value, there := now.files[key]; !there {
			return fmt.Errorf("the journal has an entry for %s, which does not exist", key)
		} else if value == entry.Original {
			return fmt.Errorf("the journal has an entry for %s, which already has its original value %q", key, value)
		}
	}
	if err := o.checkBystander(); err != nil {
		return err
	}
	return o.bounded()
}

// bounded checks whether every quota is between the floor and the original.
func (o *baseline) bounded() error {
	for uid, v := range o.before {
		now, err := readSettings(o.scene.node, v.directory)
		if err != nil {
			return err
		}
		value, original, floor := now.millicores(), v.before.millicores(), o.floors[uid]
		if free := value < 0; !free && value < floor-1 || original > 0 && (free || value > original) {
			return fmt.Errorf("the quota of %s is %dm: the floor is %dm, the original is %dm", v.name, value, floor, original)
		}
	}
	return nil
}

// snapshot has the journal entries and the cgroup files of the baseline's pods, by UID and path below the pod's cgroup.
type snapshot struct {
	entries map[string]record
	files   map[string]string
}

// snapshotScript is a script that prints the journal and the files.
func (o *baseline) snapshotScript() string {
	script := "cat /var/lib/plimsoll/journal; "
	files := settingFiles + " */" + strings.ReplaceAll(settingFiles, " ", " */")
	for uid, v := range o.before {
		script += fmt.Sprintf("cd %s; grep -sH '' %s | sed 's|^|%s |'; ", v.directory, files, uid)
	}
	return script
}

// parseSnapshot reads what the script printed.
func (o *baseline) parseSnapshot(out string) (*snapshot, error) {
	entries, err := records(out)
	if err != nil {
		return nil, err
	}
	now := &snapshot{map[string]record{}, map[string]string{}}
	for _, entry := range entries {
		if o.bystander != nil && entry.UID == o.bystanderUID {
			o.scene.Fatalf("the journal has an entry for %s of %s, which no policy selects", entry.File, o.bystander.name)
		}
		key := entry.UID + " " + path.Join(entry.Lever, entry.File)
		if _, twice := now.entries[key]; twice {
			return nil, fmt.Errorf("two entries for %s", key)
		}
		if o.before[entry.UID] != nil {
			now.entries[key] = entry
		}
	}
	for _, line := range strings.Split(out, "\n") {
		if uid, _, _ := strings.Cut(line, " "); o.before[uid] != nil {
			key, value, _ := strings.Cut(line, ":")
			now.files[key] = value
		}
	}
	return now, nil
}

// unjournalled are the changed files without a journal entry.
func (o *baseline) unjournalled(now *snapshot) (left []string) {
	for key, value := range now.files {
		uid, file, _ := strings.Cut(key, " ")
		if _, journalled := now.entries[key]; !journalled && !o.before[uid].hadValue(file, value) {
			left = append(left, fmt.Sprintf("%s of %s, which has %q", file, o.before[uid].name, value))
		}
	}
	return left
}

// changesLeftByKilling kills the agent and returns the changed files of the scene's pods without a journal entry, which no agent would
// restore.
func (o *baseline) changesLeftByKilling(pid string) ([]string, error) {
	left, _, err := o.changesLeftBy(fmt.Sprintf("set -e; kill -KILL %s; ", pid) + untilGone(pid))
	return left, err
}

// changesLeftBy does the same with a script that stops the agent, and also returns its output. It reads everything in one command, before
// another agent starts.
func (o *baseline) changesLeftBy(script string) (left []string, out string, err error) {
	out, err = tryOnNode(o.scene.node, script+o.snapshotScript())
	if err != nil {
		return nil, out, err
	}
	now, err := o.parseSnapshot(out)
	if err != nil {
		return nil, out, err
	}
	return o.unjournalled(now), out, nil
}

// untilGone is a shell snippet that waits up to 5 s for a process to exit.
func untilGone(pid string) string {
	return fmt.Sprintf("n=0; while [ -d /proc/%s ]; do n=$((n + 1)); [ $n -lt 500 ]; sleep 0.01; done; ", pid)
}

// originals are the original values of the baseline's pods' files, according to the journal.
func (o *baseline) originals() map[string]string {
	o.scene.Helper()
	entries, err := journal(o.scene.node)
	if err != nil {
		o.scene.Fatal(err)
	}
	all := map[string]string{}
	for _, entry := range entries {
		if o.before[entry.UID] != nil {
			all[entry.UID+" "+path.Join(entry.Lever, entry.File)] = entry.Original
		}
	}
	return all
}

// hadValue checks whether a file of the pod, or of one of its containers, had this value before the test.
func (v *victim) hadValue(file, value string) bool {
	if directory, name := path.Split(file); directory != "" {
		return slices.Contains(strings.Split(v.before["containers/"+name], ", "), value)
	}
	return v.before["pod/"+file] == value
}

// waitAllRestored waits until files, journal, taint and status are as they were before the test (I6, I7).
func (o *baseline) waitAllRestored(limit time.Duration) {
	o.scene.Helper()
	deadline := time.Now().Add(limit)
	for _, v := range o.before {
		o.scene.waitRestored(time.Until(deadline), v.directory, v.before)
	}
	o.waitAccounted(5 * time.Second)
	o.scene.waitNoTaint(max(time.Second, time.Until(deadline)))
	// Except for changes of scheduling, the status is written at most every ten seconds.
	eventually(o.scene, max(15*time.Second, time.Until(deadline)), "the status says that nothing is in force", o.statusEmpty)
}

// statusEmpty returns an error if the status shows a throttled pod of the scene, or a closed node.
func (o *baseline) statusEmpty() error {
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

// waitAgent waits until the agent of a node is ready in a container other than `not`.
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
	if !plane.IsReady(pod) || pod.Status.ContainerStatuses[0].ContainerID == not {
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
