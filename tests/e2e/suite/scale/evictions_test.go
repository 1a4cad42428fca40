//go:build e2e

package scale

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	shared "plimsoll.dev/suite/plane"
)

const (
	evicting = 50
	// The fleet's budget in the scene, and how long it lasts.
	allowed = 7
	window  = 20 * time.Second
	// More than agents are let evict.
	victimsPerNode = 3
)

// evictors stand for the agents of the nodes: each evicts one pod of its node after the other, as fast as it is let.
type evictors struct {
	lock sync.Mutex
	// begun has when each pod began to end, cut to the second, as the API server has stamped it: also of an eviction whose answer got lost.
	begun map[types.UID]time.Time
	// accepted are those that somebody was told of.
	accepted []types.UID
	// refusals counts them by their words.
	refusals map[string]int
}

// TestTheFleetsBudgetOfEvictionsHoldsOverFailovers: fifty agents want to evict at once, for as long as they are let; the leader is
// killed twice meanwhile.
func TestTheFleetsBudgetOfEvictionsHoldsOverFailovers(t *testing.T) {
	p := guarded(t)
	nodes := p.nodes(evicting)
	p.victims(nodes)
	replicas := []*replica{p.guard("first"), p.guard("second")}
	e := &evictors{begun: map[types.UID]time.Time{}, refusals: map[string]int{}}
	e.watch(p)
	running, end := context.WithCancel(background)
	var all sync.WaitGroup
	for _, node := range nodes {
		agent := p.agentOf(node)
		all.Go(func() { e.act(running, agent, node) })
	}
	until := func(what string, evictions int) {
		t.Helper()
		p.Eventually(3*time.Minute, what, func() error {
			if begun := e.count(); begun < evictions {
				return fmt.Errorf("%d are, refused: %v", begun, e.said())
			}
			return nil
		})
	}
	until("the first are evicted", allowed)
	for round := range 2 {
		leader := p.leaderOf(replicas)
		leader.Kill()
		until(fmt.Sprintf("evictions go on after failover %d", round+1), e.count()+2*allowed)
		leader.Start()
		p.Eventually(time.Minute, "the one that was killed is ready again", leader.ready)
	}
	end()
	all.Wait()
	p.Eventually(time.Minute, "all pods are seen that end", func() error { return e.misses(p) })
	e.holds(t)
	t.Logf("%d evictions on %d nodes, of which %d were answered; refused: %v", e.count(), evicting, len(e.accepted), e.said())
	for reason := range e.refusals {
		if !strings.Contains(reason, "the fleet's budget") && !strings.Contains(reason, "leads") && !strings.Contains(reason, "failed calling webhook") {
			t.Errorf("refused for another reason: %s", reason)
		}
	}
}

// watch has every pod that begins to end noted, until the test ends.
func (e *evictors) watch(p *plane) {
	p.T.Helper()
	factory := informers.NewSharedInformerFactoryWithOptions(p.Kube, 0, informers.WithNamespace("default"),
		informers.WithTweakListOptions(func(options *metav1.ListOptions) { options.LabelSelector = "app=victim" }))
	note := func(object any) {
		pod, is := object.(*corev1.Pod)
		if !is || pod.DeletionTimestamp == nil {
			return
		}
		// It says until when the pod is left time.
		grace := time.Duration(ptr.Deref(pod.DeletionGracePeriodSeconds, 0)) * time.Second
		e.lock.Lock()
		defer e.lock.Unlock()
		if _, known := e.begun[pod.UID]; !known {
			e.begun[pod.UID] = pod.DeletionTimestamp.Add(-grace)
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
		p.T.Fatal("the pods can't be listed")
	}
}

// misses says which pods end, or are gone, and were not seen beginning to.
func (e *evictors) misses(p *plane) error {
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
	if ended := evicting*victimsPerNode - running; ended != len(e.begun) {
		return fmt.Errorf("%d of %d were seen", len(e.begun), ended)
	}
	for _, uid := range e.accepted {
		if _, seen := e.begun[uid]; !seen {
			return fmt.Errorf("%s was evicted, as its agent was told, and does not end", uid)
		}
	}
	return nil
}

// holds fails the test where more pods began to end within a window than the budget allows.
func (e *evictors) holds(t *testing.T) {
	t.Helper()
	begun := slices.SortedFunc(maps.Values(e.begun), time.Time.Compare)
	for index := range max(0, len(begun)-allowed) {
		// However far apart they were, they were less far than this: both are cut to the second.
		if most := begun[index+allowed].Sub(begun[index]) + time.Second; most <= window {
			t.Errorf("evictions %d to %d began within %s: %d are allowed in %s", index, index+allowed, most, allowed, window)
		}
	}
}

func (e *evictors) count() int {
	e.lock.Lock()
	defer e.lock.Unlock()
	return len(e.begun)
}

func (e *evictors) said() string {
	e.lock.Lock()
	defer e.lock.Unlock()
	return fmt.Sprint(e.refusals)
}

// act evicts the pods of a node, one after the other.
func (e *evictors) act(running context.Context, client kubernetes.Interface, node string) {
	pods := client.CoreV1().Pods("default")
	for running.Err() == nil {
		list, err := pods.List(running, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node, LabelSelector: "app=victim"})
		if err == nil {
			for _, pod := range list.Items {
				if pod.DeletionTimestamp == nil {
					e.evict(running, client, &pod)
				}
			}
		}
		select {
		case <-running.Done():
		case <-time.After(500 * time.Millisecond):
		}
	}
}

