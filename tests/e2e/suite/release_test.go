//go:build e2e

package suite

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"plimsoll.dev/suite/pages"
	"plimsoll.dev/suite/plane"
)

// previousRelease is the revision to upgrade from: the last one whose agents post Evictions themselves. `make previous` builds
// its binary.
const previousRelease = "ab566abdeb5a3e976b52ecd50fa3a212a037d4c8"

// A release is the installation under test, managed as docs/install.md describes.
type release struct {
	page   *pages.Page
	values string // values file that each Helm command of the page gets in addition
}

// TestReleaseFromInstallToUninstall runs all commands of docs/install.md while pods are throttled and nodes closed. It
// has the cluster to itself, since it uninstalls everything at times.
func TestReleaseFromInstallToUninstall(t *testing.T) {
	needShell(t)
	r := &release{values: filepath.Join(t.TempDir(), "values.yaml")}
	r.page = pages.Read(t, absolute("."), "docs/install.md", binary(), "KUBECONFIG="+absolute("target/e2e/kubeconfig"))
	r.page.Helm(plane.Tool(t, plane.Helm()), r.values)
	repository, tag, err := image()
	if err != nil {
		t.Fatal(err)
	}
	r.setValues(t, repository, tag, generousBudgets)
	t.Cleanup(func() {
		if err := install(); err != nil {
			t.Error(err)
		}
	})
	for _, part := range []struct {
		name string
		test func(*testing.T, *release)
	}{
		{"uninstalling while actions are in force restores every node", uninstallWhileActing},
		{"a fresh installation passes its checks", freshInstall},
		{"the preset of an installation is changed, and removed", anotherPreset},
		{"actions stay in force during upgrade and rollback", upgradeAndRollBack},
		{"upgrade and rollback during a round evict no pod twice", upgradeDuringRound},
		{"uninstalling is refused while a node is unreachable", uninstallWithNodeAway},
		{"it is installed and removed without Helm", withoutHelm},
	} {
		if !t.Run(part.name, func(t *testing.T) { part.test(t, r) }) {
			return
		}
	}
	r.page.CheckAllRun()
}

