package main

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/clientcmd"

	"plimsoll.dev/suite/report"
)

const (
	normalInterval = 10 * time.Second
	// While the leader acknowledges reports.
	relaxedInterval = time.Minute
)

// leases is the client for the Leases of all nodes.
type leases struct {
	api coordination.LeaseInterface
}

func newLeases(options options) (*leases, error) {
	if options.kubeconfig == "" {
		return nil, nil
	}
	config, err := clientcmd.BuildConfigFromFlags("", options.kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst, config.Timeout = -1, 0, report.AnswerTimeout
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	return &leases{client.CoordinationV1().Leases(options.leases)}, nil
}

// A lease is one agent's heartbeat. As agents do, it is renewed by a PUT of the last returned object.
type lease struct {
	leases  *leases
	node    string
	renewed time.Time
	pause   time.Duration
	relaxed bool
	known   *coordinationv1.Lease
}

// isDue reports whether to renew now, and schedules the next renewal. The first is due at once. When agents
// switch to the long interval, a random delay spreads them over it.
func (l *lease) isDue(at time.Time, relaxed bool) bool {
	since := at.Sub(l.renewed)
	if since < normalInterval || relaxed && since < l.pause {
		return false
	}
	l.renewed, l.pause = at, normalInterval
	if relaxed {
		l.pause = relaxedInterval
	}
	if relaxed && !l.relaxed {
		l.pause = normalInterval + time.Duration(rand.Int64N(int64(relaxedInterval)))
	}
	l.relaxed = relaxed
	return true
}

func (l *lease) renew(running context.Context, at time.Time, relaxed bool, tally *tally) {
	waiting, end := context.WithTimeout(running, report.AnswerTimeout)
	defer end()
	size, err := l.write(waiting, relaxed)
	switch {
	case err == nil:
		tally.renewed(size, time.Since(at))
	case running.Err() == nil:
		l.known = nil
		tally.answered("renewal failed", 0)
	}
}

// write renews the Lease, and returns the number of bytes sent.
func (l *lease) write(waiting context.Context, relaxed bool) (int, error) {
	if l.known == nil {
		found, err := l.leases.api.Get(waiting, l.node, metav1.GetOptions{})
		if err != nil && !errors.IsNotFound(err) {
			return 0, err
		}
		l.known = found
		if err != nil {
			l.known = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: l.node}}
		}
	}
	seconds := int32(4 * normalInterval / time.Second)
	if relaxed {
		seconds = int32(4 * relaxedInterval / time.Second)
	}
	next := l.known.DeepCopy()
	next.Annotations = map[string]string{
		"plimsoll.dev/summary": "seq=17 cpu=61.5 mem=50.0 cpumark=80.0 psi=12.5/1.2/0.4 rules=3 throttled=4 v=0.1.0 breached=1:protect/cpu",
	}
	next.Spec = coordinationv1.LeaseSpec{HolderIdentity: &l.node, LeaseDurationSeconds: &seconds, RenewTime: &metav1.MicroTime{Time: time.Now()}}
	body, _ := json.Marshal(next)
	written, err := l.put(waiting, next)
	if err == nil {
		l.known = written
	}
	return len(body), err
}

func (l *lease) put(waiting context.Context, next *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	if next.ResourceVersion == "" {
		return l.leases.api.Create(waiting, next, metav1.CreateOptions{})
	}
	return l.leases.api.Update(waiting, next, metav1.UpdateOptions{})
}