func (e *evictors) evict(running context.Context, client kubernetes.Interface, pod *corev1.Pod) {
	err := client.CoreV1().Pods("default").EvictV1(running, &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Name: pod.Name, Namespace: pod.Namespace},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(pod.UID))},
	})
	e.lock.Lock()
	defer e.lock.Unlock()
	var status *apierrors.StatusError
	switch {
	case err == nil:
		e.accepted = append(e.accepted, pod.UID)
	case errors.As(err, &status) && !apierrors.IsNotFound(err):
		reason, _, _ := strings.Cut(status.ErrStatus.Message, ": Post")
		e.refusals[reason]++
	}
}

// guarded is a plane whose API server asks controllers about evictions, with what the chart installs.
func guarded(t *testing.T) *plane {
	p := &plane{Plane: shared.Start(t, []string{"--max-requests-inflight=800", "--max-mutating-requests-inflight=400",
		// There is no kube-proxy: endpoints are dialled.
		"--enable-aggregator-routing=true"})}
	p.Run("kwok", "--kubeconfig="+p.Kubeconfig, "--manage-all-nodes=true", "--node-lease-duration-seconds=200")
	objects, err := exec.Command(p.Tool("helm"), "template", "plimsoll", shared.Absolute(t, "charts/plimsoll"), "--namespace=default",
		"--set=tokens.creators={admin}").Output()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.TryKubectl(string(objects), "apply", "--server-side", "--force-conflicts", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	return p
}

// token is one of an account of the chart's.
func (p *plane) token(account string, bound *authenticationv1.BoundObjectReference) string {
	p.T.Helper()
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: bound}}
	token, err := p.Kube.CoreV1().ServiceAccounts("default").CreateToken(background, account, request, metav1.CreateOptions{})
	if err != nil {
		p.T.Fatal(err)
	}
	return token.Status.Token
}

// guard starts a replica of the controller that is asked about evictions.
func (p *plane) guard(name string) *replica {
	r := &replica{metrics: shared.FreePort(p.T), api: shared.FreePort(p.T)}
	args := []string{"--listen", fmt.Sprintf("127.0.0.1:%d", r.metrics), "--metrics-api-listen", fmt.Sprintf("0.0.0.0:%d", r.api), "--pod-ip=127.0.0.1",
		"--eviction-webhook=plimsoll-evictions", fmt.Sprintf("--eviction-budget-fleet=%d/%s", allowed, window)}
	for _, scope := range []string{"zone", "node", "namespace", "owner"} {
		args = append(args, fmt.Sprintf("--eviction-budget-%s=1000/%s", scope, window))
	}
	r.Process = p.ControllerBy(p.KubeconfigBy(name, p.token("plimsoll-controller", nil)), 0, args...)
	p.Endpoint("plimsoll-metrics", name, r.api)
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
		return fmt.Errorf("none does")
	})
	return leader
}

// victims makes pods that agents may evict, more on each node than they are let.
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

// agentOf asks with the token of the agent on a node, once for each question: whoever is told to wait decides for itself.
func (p *plane) agentOf(node string) kubernetes.Interface {
	token := p.token("plimsoll-agent", &authenticationv1.BoundObjectReference{Kind: "Node", APIVersion: "v1", Name: node})
	config := p.Config()
	config.BearerToken, config.QPS, config.Timeout = token, -1, 10*time.Second
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return once{next} })
	return kubernetes.NewForConfigOrDie(config)
}

// once hides from client-go how long to wait, so that it does not ask again by itself.
type once struct{ next http.RoundTripper }

func (o once) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := o.next.RoundTrip(request)
	if err == nil {
		response.Header.Del("Retry-After")
	}
	return response, err
}
