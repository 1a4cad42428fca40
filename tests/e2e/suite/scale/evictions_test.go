//go:build e2e

package scale

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	shared "plimsoll.dev/suite/plane"
	"plimsoll.dev/suite/report"
)

const (
	// The number of nodes on which pods are evicted.
	evicting = 50
	// The fleet's budget in the scene: this many evictions per window.
	allowed = 7
	window  = 20 * time.Second
	// In all, more victims than the budget allows.
	victimsPerNode = 3
)

// expected are parts of the messages of refusals while the fleet's budget is spent, and during a failover.
var expected = []string{"the fleet's budget", "leads", "the leader has not read the eviction record yet", "the leader has not read all policies and nodes yet", "another eviction of the same node is in progress",
	"the outcome of another eviction on the node is not known yet"}

// evicts are policies that have agents evict victims. Only agents evaluate rules, so the simulated ones can request evictions at any time.
var evicts = []string{
	`{"apiVersion": "ensurance.crane.io/v1alpha1", "kind": "AvoidanceAction", "metadata": {"name": "move", "annotations": {"plimsoll.dev/rollout": "immediate"}},
		"spec": {"eviction": {"terminationGracePeriodSeconds": 30, "evictUnowned": true}}}`,
	`{"apiVersion": "ensurance.crane.io/v1alpha1", "kind": "PodQOS", "metadata": {"name": "victims", "annotations": {"plimsoll.dev/rollout": "immediate"}},
		"spec": {"allowedActions": ["eviction"], "labelSelector": {"matchLabels": {"app": "victim"}}}}`,
	`{"apiVersion": "ensurance.crane.io/v1alpha1", "kind": "NodeQOS", "metadata": {"name": "busy", "annotations": {"plimsoll.dev/rollout": "immediate"}},
		"spec": {"selector": {}, "rules": [{"name": "cpu", "avoidanceThreshold": 1, "actionName": "move", "strategy": "Enforce",
		"metricRule": {"name": "cpu_total_usage", "value": 4000}}]}}`,
}

// evictors simulate the agents of the nodes: each requests the eviction of one pod of its node after the other, without a pause.
type evictors struct {
	lock sync.Mutex
	// started is when each pod started to terminate, truncated to seconds, including evictions whose answer was lost.
	started map[types.UID]time.Time
	// accepted are the evictions whose answer arrived.
	accepted []types.UID
	// refusals counts refused requests by message.
	refusals map[string]int
}

// TestFleetEvictionBudgetSurvivesFailovers: fifty agents request evictions at once; the leader is
// killed twice meanwhile.
func TestFleetEvictionBudgetSurvivesFailovers(t *testing.T) {
	p := installed(t)
	nodes := p.nodes(evicting)
	p.victims(nodes)
	replicas := []*replica{p.startReplica("first"), p.startReplica("second")}
	p.Apply(evicts...)
	e := &evictors{started: map[types.UID]time.Time{}, refusals: map[string]int{}}
	e.watch(p)
	running, end := context.WithCancel(background)
	var all sync.WaitGroup
	var agents []*evictor
	for _, node := range nodes {
		agents = append(agents, p.agentOf(node, replicas))
	}
	waitForRules(p.Plane, agents)
	for _, agent := range agents {
		all.Go(func() { e.act(running, agent) })
	}
	until := func(what string, evictions int) {
		t.Helper()
		p.Eventually(3*time.Minute, what, func() error {
			if started := e.count(); started < evictions {
				return fmt.Errorf("only %d evictions started, refused: %v", started, e.refusalCounts())
			}
			return nil
		})
	}
	until("the first pods are evicted", allowed)
	for round := range 2 {
		leader := p.leaderOf(replicas)
		leader.Kill()
		until(fmt.Sprintf("evictions continue after failover %d", round+1), e.count()+2*allowed)
		leader.Start()
		p.Eventually(time.Minute, "the killed replica is ready again", leader.ready)
	}
	end()
	all.Wait()
	p.Eventually(time.Minute, "all terminating pods are recorded", func() error { return e.checkAllRecorded(p) })
	e.checkBudget(t)
	t.Logf("%d evictions on %d nodes, of which %d were answered; refused: %v", e.count(), evicting, len(e.accepted), e.refusalCounts())
	for reason := range e.refusals {
		if !slices.ContainsFunc(expected, func(words string) bool { return strings.Contains(reason, words) }) {
			t.Errorf("refused for another reason: %s", reason)
		}
	}
}