// setValues sets the additional values of the page's commands.
func (r *release) setValues(t *testing.T, repository, tag, more string) {
	t.Helper()
	ours, err := values(repository, tag)
	if err == nil {
		err = os.WriteFile(r.values, []byte(ours+more), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// pressureOnAllNodes puts every node under pressure at the same time.
func pressureOnAllNodes(t *testing.T) (all []*baseline) {
	t.Helper()
	for _, node := range nodes {
		s := newScene(t, node)
		o, _ := underPressure(t, s)
		all = append(all, o)
	}
	return all
}

// uninstallWhileActing runs the page's commands for removal while pods are throttled and nodes closed.
func uninstallWhileActing(t *testing.T, r *release) {
	all := pressureOnAllNodes(t)
	t.Cleanup(func() { // so that the scenes can clean up
		if t.Failed() {
			install()
		} else {
			r.installWith(t, "preview")
		}
	})
	r.page.Run(t, "Uninstall")
	for _, o := range all {
		o.checkNoTrace(t)
		if records, err := journal(o.scene.node); err != nil || len(records) > 0 {
			t.Errorf("unexpected entries in the journal of %s: %v (%v)", o.scene.node, records, err)
		}
	}
	noFinalizers(t)
	// API servers create an APIService for each group of the CRDs. Pods and a namespace take a moment to terminate.
	stays := []string{"avoidanceaction", "nodeqos", "podqos", "nodewatermark", "customresourcedefinition",
		"apiservice.apiregistration.k8s.io/v1alpha1.ensurance.crane.io", "apiservice.apiregistration.k8s.io/v1alpha1.plimsoll.dev",
		"namespace/" + namespace, "lease.coordination.k8s.io/plimsoll-controller",
		"secret/plimsoll-metrics-ca", "configmap/plimsoll-report-ca", "configmap/plimsoll-evictions"}
	eventually(t, 2*time.Minute, "only the objects that the page lists are left", func() error {
		left, err := ownObjects()
		if err != nil {
			return err
		}
		for _, name := range left {
			kind, _, _ := strings.Cut(name, ".")
			if !slices.Contains(stays, kind) && !slices.Contains(stays, name) {
				return fmt.Errorf("%s still exists, of %v", name, left)
			}
		}
		return nil
	})
	// The pods keep burning CPU, and no agent reacts.
	always(t, 5*time.Second, "nothing changes a node any more", func() error {
		for _, o := range all {
			if found, err := taint(o.scene.node); err != nil || found != nil {
				return fmt.Errorf("taint is %v (%v)", found, err)
			}
			if err := o.checkUnchanged(); err != nil {
				return err
			}
		}
		return nil
	})
	r.page.Run(t, "Remove the rest")
	eventually(t, 2*time.Minute, "nothing at all is left", func() error {
		left, err := ownObjects()
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("%v", left)
		}
		return err
	})
}

// checkNoTrace fails the test unless a node has no trace of us.
func (o *baseline) checkNoTrace(t *testing.T) {
	t.Helper()
	if err := o.checkUnchanged(); err != nil {
		t.Error(err)
	}
	if found, err := taint(o.scene.node); err != nil || found != nil {
		t.Errorf("the taint of %s is %v (%v)", o.scene.node, found, err)
	}
	if condition := nodeCondition(t, o.scene.node); condition != nil {
		t.Errorf("%s has the condition %v", o.scene.node, condition)
	}
}

// checkUnchanged returns an error that names the changed cgroups.
func (o *baseline) checkUnchanged() error {
	for _, v := range o.before {
		now, err := readSettings(o.scene.node, v.directory)
		if err == nil {
			err = checkRestored(v.before, now)
		}
		if err != nil {
			return fmt.Errorf("%s on %s: %w", v.name, o.scene.node, err)
		}
	}
	return o.checkBystander()
}

// noFinalizers fails the test if one of our objects has a finalizer, which nothing would remove after an uninstallation.
func noFinalizers(t *testing.T) {
	t.Helper()
	found := kubectl(t, "get", "nodeqoss,podqoss,avoidanceactions,nodewatermarks,crds", "-o",
		`jsonpath={range .items[?(@.metadata.finalizers)]}{.kind}/{.metadata.name} {.metadata.finalizers}{"\n"}{end}`)
	for _, line := range strings.Split(found, "\n") {
		// The API server adds this finalizer while it deletes a CRD.
		if line != "" && !strings.Contains(line, "customresourcecleanup.apiextensions.k8s.io") {
			t.Errorf("a finalizer still exists: %s", line)
		}
	}
}

// ownObjects are all objects with our name, label or kinds, except events.
func ownObjects() ([]string, error) {
	kinds, err := tryKubectl("", "api-resources", "--verbs=list", "-o", "name")
	if err != nil {
		return nil, err
	}
	wanted := slices.DeleteFunc(strings.Fields(kinds), func(kind string) bool { return strings.HasPrefix(kind, "events") })
	all, err := tryKubectl("", "get", strings.Join(wanted, ","), "--all-namespaces", "-o", "name")
	if err != nil {
		return nil, err
	}
	labelled, err := tryKubectl("", "get", strings.Join(wanted, ","), "--all-namespaces", "-o", "name", "-l", "app.kubernetes.io/name=plimsoll")
	if err != nil {
		return nil, err
	}
	ours := strings.Fields(labelled)
	for _, name := range strings.Fields(all) {
		if strings.Contains(name, "plimsoll") || strings.Contains(name, "ensurance.crane.io") {
			ours = append(ours, name)
		}
	}
	slices.Sort(ours)
	return slices.Compact(ours), nil
}

// installWith installs the chart with a preset on a cluster that has neither a release nor the CRDs.
func (r *release) installWith(t *testing.T, preset string) {
	t.Helper()
	repository, tag, err := image()
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "policies are no longer served", func() error {
		if found, err := tryKubectl("", "get", "--raw", "/apis/ensurance.crane.io/v1alpha1"); err == nil {
			return fmt.Errorf("the API is still served: %s", found)
		}
		return nil
	})
	r.setValues(t, repository, tag, generousBudgets+"policies: {preset: "+preset+"}\n")
	r.page.Run(t, "Where a Pod Security standard is enforced by default") // other tests let Helm create the namespace
	r.page.Run(t, "Install")
	r.setValues(t, repository, tag, generousBudgets)
}

// freshInstall checks an installation with preset preview, and the page's own checks of it.
func freshInstall(t *testing.T, r *release) {
	// Policies can be created only after a hook has seen their CRDs served.
	waitPreset(t, "preview")
	if reported := events(t, "Job", namespace, "plimsoll-policies"); !slices.Contains(reported, "Completed: Job completed") {
		t.Errorf("unexpected events of the Job that waits for the definitions: %q", reported)
	}
	if left := kubectl(t, "get", "jobs,sa", "-n", namespace, "-l", "app.kubernetes.io/component=policies", "-o", "name"); left != "" {
		t.Errorf("the hook that waits for the definitions did not delete %s", left)
	}
	if out := r.page.Run(t, "See that it works"); strings.Count(out, "nothing is wrong: ") != 2 {
		t.Errorf("unexpected output: %s", out)
	}
	if pods := componentPods(t, "agent"); len(pods) != len(nodes) {
		t.Errorf("agents: %v", podNames(pods))
	}
	if left := kubectl(t, "get", "all,sa,roles,rolebindings", "-n", namespace, "-l", "app.kubernetes.io/component=test", "-o", "name"); left != "" {
		t.Errorf("helm test did not delete %s", left)
	}
	for _, node := range nodes {
		driver := map[string]string{"v1": "cgroupfs", "v2": "systemd"}[node]
		if out := r.page.Run(t, "Which layout", "NODE", node); !strings.Contains(out, `"cgroupDriver": "`+driver+`"`) {
			t.Errorf("the kubelet of %s reports %s", node, out)
		}
	}
	// Make sure that the checks can fail.
	kubectl(t, "scale", "-n", namespace, "deployment/plimsoll-controller", "--replicas=0")
	out, err := r.page.Try("See that it works")
	if err == nil || !strings.Contains(out, "0 of 0 replicas are ready") {
		t.Errorf("without a controller the check printed %s (%v)", out, err)
	}
	kubectl(t, "scale", "-n", namespace, "deployment/plimsoll-controller", "--replicas=2")
	kubectl(t, "rollout", "status", "-n", namespace, "deployment/plimsoll-controller", "--timeout=180s")
}

// presets are the rules of each preset, in order; those of `preview` only report.
var presets = map[string][]string{
	"preview":      {"cpu-close", "cpu-throttle", "memory-evict", "memory-reclaim"},
	"conservative": {"cpu-prefer-others", "cpu-throttle"},
}

// waitPreset waits until every node has evaluated the rules of a preset, and fails the test if there are other policies.
func waitPreset(t *testing.T, preset string) {
	t.Helper()
	for _, node := range nodes {
		eventually(t, 90*time.Second, "node "+node+" evaluates the rules of preset "+preset, func() error { return evaluatesPreset(node, preset) })
	}
	for _, policy := range strings.Fields(kubectl(t, "get", "nodeqoss,podqoss,avoidanceactions", "-o", "name")) {
		if !strings.Contains(policy, "/plimsoll-"+preset) {
			t.Errorf("with preset %s: unexpected policy %s", preset, policy)
		}
	}
}

// evaluatesPreset checks that a node enforces exactly the rules of a preset and has a value for each.
func evaluatesPreset(node, preset string) error {
	now, err := watermarkOf(node)
	if err != nil {
		return err
	}
	var evaluated []string
	for _, rule := range now.Status.Rules {
		if rule.Value != nil && (rule.Strategy == "Preview") == (preset == "preview") {
			evaluated = append(evaluated, strings.TrimPrefix(rule.ID, "plimsoll-"+preset+"/"))
		}
	}
	slices.Sort(evaluated)
	if !slices.Equal(evaluated, presets[preset]) || len(evaluated) != len(now.Status.Rules) {
		return fmt.Errorf("the agent has evaluated %v: %+v", evaluated, now.Status.Rules)
	}
	return nil
}

// anotherPreset continues with preset preview installed.
func anotherPreset(t *testing.T, _ *release) {
	choose := func(preset string) { // as the release notes say
		t.Helper()
		if _, err := helm("", "upgrade", "plimsoll", absolute("charts/plimsoll"), "--namespace", namespace, "--reset-then-reuse-values",
			"--set", "policies.preset="+preset+",policies.mode=Enforce", "--wait"); err != nil {
			t.Fatal(err)
		}
	}
	choose("conservative")
	// Its rules act, so skip the canary phase.
	kubectl(t, "annotate", "nodeqos", "plimsoll-conservative", "plimsoll.dev/rollout=immediate")
	waitPreset(t, "conservative")
	choose("none")
	if left := kubectl(t, "get", "nodeqoss,podqoss,avoidanceactions", "-o", "name"); left != "" {
		t.Errorf("policies without a preset: %s", left)
	}
	for _, node := range nodes {
		eventually(t, time.Minute, "node "+node+" has no rules", func() error { return checkNoRules(node) })
	}
}

// upgradeAndRollBack upgrades from the previous release, rolls back and upgrades again, while actions are in force.
func upgradeAndRollBack(t *testing.T, r *release) {
	chart, older, missing := olderRelease(t)
	if missing != nil {
		// Run the page's commands anyway.
		chart, older = absolute("charts/plimsoll"), binary()
	}
	before := r.installPrevious(t, chart, older)
	all := pressureOnAllNodes(t)
	checkInForce := watchInForce(t, all)
	now, tag, err := image()
	if err != nil {
		t.Fatal(err)
	}

	// As in an older CRD, which has no columns.
	kubectl(t, "patch", "crd", "nodewatermarks.plimsoll.dev", "--type=json", "-p", `[{"op": "remove", "path": "/spec/versions/0/additionalPrinterColumns"}]`)
	r.setValues(t, now, tag, generousBudgets)
	r.page.Run(t, "Upgrade")
	waitAgentsRun(t, now)
	checkInForce("an upgrade")
	if columns := kubectl(t, "get", "crd", "nodewatermarks.plimsoll.dev", "-o", "jsonpath={.spec.versions[0].additionalPrinterColumns[*].name}"); !strings.Contains(columns, "Stopped") {
		t.Errorf("the definitions were not upgraded: %s", columns)
	}

	r.page.Run(t, "Roll back")
	waitAgentsRun(t, before)
	checkInForce("a rollback")

	r.page.Run(t, "Upgrade")
	checkInForce("another upgrade")
	for _, o := range all {
		o.waitAccounted(10 * time.Second)
		o.scene.set(cold)
	}
	for _, o := range all {
		o.waitAllRestored(60 * time.Second)
	}
	if missing != nil {
		t.Skipf("NOT TESTED: only the name of an image was upgraded, because chart and binary of revision %s are not available here (make previous): %v",
			previousRelease, missing)
	}
}

// installPrevious replaces the installation with one of an older chart and its binary, and returns the repository of its image.
func (r *release) installPrevious(t *testing.T, chart, older string) (before string) {
	t.Helper()
	before, err := load("previous", older)
	if err != nil {
		t.Fatal(err)
	}
	old, err := values(before, "latest")
	if err != nil {
		t.Fatal(err)
	}
	// Objects that controllers created outlive the release, and the older chart has objects of the same names.
	r.page.Run(t, "Uninstall")
	if _, err := helm(old+generousBudgets, "install", "plimsoll", chart, "--namespace", namespace, "--wait", "--timeout", "180s", "--values", "-", "--take-ownership"); err != nil {
		t.Fatal(err)
	}
	waitAgentsRun(t, before)
	return before
}

// upgradeDuringRound: old agents evict by themselves, new ones ask the leader. The release changes while a pod
// terminates.
func upgradeDuringRound(t *testing.T, r *release) {
	onlyLong(t)
	chart, older, missing := olderRelease(t)
	if missing != nil {
		t.Skipf("NOT TESTED: chart and binary of revision %s are not available here (make previous): %v", previousRelease, missing)
	}
	now, tag, err := image()
	if err != nil {
		t.Fatal(err)
	}
	before := r.installPrevious(t, chart, older)
	s := newScene(t, nodes[0])
	const grace = 45 // longer than a rollout of the agents takes
	pods := s.owned(s.lingers("first", grace), s.lingers("second", grace), s.lingers("third", grace), s.lingers("fourth", grace))
	e := s.watchTerminations(pods)
	s.evictOnePodPerRound()
	s.set(hot)
	next := func(count int, by string) {
		t.Helper()
		eventually(t, 3*time.Minute, fmt.Sprintf("pod %d is evicted by %s", count, by), func() error { return e.count(count) })
	}
	next(1, "the old agent")
	r.setValues(t, now, tag, generousBudgets)
	r.page.Run(t, "Upgrade")
	waitAgentsRun(t, now)
	next(2, "the leader")
	r.page.Run(t, "Roll back")
	waitAgentsRun(t, before)
	next(3, "the old agent")
	r.page.Run(t, "Upgrade")
	waitAgentsRun(t, now)
	next(4, "the leader")
	s.set(cold)
	e.onePerRound()
}

// olderRelease returns the directory of the older chart and its binary, and an error if they are not available. A binary that the environment names
// must exist.
func olderRelease(t *testing.T) (chart, older string, missing error) {
	t.Helper()
	named := os.Getenv("PLIMSOLL_E2E_PREVIOUS_BINARY")
	older = cmp.Or(named, absolute("target/previous/plimsoll"))
	directory := t.TempDir()
	script := "test -x " + older + " && git -C " + absolute(".") + " archive " + previousRelease + " charts/plimsoll | tar -x -C " + directory
	if out, err := exec.Command("bash", "-o", "pipefail", "-c", script).CombinedOutput(); err != nil {
		missing = fmt.Errorf("%w: %s", err, out)
	}
	if named != "" && missing != nil {
		t.Fatalf("%s and the chart of revision %s are not available: %v", named, previousRelease, missing)
	}
	return filepath.Join(directory, "charts/plimsoll"), older, missing
}

// waitAgentsRun waits until all agents, and nothing else, run an image.
func waitAgentsRun(t *testing.T, image string) {
	t.Helper()
	eventually(t, 2*time.Minute, "all agents run "+image, func() error {
		pods := componentPods(t, "agent")
		for _, pod := range pods {
			if !strings.HasPrefix(pod.Spec.Containers[0].Image, image+":") || !plane.IsReady(&pod) {
				return fmt.Errorf("%s runs %s", pod.Name, pod.Spec.Containers[0].Image)
			}
		}
		if len(pods) != len(nodes) {
			return fmt.Errorf("there are %v", podNames(pods))
		}
		return nil
	})
}

// watchInForce polls whether quotas and taints stay in force. The returned function fails the test if any did not since the last call.
func watchInForce(t *testing.T, all []*baseline) (check func(during string)) {
	t.Helper()
	quotas := map[*victim]int{}
	for _, o := range all {
		for _, v := range o.before {
			quotas[v] = o.scene.settings(v.directory).millicores()
		}
	}
	var lock sync.Mutex
	polls, lost := 0, []string{}
	poll := func() {
		for _, o := range all {
			found, err := taint(o.scene.node)
			if err == nil && found == nil {
				err = fmt.Errorf("the taint of %s is gone", o.scene.node)
			}
			for _, v := range o.before {
				if err == nil {
					err = o.scene.checkQuota(v, quotas[v])
				}
			}
			lock.Lock()
			if polls++; err != nil {
				lost = append(lost, time.Now().Format("15:04:05.0 ")+err.Error())
			}
			lock.Unlock()
		}
	}
	repeatedly(t, poll)
	return func(during string) {
		t.Helper()
		lock.Lock()
		defer lock.Unlock()
		t.Logf("%s: checked %d times that actions are in force", during, polls)
		if polls == 0 || len(lost) > 0 {
			t.Fatalf("during %s actions were not in force in %d of %d checks:\n%s", during, len(lost), polls, strings.Join(lost[:min(len(lost), 5)], "\n"))
		}
		polls = 0
	}
}

// uninstallWithNodeAway uninstalls while the agent of one node is stopped, in the three ways of the page: the release stays, the node comes
// back, or it never does.
func uninstallWithNodeAway(t *testing.T, r *release) {
	repository, tag, err := image()
	if err != nil {
		t.Fatal(err)
	}
	r.setValues(t, repository, tag, generousBudgets+"uninstall: {timeoutSeconds: 30}\n")
	r.page.Run(t, "Upgrade")
	all := pressureOnAllNodes(t)
	away := all[len(all)-1]
	leave, back := away.scene.stopAgent()
	refused := func() {
		t.Helper()
		out, err := r.page.Try("Uninstall")
		if err == nil || !strings.Contains(out, "not yet: "+away.scene.node+";") {
			t.Fatalf("helm uninstall was not refused as expected: %s (%v)", out, err)
		}
		t.Logf("helm uninstall prints %s", out)
	}

	leave()
	checkInForce := watchInForce(t, []*baseline{away})
	refused()
	checkInForce("an uninstallation that was refused")
	for _, o := range all[:len(all)-1] {
		o.checkNoTrace(t)
	}
	if pods := componentPods(t, "controller"); len(pods) != 2 {
		t.Errorf("controllers are %v", podNames(pods))
	}

	// The user changes their mind.
	if _, err := r.page.Try("Upgrade"); err == nil {
		t.Error("Helm upgraded a release that it has started to remove, although docs/install.md says that it cannot")
	}
	r.page.Run(t, "Cancel the uninstallation", "REVISION", strconv.Itoa(revisionOf(t)))
	waitAgent(away.scene, "")
	for _, o := range all {
		eventually(t, time.Minute, "all actions are in force again", func() error {
			for _, v := range o.before {
				if o.scene.throttled(v.name) == nil {
					return fmt.Errorf("%s is not throttled", v.name)
				}
			}
			found, err := taint(o.scene.node)
			if err == nil && found == nil {
				err = fmt.Errorf("%s has no taint", o.scene.node)
			}
			return err
		})
	}
	r.page.Run(t, "Upgrade")

	// The node comes back.
	leave()
	refused()
	back()
	r.page.Run(t, "The node comes back")
	for _, o := range all {
		o.checkNoTrace(t)
	}

	// The node never comes back.
	r.page.Run(t, "The node comes back after that")
	for _, o := range all {
		for _, v := range o.before {
			eventually(t, time.Minute, v.name+" is throttled again", func() error {
				if reported := o.scene.throttled(v.name); reported == nil || reported.Ratio != 50 {
					return fmt.Errorf("the status reports %+v", reported)
				}
				return nil
			})
		}
		o.scene.waitTaint(30*time.Second, "NoSchedule")
	}
	leave()
	refused()
	r.page.Run(t, "The node never comes back")
	for _, o := range all[:len(all)-1] {
		o.checkNoTrace(t)
	}
	if err := away.checkUnchanged(); err == nil {
		t.Error("the node without an agent is already restored, so this proves nothing")
	}
	// The node comes back to a new installation.
	r.page.Run(t, "The node comes back after that")
	for _, o := range all {
		o.scene.set(cold)
	}
	for _, o := range all {
		o.waitAllRestored(90 * time.Second)
	}
}

// stopAgent returns two functions: leave stops the node's agent without cleanup, back starts it again.
func (s *scene) stopAgent() (leave, back func()) {
	sets := kube.AppsV1().DaemonSets(namespace)
	get := func() *appsv1.DaemonSet {
		s.Helper()
		set, err := sets.Get(background, "plimsoll-agent-"+s.node, metav1.GetOptions{})
		if err != nil {
			s.Fatal(err)
		}
		return set
	}
	original := get().Spec.Template.Spec.Containers[0].Image
	setImage := func(image string) {
		s.Helper()
		const editor = "away"
		kubectl(s, "set", "image", "-n", namespace, "daemonset/plimsoll-agent-"+s.node, "agent="+image, "--field-manager="+editor)
		// Remove our field manager: Helm 4 uses server-side apply and would report a conflict.
		eventually(s, time.Minute, "the image has no field manager", func() error {
			set := get()
			set.ManagedFields = slices.DeleteFunc(set.ManagedFields, func(entry metav1.ManagedFieldsEntry) bool { return entry.Manager == editor })
			_, err := sets.Update(background, set, metav1.UpdateOptions{})
			return err
		})
	}
	leave = func() {
		s.Helper()
		setImage("plimsoll.dev/e2e/nowhere:latest")
		eventually(s, 2*time.Minute, "the agent is stopped", func() error {
			pod, err := kube.CoreV1().Pods(namespace).Get(background, agentPod(s.node), metav1.GetOptions{})
			if err != nil {
				return err
			}
			if states := pod.Status.ContainerStatuses; len(states) == 0 || states[0].State.Waiting == nil || states[0].ContainerID != "" {
				return fmt.Errorf("its state is %+v", states)
			}
			return nil
		})
	}
	back = func() {
		s.Helper()
		setImage(original)
		waitAgent(s, "")
	}
	return leave, back
}

// revisionOf is the release's latest revision.
func revisionOf(t *testing.T) int {
	t.Helper()
	out, err := helm("", "history", "plimsoll", "--namespace", namespace, "--output", "json")
	var history []struct{ Revision int }
	if err == nil {
		err = json.Unmarshal([]byte(out), &history)
	}
	if err != nil || len(history) == 0 {
		t.Fatalf("%s: %v", out, err)
	}
	return history[len(history)-1].Revision
}

// withoutHelm installs and removes Plimsoll with kubectl alone.
func withoutHelm(t *testing.T, r *release) {
	r.page.Run(t, "Uninstall")
	r.page.Run(t, "Remove the rest")
	eventually(t, 2*time.Minute, "the namespace is gone", func() error {
		if _, err := kube.CoreV1().Namespaces().Get(background, namespace, metav1.GetOptions{}); err == nil {
			return fmt.Errorf("it still exists")
		}
		return nil
	})
	r.page.Run(t, "Without Helm")
	all := pressureOnAllNodes(t)
	t.Cleanup(func() { // so that the scenes can clean up
		if err := install(); err != nil {
			t.Error(err)
		}
	})
	r.page.Run(t, "Remove it without Helm")
	for _, o := range all {
		o.checkNoTrace(t)
	}
	if found := kubectl(t, "get", "crds", "-o", "name"); strings.Contains(found, "plimsoll") || strings.Contains(found, "crane") {
		t.Errorf("definitions still exist: %s", found)
	}

	// What an agent leaves behind if its account was deleted first.
	leftBehind := all[0]
	node := leftBehind.scene.node
	kubectl(t, "taint", "nodes", node, "interference.crane.io=:NoSchedule")
	kubectl(t, "patch", "node", node, "--subresource=status", "-p",
		`{"status":{"conditions":[{"type":"InterferenceIdentified","status":"True","reason":"x","message":"x"}]}}`)
	if nodeCondition(t, node) == nil {
		t.Fatal("the node does not have the condition")
	}
	r.page.Run(t, "Where the agents were not stopped first", "NODE", node)
	leftBehind.checkNoTrace(t)
}
