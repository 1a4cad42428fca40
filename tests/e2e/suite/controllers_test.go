//go:build e2e

package suite

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"plimsoll.dev/suite/plane"
)

// TestControllerPodsMoveWhileActionsStayInForce evicts the leader from its node, twice. Every node
// has our taint meanwhile, and the new replicas must still be scheduled.
func TestControllerPodsMoveWhileActionsStayInForce(t *testing.T) {
	t.Parallel()
	lockAllNodes(t)
	all := pressureOnAllNodes(t)
	checkInForce := watchInForce(t, all)
	answered := pollLoad(t)
	for range 2 {
		_, old := leader(t)
		if len(nodes) > 1 {
			kubectl(t, "cordon", old.Spec.NodeName)
			t.Cleanup(func() { kubectl(t, "uncordon", old.Spec.NodeName) })
		}
		eviction := &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: old.Name, Namespace: namespace}}
		eventually(t, time.Minute, "the disruption budget allows the eviction", func() error {
			return kube.PolicyV1().Evictions(namespace).Evict(background, eviction)
		})
		eventually(t, 3*time.Minute, "two other replicas are ready", func() error {
			pods := componentPods(t, "controller")
			for _, pod := range pods {
				if !plane.IsReady(&pod) || pod.UID == old.UID {
					return fmt.Errorf("%s is %s on %q", pod.Name, pod.Status.Phase, pod.Spec.NodeName)
				}
			}
			if len(pods) != 2 {
				return fmt.Errorf("%v", podNames(pods))
			}
			return nil
		})
		if len(nodes) > 1 {
			kubectl(t, "uncordon", old.Spec.NodeName)
		}
		eventually(t, 20*time.Second, "another replica leads", func() error {
			if now := holder(t); now == "" || strings.HasPrefix(now, old.Name) {
				return fmt.Errorf("the lease is held by %q", now)
			}
			return nil
		})
	}
	checkInForce("two moves")
	requests, failed, gap := answered()
	t.Logf("%d lists of NodeMetrics, %d failed; longest gap %.1f s", requests, failed, gap.Seconds())
	if requests == failed || gap > 10*time.Second {
		t.Errorf("clients could not read NodeMetrics for %s", gap)
	}
	for _, o := range all {
		o.scene.set(cold)
	}
	for _, o := range all {
		o.waitAllRestored(60 * time.Second)
	}
}

// pollLoad lists NodeMetrics continuously; the returned function stops it and returns the numbers of requests and failures, and the longest
// time without a complete list.
func pollLoad(t *testing.T) (end func() (requests, failed int, gap time.Duration)) {
	t.Helper()
	requests, failed, gap, last := 0, 0, time.Duration(0), time.Now()
	stop := repeatedly(t, func() {
		ctx, cancel := context.WithTimeout(background, 5*time.Second)
		list, err := objects.Resource(nodeMetrics).List(ctx, metav1.ListOptions{})
		cancel()
		requests++
		gap = max(gap, time.Since(last))
		if err == nil && len(list.Items) >= len(nodes) {
			last = time.Now()
		} else {
			failed++
		}
	})
	return func() (int, int, time.Duration) { stop(); return requests, failed, gap }
}