// TestAgentWithOldRulesIsRefusedThenEvictsOnceWithNewRules: a policy edit arrives between the agent's decision and its request.
func TestAgentWithOldRulesIsRefusedThenEvictsOnceWithNewRules(t *testing.T) {
	p := installed(t)
	node := p.nodes(1)[0]
	p.victims([]string{node})
	a := p.agentOf(node, []*replica{p.startReplica("only")})
	p.Apply(evicts...)
	e := &evictors{started: map[types.UID]time.Time{}, refusals: map[string]int{}}
	e.watch(p)
	older := ""
	p.Eventually(time.Minute, "the node has rules", func() (err error) {
		if older, err = a.hash(); err == nil && older == "" {
			err = fmt.Errorf("it has none")
		}
		return err
	})
	victim := func() *corev1.Pod {
		pod, err := p.Kube.CoreV1().Pods("default").Get(background, "victim-"+node+"-0", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return pod
	}
	p.Eventually(time.Minute, "the pod runs", func() error {
		if phase := victim().Status.Phase; phase != corev1.PodRunning {
			return fmt.Errorf("its phase is %s", phase)
		}
		return nil
	})
	pod := victim()
	p.Apply(strings.Replace(evicts[2], "4000", "3000", 1))
	newer := older
	p.Eventually(time.Minute, "the node has other rules", func() (err error) {
		if newer, err = a.hash(); err == nil && newer == older {
			err = fmt.Errorf("the rules have not changed")
		}
		return err
	})
	for range 3 {
		verdict, err := a.request(background, a.nextRequest(pod, older))
		if err != nil || verdict.Result != "wait" || verdict.By != "leader" || !strings.Contains(verdict.Why, "the node's rules have changed") {
			t.Errorf("unexpected response to a request based on the older rules: %+v (%v)", verdict, err)
		}
	}
	if count := e.count(); count != 0 {
		t.Fatalf("%d pods were evicted because of the older rules", count)
	}
	var eviction report.Eviction
	p.Eventually(time.Minute, "the pod is evicted by the new rules", func() error {
		eviction = a.nextRequest(pod, newer) // the leader may see the new rules a moment later
		verdict, err := a.request(background, eviction)
		if err == nil && verdict.Result != "accepted" {
			err = fmt.Errorf("unexpected response: %+v", verdict)
		}
		return err
	})
	// The same request again, as after a lost answer.
	if verdict, err := a.request(background, eviction); err != nil || verdict.Result != "accepted" {
		t.Errorf("unexpected response to the repeated request: %+v (%v)", verdict, err)
	}
	p.Eventually(time.Minute, "one pod terminates", func() error {
		if count := e.count(); count != 1 {
			return fmt.Errorf("%d pods are terminating", count)
		}
		return nil
	})
}

// watch records every pod that starts to terminate, until the test ends.
func (e *evictors) watch(p *plane) {
	p.T.Helper()
	factory := informers.NewSharedInformerFactoryWithOptions(p.Kube, 0, informers.WithNamespace("default"),
		informers.WithTweakListOptions(func(options *metav1.ListOptions) { options.LabelSelector = "app=victim" }))
	note := func(object any) {
		pod, is := object.(*corev1.Pod)
		if !is || pod.DeletionTimestamp == nil {
			return
		}
		// The deletion timestamp includes the grace period.
		grace := time.Duration(ptr.Deref(pod.DeletionGracePeriodSeconds, 0)) * time.Second
		e.lock.Lock()
		defer e.lock.Unlock()
		if _, known := e.started[pod.UID]; !known {
			e.started[pod.UID] = pod.DeletionTimestamp.Add(-grace)
		}
	}
	pods := factory.Core().V1().Pods().Informer()
	if _, err := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: note, UpdateFunc: func(_, object any) { note(object) }, DeleteFunc: note,
	}); err != nil {
		p.T.Fatal(err)
	}
	stop := make(chan struct{})
	p.T.Cleanup(func() { close(stop) })
	factory.Start(stop)
	if !cache.WaitForCacheSync(stop, pods.HasSynced) {
		p.T.Fatal("the pods cannot be listed")
	}
}

