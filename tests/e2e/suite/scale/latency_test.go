//go:build e2e

package scale

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"plimsoll.dev/suite/report"
)

// The maximum number of evictions per phase and per second: far more than the default budgets allow.
const maxEvictions, maxPerSecond = 500, 2

// TestFleetEvictionIsFastWhileAgentsReport: while all agents report, some of them request evictions. It measures the time from the
// request, which an agent sends right after its decision, to the answer that the API server has accepted the Eviction.
func TestFleetEvictionIsFastWhileAgentsReport(t *testing.T) {
	agents, length, interval := sizes(t)
	f, reach := newFleet(t, agents, interval)
	f.Apply(strings.Replace(evicts[2], `"selector": {}`, `"selector": {"matchLabels": {"evicts": "true"}}`, 1), evicts[0], evicts[1])
	evictors := f.evictors()
	count := min(maxEvictions, int(length/time.Second)*maxPerSecond)
	f.victims(count)
	_, settled := f.settled()
	var took []float64
	var evictions sync.WaitGroup
	evictions.Go(func() {
		time.Sleep(settled)
		took = f.evicts(evictors, count, length)
	})
	p := f.phase("with evictions", length, reach, "--reports=true")
	evictions.Wait()
	t.Log(p)
	t.Logf("%d of %d evictions were accepted: p50 %.1f, p90 %.1f, p99 %.1f, slowest %.1f ms",
		len(took), count, quantile(took, 0.5), quantile(took, 0.9), quantile(took, 0.99), quantile(took, 1))
	if len(took) < count {
		t.Errorf("%d of %d evictions were accepted", len(took), count)
	}
	p.checkLimit(t, "p99 from a decision to its Eviction, in ms", quantile(took, 0.99), 100, agents == size)
}

// evictors are agents that request evictions, once all of their nodes have rules. Each has its own connection to every replica.
func (f *fleet) evictors() (all []*evictor) {
	f.T.Helper()
	signer, err := report.NewSigner(f.SigningKey())
	if err != nil {
		f.T.Fatal(err)
	}
	for index := range min(evicting, f.agents) {
		a := &evictor{plane: &plane{Plane: f.Plane}, node: fmt.Sprintf("node%04d", index)}
		if a.token, err = signer.Token(a.node); err != nil {
			f.T.Fatal(err)
		}
		for _, r := range f.known() {
			a.replicas = append(a.replicas, report.Connect(fmt.Sprintf("%s:%d", r.address, r.reports), &tls.Config{InsecureSkipVerify: true}))
		}
		all = append(all, a)
	}
	waitForRules(f.Plane, all)
	return all
}

// victims creates running pods on the nodes of the evictors.
func (f *fleet) victims(count int) {
	f.T.Helper()
	running, err := json.Marshal(map[string]any{"status": map[string]any{"phase": "Running"}})
	if err != nil {
		f.T.Fatal(err)
	}
	pods := f.Kube.CoreV1().Pods("default")
	var all sync.WaitGroup
	slots := make(chan struct{}, 20)
	for index := range count {
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			pod := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: victimOf(index), Labels: map[string]string{"app": "victim"}},
				Spec:       corev1.PodSpec{NodeName: fmt.Sprintf("node%04d", index%min(evicting, f.agents)), Containers: []corev1.Container{{Name: "it", Image: "none"}}},
			}
			_, err := pods.Create(background, pod, metav1.CreateOptions{})
			if err == nil {
				_, err = pods.Patch(background, pod.Name, types.MergePatchType, running, metav1.PatchOptions{}, "status")
			}
			if err != nil {
				f.T.Error(err)
			}
		})
	}
	all.Wait()
}

func victimOf(index int) string { return fmt.Sprintf("victim-%04d", index) }

// evicts requests this many evictions, spread evenly, and returns the latency of each accepted one in milliseconds.
func (f *fleet) evicts(evictors []*evictor, count int, length time.Duration) (took []float64) {
	var lock sync.Mutex
	busy := make([]sync.Mutex, len(evictors))
	var all sync.WaitGroup
	started := time.Now()
	for index := range count {
		time.Sleep(time.Until(started.Add(length * time.Duration(index) / time.Duration(count))))
		all.Go(func() {
			busy[index%len(evictors)].Lock()
			defer busy[index%len(evictors)].Unlock()
			millis, err := f.timed(evictors[index%len(evictors)], victimOf(index))
			if err != nil {
				f.T.Logf("%s: %v", victimOf(index), err)
				return
			}
			lock.Lock()
			defer lock.Unlock()
			took = append(took, millis)
		})
	}
	all.Wait()
	return took
}

// reportOnce sends a report over each connection, since connections without reports are closed. It is older than the
// fleet's own reports, and so it is not stored.
func (f *fleet) reportOnce(running context.Context, a *evictor) {
	var index int
	fmt.Sscanf(a.node, "node%d", &index)
	body := fmt.Sprintf(`{"node":%q,"bootID":"00000000-0000-4000-8000-%012d","agentStartedMillis":1,"sequence":1,"intervalSeconds":10,"status":{}}`, a.node, index)
	for _, to := range a.replicas {
		if _, err := to.Post(running, a.token, []byte(body)); err != nil {
			f.T.Logf("%s: %v", a.node, err)
		}
	}
}

// timed evicts one pod, deletes it as its kubelet would, and returns the latency of the request.
func (f *fleet) timed(a *evictor, name string) (millis float64, err error) {
	waiting, end := context.WithTimeout(background, 30*time.Second)
	defer end()
	pods := f.Kube.CoreV1().Pods("default")
	pod, err := pods.Get(waiting, name, metav1.GetOptions{})
	if err != nil {
		return 0, err
	}
	hash, err := a.hash()
	if err != nil {
		return 0, err
	}
	f.reportOnce(waiting, a)
	decided := time.Now()
	verdict, err := a.request(waiting, a.nextRequest(pod, hash))
	millis = float64(time.Since(decided).Microseconds()) / 1000
	if err == nil && verdict.Result != "accepted" {
		err = fmt.Errorf("unexpected response: %+v", verdict)
	}
	if err != nil {
		return 0, err
	}
	return millis, pods.Delete(waiting, name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))})
}