// TestCertificatesRotateWithoutFailedRequest gives the release a second CA as the leader does after eight
// months. It is created almost a day in the past, so that it signs after minutes: replicas give clients a day to learn of a new CA.
func TestCertificatesRotateWithoutFailedRequest(t *testing.T) {
	onlyLong(t)
	needShell(t)
	t.Parallel()
	lockAllNodes(t) // others may restart neither controllers nor agents
	const secret, known = "plimsoll-metrics-ca", 4 * time.Minute
	signers := func() (names []string) {
		for _, pod := range componentPods(t, "controller") {
			names = append(names, onNode(t, "v1", fmt.Sprintf("openssl s_client -connect %s </dev/null 2>/dev/null | openssl x509 -noout -issuer", net.JoinHostPort(pod.Status.PodIP, "8443"))))
		}
		return names
	}
	before := signers()
	check := generateTraffic(t)

	object, err := kube.CoreV1().Secrets(namespace).Get(background, secret, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var authorities []json.RawMessage
	if err := json.Unmarshal(object.Data["authorities.json"], &authorities); err != nil || len(authorities) != 1 {
		t.Fatalf("expected one CA, found %d (%v)", len(authorities), err)
	}
	next, name := authority(t, time.Now().Add(known-24*time.Hour).Truncate(time.Second).UTC())
	both, err := json.Marshal(append([]json.RawMessage{next}, authorities...))
	if err != nil {
		t.Fatal(err)
	}
	object.Data["authorities.json"] = both
	if _, err := kube.CoreV1().Secrets(namespace).Update(background, object, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, known+5*time.Minute, "both replicas serve with a certificate of the other CA", func() error {
		now := signers()
		for _, signer := range now {
			if !strings.Contains(signer, name) {
				return fmt.Errorf("the certificates are signed by %v, were signed by %v", now, before)
			}
		}
		if len(now) != 2 {
			return fmt.Errorf("there are %d replicas", len(now))
		}
		return nil
	})
	if events, broken := check(); broken != nil || events == 0 {
		t.Errorf("the watch received %d events and then failed: %v", events, broken)
	}
}

// generateTraffic lists and watches NodeMetrics while agents report. The returned function waits until all clients have reconnected, stops
// them, and fails the test if requests or reports failed. It returns the number of watch events and the watch's error.
func generateTraffic(t *testing.T) (check func() (events int, broken error)) {
	t.Helper()
	answered, watched, reports := pollLoad(t), watchLoad(t), failedReports(t)
	return func() (int, error) {
		t.Helper()
		// The API server connects for each list, agents when their connections end.
		time.Sleep(30 * time.Second)
		requests, failed, gap := answered()
		events, broken := watched()
		t.Logf("%d lists, %d failed, %.1f s without a list at most; %d events of the watch", requests, failed, gap.Seconds(), events)
		if failed > 0 {
			t.Errorf("%d of %d requests failed", failed, requests)
		}
		if failed := reports(); failed != "" {
			t.Errorf("reports of agents failed: %s", failed)
		}
		return events, broken
	}
}

// watchLoad watches NodeMetrics as client-go does; the returned function stops it.
func watchLoad(t *testing.T) (end func() (events int, broken error)) {
	t.Helper()
	list, err := objects.Resource(nodeMetrics).List(background, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var lock sync.Mutex
	events, broken := 0, error(nil)
	record := func(err error) {
		lock.Lock()
		defer lock.Unlock()
		broken = errors.Join(broken, err)
	}
	// A watch that ends is resumed, as clients do; that must succeed.
	begin := func(options metav1.ListOptions) (watch.Interface, error) {
		watching, err := objects.Resource(nodeMetrics).Watch(background, options)
		record(err)
		return watching, err
	}
	watcher, err := watchtools.NewRetryWatcher(list.GetResourceVersion(), &cache.ListWatch{WatchFunc: begin})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for event := range watcher.ResultChan() {
			if events++; event.Type == watch.Error {
				record(fmt.Errorf("%v", event.Object))
			}
		}
	}()
	stop := sync.OnceFunc(func() { watcher.Stop(); <-ended })
	t.Cleanup(stop)
	return func() (int, error) { stop(); return events, broken }
}

// metricsOf are the Prometheus metrics of one of our pods.
func metricsOf(pod corev1.Pod) (string, error) {
	text, err := kube.CoreV1().RESTClient().Get().AbsPath("/api/v1/namespaces/" + namespace + "/pods/" + pod.Name + ":8080/proxy/metrics").DoRaw(background)
	return string(text), err
}

// failedReports waits until both replicas accept the reports of every agent: the kubelet gives an agent
// the controller's CA within a minute or two. The returned function returns the reports that have failed since.
func failedReports(t *testing.T) func() string {
	t.Helper()
	// By then, all agents also know a CA that changed just before.
	var from reports
	eventually(t, 4*time.Minute, "leader and standby accept reports of all agents", func() error {
		now, err := countReports(t)
		if err != nil {
			return err
		}
		if from.accepted == nil || now.failedSince(from) != "" {
			from = now
		}
		for series, count := range now.accepted {
			if count < from.accepted[series]+2 {
				return fmt.Errorf("%s was %d and is %d; failed reports: %v", series, from.accepted[series], count, now.failed)
			}
		}
		return nil
	})
	return func() string {
		now, err := countReports(t)
		if err != nil {
			t.Fatal(err)
		}
		return now.failedSince(from)
	}
}

// reports has the number of reports by agent and result.
type reports struct{ accepted, failed map[string]int }

// countReports reads the counts from the agents' metrics.
func countReports(t *testing.T) (reports, error) {
	counts := reports{map[string]int{}, map[string]int{}}
	for _, pod := range componentPods(t, "agent") {
		text, err := metricsOf(pod)
		if err != nil {
			return counts, err
		}
		for _, result := range []string{"acknowledged", "standby"} {
			counts.accepted[pod.Name+" "+result] = 0
		}
		for _, line := range strings.Split(text, "\n") {
			labels, isCount := strings.CutPrefix(line, `plimsoll_agent_reports_total{result="`)
			result, value, _ := strings.Cut(labels, `"} `)
			if !isCount {
				continue
			}
			count, err := strconv.Atoi(value)
			if err != nil {
				return counts, err
			}
			if _, isAccepted := counts.accepted[pod.Name+" "+result]; isAccepted {
				counts.accepted[pod.Name+" "+result] = count
			} else {
				counts.failed[pod.Name+" "+result] = count
			}
		}
	}
	return counts, nil
}

// failedSince lists the results whose count of failures has changed.
func (r reports) failedSince(before reports) (failed string) {
	for series, count := range r.failed {
		if was := before.failed[series]; count != was {
			failed += fmt.Sprintf("%s was %d, is %d; ", series, was, count)
		}
	}
	return failed
}

// TestDeletedControllerObjectsAreRecreated removes the replicas' CA everywhere, and adds and removes a node.
func TestDeletedControllerObjectsAreRecreated(t *testing.T) {
	onlyLong(t)
	t.Parallel()
	lockAllNodes(t)
	persisted := []string{"secret/plimsoll-metrics-ca", "configmap/plimsoll-report-ca"}
	before := map[string]string{}
	for _, object := range persisted {
		before[object] = kubectl(t, "get", "-n", namespace, object, "-o", "jsonpath={.metadata.uid}")
	}
	// The next eviction recreates the last one.
	kubectl(t, append([]string{"delete", "-n", namespace, "configmap/plimsoll-evictions"}, persisted...)...)
	for _, object := range persisted {
		eventually(t, 2*time.Minute, object+" exists again", func() error {
			now, err := tryKubectl("", "get", "-n", namespace, object, "-o", "jsonpath={.metadata.uid} {.data}")
			if uid, data, _ := strings.Cut(now, " "); err != nil || uid == before[object] || data == "" {
				return fmt.Errorf("%s (%v)", now, err)
			}
			return nil
		})
	}
	// New replicas have no earlier connections, so that kubelets and API servers have to use the new CA.
	kubectl(t, "rollout", "restart", "-n", namespace, "deployment/plimsoll-controller")
	kubectl(t, "rollout", "status", "-n", namespace, "deployment/plimsoll-controller", "--timeout=180s")
	renewed := time.Now()
	for _, node := range nodes {
		eventually(t, 5*time.Minute, "the agent of "+node+" reports again", func() error {
			now, err := readNode(node)
			if err == nil && now.measured.Before(renewed) {
				err = fmt.Errorf("it was measured at %s", now.measured)
			}
			return cmp.Or(err, reported(node))
		})
	}
	const temporary = "e2e-temporary"
	apply(t, "{apiVersion: v1, kind: Node, metadata: {name: "+temporary+", labels: {kubernetes.io/os: linux}}, spec: {unschedulable: true}}")
	t.Cleanup(func() { tryKubectl("", "delete", "node", temporary, "--ignore-not-found") })
	eventually(t, 20*time.Second, "a new node has a NodeWatermark", func() error {
		_, err := watermarkOf(temporary)
		return err
	})
	kubectl(t, "delete", "node", temporary)
	eventually(t, 20*time.Second, "the NodeWatermark of a deleted node is deleted", func() error {
		if _, err := watermarkOf(temporary); !apierrors.IsNotFound(err) {
			return fmt.Errorf("it still exists: %v", err)
		}
		return nil
	})
}

// TestReplicaAskedDirectlyAuthenticatesAndAuthorizes sends requests to each replica without the API server in between.
func TestReplicaAskedDirectlyAuthenticatesAndAuthorizes(t *testing.T) {
	needShell(t)
	if nodes[0] != "v1" {
		t.Skip("needs node v1, which has curl")
	}
	t.Parallel()
	s := shared(t, nodes[0])
	kubectl(t, "create", "serviceaccount", "reader", "-n", s.name)
	token := kubectl(t, "create", "token", "reader", "-n", s.name)
	answers := func(token string) (codes []string) {
		for _, pod := range componentPods(t, "controller") {
			codes = append(codes, onNode(t, "v1", fmt.Sprintf("curl -sk -o /dev/null -w '%%{http_code}' -H 'Authorization: Bearer %s' https://%s/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics", token, net.JoinHostPort(pod.Status.PodIP, "8443"))))
		}
		return codes
	}
	all := func(code, token string) func() error {
		return func() error {
			if codes := answers(token); len(codes) == 0 || slices.ContainsFunc(codes, func(it string) bool { return it != code }) {
				return fmt.Errorf("the replicas respond with %v, not %s", codes, code)
			}
			return nil
		}
	}
	for _, invalid := range []string{"", "made-up", token + "x"} {
		if err := all("401", invalid)(); err != nil {
			t.Error(err)
		}
	}
	if err := all("403", token)(); err != nil {
		t.Error(err)
	}
	kubectl(t, "create", "clusterrolebinding", s.name, "--clusterrole=view", "--serviceaccount="+s.name+":reader")
	t.Cleanup(func() { tryKubectl("", "delete", "clusterrolebinding", s.name) })
	eventually(t, 30*time.Second, "an account with the role view may read", all("200", token))
}

// authority is a CA in the format of the release's Secret, created at this time, and its name.
func authority(t *testing.T, created time.Time) (entry json.RawMessage, name string) {
	t.Helper()
	name = fmt.Sprintf("plimsoll-metrics-%d", created.Unix())
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	// In UTF-8, as our own are: names are compared byte by byte.
	subject, err := asn1.Marshal(pkix.RDNSequence{{{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: asn1.RawValue{Tag: asn1.TagUTF8String, Bytes: []byte(name)}}}})
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(created.UnixNano()), RawSubject: subject, NotBefore: created.Add(-time.Hour), NotAfter: created.Add(365 * 24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	text := func(kind string, bytes []byte) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: bytes}))
	}
	entry, err = json.Marshal(map[string]string{"made": created.Format(time.RFC3339), "certificate": text("CERTIFICATE", certificate), "key": text("PRIVATE KEY", private)})
	if err != nil {
		t.Fatal(err)
	}
	return entry, name
}