// checkAllRecorded returns an error if watch did not record all terminating or deleted pods, or if a pod does not terminate although its
// eviction was accepted.
func (e *evictors) checkAllRecorded(p *plane) error {
	list, err := p.Kube.CoreV1().Pods("default").List(background, metav1.ListOptions{LabelSelector: "app=victim"})
	if err != nil {
		return err
	}
	running := 0
	for _, pod := range list.Items {
		if pod.DeletionTimestamp == nil {
			running++
		}
	}
	e.lock.Lock()
	defer e.lock.Unlock()
	if evicted := evicting*victimsPerNode - running; evicted != len(e.started) {
		return fmt.Errorf("only %d of %d evictions were recorded", len(e.started), evicted)
	}
	for _, uid := range e.accepted {
		if _, seen := e.started[uid]; !seen {
			return fmt.Errorf("%s was reported to its agent as evicted, but does not terminate", uid)
		}
	}
	return nil
}

// checkBudget fails the test if more pods started to terminate within a window than the budget allows.
func (e *evictors) checkBudget(t *testing.T) {
	t.Helper()
	started := slices.SortedFunc(maps.Values(e.started), time.Time.Compare)
	for index := range max(0, len(started)-allowed) {
		// An upper bound, because both times are truncated to seconds.
		if within := started[index+allowed].Sub(started[index]) + time.Second; within <= window {
			t.Errorf("evictions %d to %d began within %s, but only %d are allowed in %s", index, index+allowed, within, allowed, window)
		}
	}
}

func (e *evictors) count() int {
	e.lock.Lock()
	defer e.lock.Unlock()
	return len(e.started)
}

func (e *evictors) refusalCounts() string {
	e.lock.Lock()
	defer e.lock.Unlock()
	return fmt.Sprint(e.refusals)
}

