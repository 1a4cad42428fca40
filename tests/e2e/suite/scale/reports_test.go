//go:build e2e

package scale

import (
	"fmt"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	shared "plimsoll.dev/suite/plane"
)

const (
	// The longest time until a polling client gets new data after a leader was killed.
	failoverTimeout = 10 * time.Second
)

// setting is a number from the environment, or its default.
func setting[T any](t *testing.T, name string, parse func(string) (T, error), byDefault T) T {
	text := os.Getenv(name)
	if text == "" {
		return byDefault
	}
	value, err := parse(text)
	if err != nil {
		t.Fatalf("%s=%s: %v", name, text, err)
	}
	return value
}

func (r *replica) ready() error {
	_, err := fetch(http.DefaultClient, shared.Local("http", r.metrics)+"/readyz")
	return err
}

// A fleet is many agents in their own processes, and two replicas of the controller to which they report.
type fleet struct {
	*shared.Plane
	agents   int
	lock     sync.Mutex // for the replicas
	replicas []*replica
	program  string
}

// A replica is a controller at its own address.
type replica struct {
	*shared.Process
	address                           string
	metrics, api, reports, schedulers int
}

func (r *replica) leads() bool {
	leads, err := shared.Metric(r.metrics, "plimsoll_controller_leader")
	return err == nil && leads > 0
}

// size is the cluster size that the limits are for; larger fleets only show how far they scale.
const size = 5000

// TestFleetReportsDirectly shows what a fleet costs without and with reports, and when the leader is killed.
func TestFleetReportsDirectly(t *testing.T) {
	agents, length, interval := sizes(t)
	f, reach := newFleet(t, agents, interval)
	t.Logf("%d agents, a report each %s to each of two replicas, each phase %s, %d CPUs for all of it", agents, interval, length, runtime.NumCPU())
	// Without reports a larger fleet would write more Leases than an API server on one machine can handle.
	if agents <= size {
		t.Log(f.phase("Leases only", length, reach, "--reports=false"))
	}
	both := f.phase("with direct reports", length, reach, "--reports=true")
	t.Log(both)
	failover := f.phase("the leader is killed in the middle", length, reach, "--reports=true", "kill")
	t.Log(failover)

	if both.codes["leader"] == 0 || both.codes["standby"] == 0 {
		t.Errorf("a replica accepted no reports: %v", both.codes)
	}
	for _, phase := range []*phase{both, failover} {
		for code, count := range phase.codes {
			if refused := code != "leader" && code != "standby" && !(phase == failover && code == "broken"); refused && count > agents/100 {
				t.Errorf("%s: %d responses were %s", phase.name, count, code)
			}
		}
	}
	for index, cores := range both.cores {
		both.checkLimit(t, fmt.Sprintf("millicores a node of replica %d", index), cores*1000/float64(agents), 0.15, agents >= size)
	}
	both.checkLimit(t, "p99 of acknowledgements, in ms", quantile(both.acks, 0.99), 10, agents == size)
	// 1 % more than one: the intervals differ in length.
	both.checkLimit(t, "renewals of Leases a minute and node", both.renewals*60/float64(agents), 1.01, length >= time.Minute)
	both.checkLimit(t, "bytes of a report", float64(both.largest), 4096, true)
	failover.checkLimit(t, "time for which a client got no data, in s", failover.outage.Seconds(), failoverTimeout.Seconds(), true)
	if failover.incomplete+both.incomplete > 0 {
		t.Errorf("%d lists lacked nodes", failover.incomplete+both.incomplete)
	}
}

// sizes are the number of agents, the length of a phase and the report interval.
func sizes(t *testing.T) (agents int, length, interval time.Duration) {
	agents = setting(t, "PLIMSOLL_SCALE_AGENTS", strconv.Atoi, 500)
	length = setting(t, "PLIMSOLL_SCALE_FOR", time.ParseDuration, 40*time.Second)
	interval = setting(t, "PLIMSOLL_SCALE_INTERVAL", time.ParseDuration, 10*time.Second)
	return agents, length, interval
}

// newFleet starts two replicas of the controller, and creates the agents' nodes. reach are the flags with which agents reach the replicas.
func newFleet(t *testing.T, agents int, interval time.Duration) (f *fleet, reach []string) {
	f = &fleet{Plane: shared.Start(t, []string{"--max-requests-inflight=1600", "--max-mutating-requests-inflight=800"}, slowUser), agents: agents}
	f.program = f.BuildLoad()
	f.Apply(`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"ClusterRole","metadata":{"name":"heartbeats"},
			"rules":[{"apiGroups":["coordination.k8s.io"],"resources":["leases"],"verbs":["get","create","update"]}]}`,
		`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"ClusterRoleBinding","metadata":{"name":"heartbeats"},
			"roleRef":{"apiGroup":"rbac.authorization.k8s.io","kind":"ClusterRole","name":"heartbeats"},
			"subjects":[{"kind":"ServiceAccount","name":"plimsoll-agent","namespace":"default"}]}`)
	f.nodes()
	for index := range 2 {
		f.startReplica(index)
		f.Eventually(time.Minute, "the replica is ready", f.replicas[index].ready)
	}
	f.Eventually(10*time.Minute, "all nodes have their NodeWatermark", f.checkSteady)
	f.publishReplicas()
	reach = append(f.LoadFlags(), "--interval", interval.String())
	return f, reach
}