// act requests the eviction of a node's pods, one after the other.
func (e *evictors) act(running context.Context, a *evictor) {
	pods := a.Kube.CoreV1().Pods("default")
	for running.Err() == nil {
		list, err := pods.List(running, metav1.ListOptions{FieldSelector: "spec.nodeName=" + a.node, LabelSelector: "app=victim"})
		if err == nil {
			for _, pod := range list.Items {
				if pod.DeletionTimestamp == nil && pod.Status.Phase == corev1.PodRunning {
					e.evict(running, a, &pod)
				}
			}
		}
		select {
		case <-running.Done():
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// evict requests the eviction of one pod, and records the outcome.
func (e *evictors) evict(running context.Context, a *evictor, pod *corev1.Pod) {
	hash, err := a.hash()
	if err != nil || hash == "" {
		return
	}
	verdict, err := a.request(running, a.nextRequest(pod, hash))
	e.lock.Lock()
	defer e.lock.Unlock()
	switch {
	case errors.Is(err, report.NotLeading):
		e.refusals["no replica leads"]++
	case err != nil: // a killed leader does not answer
	case verdict.Result == "accepted":
		e.accepted = append(e.accepted, pod.UID)
	case verdict.Result != "gone" && verdict.Result != "terminating":
		e.refusals[verdict.Why]++
	}
}

// An evictor is the agent of one node.
type evictor struct {
	*plane
	node, token string
	sequence    int64
	replicas    []*report.Connection
}

// agentOf is a client of these replicas with the token of a node's agent.
func (p *plane) agentOf(node string, replicas []*replica) *evictor {
	p.T.Helper()
	signer, err := report.NewSigner(p.SigningKey())
	if err != nil {
		p.T.Fatal(err)
	}
	a := &evictor{plane: p, node: node}
	if a.token, err = signer.Token(node); err != nil {
		p.T.Fatal(err)
	}
	for _, r := range replicas {
		a.replicas = append(a.replicas, report.Connect(fmt.Sprintf("127.0.0.1:%d", r.reports), &tls.Config{InsecureSkipVerify: true}))
	}
	return a
}

// waitForRules waits until the NodeWatermarks of all agents have the rule and the PodQOS, which are compiled one by one.
func waitForRules(p *shared.Plane, agents []*evictor) {
	p.T.Helper()
	p.Eventually(2*time.Minute, "all nodes have the rule", func() error {
		for _, a := range agents {
			object, err := p.Objects.Resource(watermarks).Get(background, a.node, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if text, err := object.MarshalJSON(); err != nil || !strings.Contains(string(text), "busy/cpu") || !strings.Contains(string(text), "victims") {
				return fmt.Errorf("%s does not have both policies (%v)", a.node, err)
			}
		}
		return nil
	})
}

// hash is the hash of the node's rules.
func (a *evictor) hash() (string, error) {
	object, err := a.Objects.Resource(watermarks).Get(background, a.node, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	hash, _, err := unstructured.NestedString(object.Object, "spec", "hash")
	return hash, err
}

// nextRequest is the agent's next request.
func (a *evictor) nextRequest(pod *corev1.Pod, hash string) report.Eviction {
	a.sequence++
	return report.Eviction{BootID: "boot-" + a.node, Sequence: a.sequence, Namespace: pod.Namespace, Name: pod.Name, UID: string(pod.UID), Rule: "busy/cpu", Hash: hash}
}

// request sends the request to one replica after the other until the leader answers: requests are idempotent.
func (a *evictor) request(running context.Context, eviction report.Eviction) (verdict report.Verdict, err error) {
	for _, to := range a.replicas {
		var failed error
		if verdict, failed = to.Evict(running, a.token, eviction); failed == nil {
			return verdict, nil
		}
		// Another error than NotLeading is more useful: the replica may have been the leader.
		if err == nil || errors.Is(err, report.NotLeading) {
			err = failed
		}
	}
	return verdict, err
}

// installed is a plane with the chart's objects, except the NodeMetrics API, which evictions do not need.
func installed(t *testing.T) *plane {
	p := &plane{Plane: shared.Start(t, []string{"--max-requests-inflight=800", "--max-mutating-requests-inflight=400"})}
	p.Run("kwok", "--kubeconfig="+p.Kubeconfig, "--manage-all-nodes=true", "--node-lease-duration-seconds=200")
	objects, err := exec.Command(p.Tool("helm"), "template", "plimsoll", shared.Absolute(t, "charts/plimsoll"), "--namespace=default",
		"--set=metricsAPI.enabled=false", "--set=tokens.creators={admin}").Output()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.TryKubectl(string(objects), "apply", "--server-side", "--force-conflicts", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	return p
}

// ownToken is a token of the controller's account bound to a pod, as a kubelet requests it: only such a token may evict.
func (p *plane) ownToken(name string) string {
	p.T.Helper()
	const account = "plimsoll-controller"
	pod, err := p.Kube.CoreV1().Pods("default").Create(background, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "controller-" + name},
		Spec:       corev1.PodSpec{ServiceAccountName: account, Containers: []corev1.Container{{Name: "it", Image: "none"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		p.T.Fatal(err)
	}
	bound := &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: bound}}
	token, err := p.Kube.CoreV1().ServiceAccounts("default").CreateToken(background, account, request, metav1.CreateOptions{})
	if err != nil {
		p.T.Fatal(err)
	}
	return token.Status.Token
}

// startReplica starts a replica of the controller with the chart's permissions.
func (p *plane) startReplica(name string) *replica {
	r := &replica{metrics: shared.FreePort(p.T), reports: shared.FreePort(p.T)}
	args := []string{"--listen", fmt.Sprintf("127.0.0.1:%d", r.metrics), "--report-listen", fmt.Sprintf("127.0.0.1:%d", r.reports), "--pod-ip=127.0.0.1",
		fmt.Sprintf("--eviction-budget-fleet=%d/%s", allowed, window)}
	for _, scope := range []string{"zone", "node", "namespace", "owner"} {
		args = append(args, fmt.Sprintf("--eviction-budget-%s=1000/%s", scope, window))
	}
	r.Process = p.ControllerWith(p.KubeconfigForToken(name, p.ownToken(name)), 0, args...)
	p.Eventually(time.Minute, "the replica is ready", r.ready)
	return r
}

func (p *plane) leaderOf(replicas []*replica) (leader *replica) {
	p.T.Helper()
	p.Eventually(time.Minute, "a replica leads", func() error {
		for _, r := range replicas {
			if leader = r; r.leads() {
				return nil
			}
		}
		return fmt.Errorf("no replica leads")
	})
	return leader
}

// victims creates pods that agents may evict, more per node than the budget allows.
func (p *plane) victims(nodes []string) {
	p.T.Helper()
	for _, node := range nodes {
		for index := range victimsPerNode {
			pod := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("victim-%s-%d", node, index), Labels: map[string]string{"app": "victim"}},
				Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "it", Image: "none"}}},
			}
			if _, err := p.Kube.CoreV1().Pods("default").Create(background, pod, metav1.CreateOptions{}); err != nil {
				p.T.Fatal(err)
			}
		}
	}
}