// account is the agents' kubeconfig, which is subject to API Priority and Fairness like those of other clients.
func (f *fleet) account() string {
	lifetime := int64(4 * time.Hour / time.Second)
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &lifetime}}
	token, err := f.Kube.CoreV1().ServiceAccounts("default").CreateToken(background, "plimsoll-agent", request, metav1.CreateOptions{})
	if err != nil {
		f.T.Fatal(err)
	}
	return f.KubeconfigForToken("agents", token.Status.Token)
}

// checkSteady returns an error unless a replica leads and has written all NodeWatermarks.
func (f *fleet) checkSteady() error {
	leader := f.leader()
	if leader == nil {
		return fmt.Errorf("no replica leads")
	}
	for series, wanted := range map[string]float64{"plimsoll_controller_nodes": float64(f.agents), "plimsoll_controller_pending_nodes": 0} {
		if value, err := shared.Metric(leader.metrics, series); err != nil || value != wanted {
			return fmt.Errorf("%s is %.0f instead of %.0f (%v)", series, value, wanted, err)
		}
	}
	return nil
}

// nodes creates the agents' nodes, which no kubelet updates.
func (f *fleet) nodes() {
	var all sync.WaitGroup
	slots := make(chan struct{}, 20)
	for index := range f.agents {
		all.Add(1)
		slots <- struct{}{}
		go func() {
			defer func() { <-slots; all.Done() }()
			size := corev1.ResourceList{"cpu": quantity("8"), "memory": quantity("32Gi"), "pods": quantity("110")}
			ready := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"}
			node := &corev1.Node{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node%04d", index), Labels: map[string]string{"evicts": strconv.FormatBool(index < evicting)}},
				Status:     corev1.NodeStatus{Capacity: size, Allocatable: size, Conditions: []corev1.NodeCondition{ready}},
			}
			if _, err := f.Kube.CoreV1().Nodes().Create(background, node, metav1.CreateOptions{}); err != nil {
				f.T.Error(err)
			}
		}()
	}
	all.Wait()
}

func (f *fleet) startReplica(index int) {
	r := &replica{address: fmt.Sprintf("127.0.0.%d", 11+index), metrics: shared.FreePort(f.T), api: shared.FreePort(f.T), reports: shared.FreePort(f.T), schedulers: shared.FreePort(f.T)}
	r.Process = f.Controller("admin", "--listen", fmt.Sprintf("127.0.0.1:%d", r.metrics), "--pod-ip", r.address,
		"--metrics-api-listen", fmt.Sprintf("%s:%d", r.address, r.api), "--report-listen", fmt.Sprintf("%s:%d", r.address, r.reports),
		"--scheduler-listen", fmt.Sprintf("%s:%d", r.address, r.schedulers), "--report-service", shared.ReportService, "--eviction-budget-fleet=1000/1s", "--eviction-budget-zone=1000/1s",
		"--eviction-budget-node=1000/1s", "--eviction-budget-namespace=1000/1s", "--eviction-budget-owner=1000/1s")
	f.lock.Lock()
	defer f.lock.Unlock()
	f.replicas = append(f.replicas, r)
}

// known are the current replicas.
func (f *fleet) known() []*replica {
	f.lock.Lock()
	defer f.lock.Unlock()
	return slices.Clone(f.replicas)
}

func (f *fleet) leader() *replica {
	for _, r := range f.known() {
		if r.leads() {
			return r
		}
	}
	return nil
}

// publishReplicas publishes the addresses of the current replicas to the agents, as a Service's endpoints do.
func (f *fleet) publishReplicas() {
	addresses := []string{}
	for _, r := range f.replicas {
		addresses = append(addresses, fmt.Sprintf("%s:%d", r.address, r.reports))
	}
	f.PublishEndpoints(addresses...)
}

// replace kills the leader and starts another replica, as a Deployment does.
func (f *fleet) replace() {
	leader := f.leader()
	if leader == nil {
		f.T.Error("no replica leads")
		return
	}
	leader.Kill()
	time.Sleep(time.Second)
	f.lock.Lock()
	f.replicas = slices.DeleteFunc(f.replicas, func(r *replica) bool { return r == leader })
	f.lock.Unlock()
	f.publishReplicas()
	time.Sleep(5 * time.Second)
	f.startReplica(2)
	f.Eventually(time.Minute, "the new replica is ready", f.replicas[1].ready)
	f.publishReplicas()
}
