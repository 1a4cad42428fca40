//go:build e2e

package scale

import (
	"bufio"
	"cmp"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	shared "plimsoll.dev/suite/plane"
)

const (
	reportService = "plimsoll-report"
	leases        = "plimsoll-node-lease"
	// What a client that asks again and again is shown after a leader was killed, at the latest.
	failover = 10 * time.Second
)

// setting is a number that the environment may set.
func setting[T any](t *testing.T, name string, parse func(string) (T, error), usual T) T {
	text := os.Getenv(name)
	if text == "" {
		return usual
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

// A fleet is many agents, in a process of their own, and two replicas of the controller to which they report.
type fleet struct {
	*shared.Plane
	agents    int
	replicas  []*replica
	endpoints string
	program   string
}

// A replica is a controller on an address of its own.
type replica struct {
	*shared.Process
	address               string
	metrics, api, reports int
}

func (r *replica) leads() bool {
	leads, err := shared.Metric(r.metrics, "plimsoll_controller_leader")
	return err == nil && leads > 0
}

// TestAFleetReportsDirectly shows what a fleet costs with its reports and without, and when a leader is killed.
func TestAFleetReportsDirectly(t *testing.T) {
	agents := setting(t, "PLIMSOLL_SCALE_AGENTS", strconv.Atoi, 500)
	length := setting(t, "PLIMSOLL_SCALE_FOR", time.ParseDuration, 40*time.Second)
	f := &fleet{Plane: shared.Start(t, []string{"--max-requests-inflight=1600", "--max-mutating-requests-inflight=800"}), agents: agents}
	f.endpoints, f.program = f.Write("endpoints", ""), f.File("load")
	if out, err := exec.Command("go", "build", "-o", f.program, "./load").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
	f.Apply(fmt.Sprintf(`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":%q}}`, leases),
		`{"apiVersion":"v1","kind":"ServiceAccount","metadata":{"name":"plimsoll-agent","namespace":"default"}}`)
	f.nodes()
	for index := range 2 {
		f.begin(index)
		f.Eventually(time.Minute, "the replica is ready", f.replicas[index].ready)
	}
	f.Eventually(time.Minute, "a replica leads", func() error {
		if f.leader() == nil {
			return fmt.Errorf("none does")
		}
		return nil
	})
	f.announce()
	authority := f.authority()

	only := f.phase("Leases only", length, authority, "--reports=false")
	both := f.phase("with direct reports", length, authority, "--reports=true")
	lost := f.phase("a leader killed in the middle", length, authority, "--reports=true", "kill")

	t.Logf("%d agents, a report each 10 s to each of two replicas, each phase %s", agents, length)
	for _, phase := range []*phase{only, both, lost} {
		t.Log(phase)
	}
	if both.codes["leader"] == 0 || both.codes["standby"] == 0 {
		t.Errorf("no report was taken: %v", both.codes)
	}
	for _, phase := range []*phase{both, lost} {
		for code, count := range phase.codes {
			if refused := code != "leader" && code != "standby" && !(phase == lost && code == "broken"); refused && count > agents/100 {
				t.Errorf("%s: %d answers were %s", phase.name, count, code)
			}
		}
	}
	// Each agent renews once a minute; without reports six times as often.
	if both.writes > only.writes/3 {
		t.Errorf("%.1f Leases a second are renewed with reports, and %.1f without", both.writes, only.writes)
	}
	if lost.blind > failover {
		t.Errorf("no client was shown anything for %s after the leader was killed", lost.blind)
	}
	if lost.absent > 0 {
		t.Errorf("%d lists lacked nodes", lost.absent)
	}
}

func (f *fleet) nodes() {
	var all sync.WaitGroup
	room := make(chan struct{}, 20)
	for index := range f.agents {
		all.Add(1)
		room <- struct{}{}
		go func() {
			defer func() { <-room; all.Done() }()
			size := corev1.ResourceList{"cpu": quantity("8"), "memory": quantity("32Gi"), "pods": quantity("110")}
			ready := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"}
			node := &corev1.Node{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node%04d", index)},
				Status:     corev1.NodeStatus{Capacity: size, Allocatable: size, Conditions: []corev1.NodeCondition{ready}},
			}
			if _, err := f.Kube.CoreV1().Nodes().Create(background, node, metav1.CreateOptions{}); err != nil {
				f.T.Error(err)
			}
		}()
	}
	all.Wait()
}

func (f *fleet) begin(index int) {
	r := &replica{address: fmt.Sprintf("127.0.0.%d", 11+index), metrics: shared.FreePort(f.T), api: shared.FreePort(f.T), reports: shared.FreePort(f.T)}
	r.Process = f.Controller("admin", "--listen", fmt.Sprintf("127.0.0.1:%d", r.metrics), "--pod-ip", r.address,
		"--metrics-api-listen", fmt.Sprintf("%s:%d", r.address, r.api), "--report-listen", fmt.Sprintf("%s:%d", r.address, r.reports),
		"--report-service", reportService)
	f.replicas = append(f.replicas, r)
}

func (f *fleet) leader() *replica {
	for _, r := range f.replicas {
		if r.leads() {
			return r
		}
	}
	return nil
}

// announce tells the agents which replicas there are, as a Service's endpoints do.
func (f *fleet) announce() {
	addresses := []string{}
	for _, r := range f.replicas {
		addresses = append(addresses, fmt.Sprintf("%s:%d", r.address, r.reports))
	}
	f.Write("endpoints", strings.Join(addresses, "\n"))
}

// authority waits for the certificate by which agents know the replicas.
func (f *fleet) authority() string {
	bundle := ""
	f.Eventually(time.Minute, "the leader tells its authority", func() error {
		object, err := f.Kube.CoreV1().ConfigMaps("default").Get(background, reportService+"-ca", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if bundle = object.Data["ca.crt"]; bundle == "" {
			return fmt.Errorf("it is empty")
		}
		return nil
	})
	return f.Write("report-ca.crt", bundle)
}

// A phase is what was measured in one.
type phase struct {
	name          string
	codes         map[string]int
	acks          []float64 // each second's p99, in milliseconds
	writes, bytes float64   // of Leases, a second
	ages          []float64 // each list's p99, in seconds
	lists         []float64 // milliseconds
	gets          []float64 // milliseconds
	cores         []float64 // of the replicas
	memory        []string  // of the replicas, in kB
	blind         time.Duration
	absent        int
	fleet         *fleet
}

func (p *phase) String() string {
	middle := func(values []float64, share float64) float64 {
		if len(values) == 0 {
			return 0
		}
		slices.Sort(values)
		return values[int(share*float64(len(values)-1))]
	}
	perNode := make([]string, len(p.cores))
	for index, cores := range p.cores {
		perNode[index] = fmt.Sprintf("%.4f", cores*1000/float64(p.fleet.agents))
	}
	return fmt.Sprintf("%s: answers %v; acknowledged within (p99 of a second: median, worst) %.1f, %.1f ms; Leases %.1f/s, %.0f bytes/s; "+
		"age of data p99 %.1f s; list median %.1f ms, p99 %.1f; get median %.2f ms, p99 %.2f; millicores a node %s; memory %s kB; nothing shown for at most %.1f s",
		p.name, p.codes, middle(p.acks, 0.5), middle(p.acks, 1), p.writes, p.bytes, middle(p.ages, 1), middle(p.lists, 0.5), middle(p.lists, 0.99),
		middle(p.gets, 0.5), middle(p.gets, 0.99), strings.Join(perNode, ", "), strings.Join(p.memory, ", "), p.blind.Seconds())
}

// phase lets the fleet run for so long; in the middle of it the leader may be killed.
func (f *fleet) phase(name string, length time.Duration, authority string, flags ...string) *phase {
	p := &phase{name: name, codes: map[string]int{}, fleet: f}
	kill := flags[len(flags)-1] == "kill"
	if kill {
		flags = flags[:len(flags)-1]
	}
	args := append([]string{"--nodes", strconv.Itoa(f.agents), "--endpoints", f.endpoints, "--server-name", reportService + ".default.svc",
		"--ca", authority, "--sign-with", f.File("sa.key"), "--kubeconfig", f.Kubeconfig}, flags...)
	load := exec.Command(f.program, args...)
	load.Stderr = os.Stderr
	out, err := load.StdoutPipe()
	if err != nil {
		f.T.Fatal(err)
	}
	if err := load.Start(); err != nil {
		f.T.Fatal(err)
	}
	// The first round connects, and makes the Leases.
	settled := 25 * time.Second
	var reading sync.WaitGroup
	reading.Add(1)
	go func() {
		defer reading.Done()
		p.read(out, settled)
	}()
	time.Sleep(settled)
	before := f.used()
	begun := time.Now()
	asked := make(chan struct{})
	reading.Add(1)
	go func() {
		defer reading.Done()
		f.ask(p, begun.Add(length))
		close(asked)
	}()
	if kill {
		time.Sleep(length / 2)
		f.replace()
	}
	<-asked
	took := time.Since(begun).Seconds()
	for index, used := range f.used() {
		p.memory = append(p.memory, f.replicas[index].Resident())
		if !kill {
			p.cores = append(p.cores, (used-before[index])/took)
		}
	}
	load.Process.Signal(os.Interrupt)
	reading.Wait()
	load.Wait()
	return p
}

// replace kills the leader, and begins another replica as a Deployment does.
func (f *fleet) replace() {
	leader := f.leader()
	if leader == nil {
		f.T.Error("nobody leads")
		return
	}
	leader.Kill()
	index := slices.Index(f.replicas, leader)
	time.Sleep(time.Second)
	f.replicas = slices.Delete(f.replicas, index, index+1)
	f.announce()
	time.Sleep(5 * time.Second)
	f.begin(2)
	f.Eventually(time.Minute, "the new replica is ready", f.replicas[1].ready)
	f.announce()
}

// used is the CPU time of each replica so far, in seconds.
func (f *fleet) used() []float64 {
	used := []float64{}
	for _, r := range f.replicas {
		used = append(used, r.CPU())
	}
	return used
}

// read takes what the agents print, once they have settled.
func (p *phase) read(out io.Reader, settled time.Duration) {
	seconds := 0
	for lines := bufio.NewScanner(out); lines.Scan(); {
		var line struct {
			Second    int
			Codes     map[string]int
			AckMillis [3]float64
			Renewals  int
			LeaseSize int `json:"leaseBytes"`
		}
		if json.Unmarshal(lines.Bytes(), &line) != nil || line.Second <= int(settled.Seconds()) {
			continue
		}
		seconds++
		for code, count := range line.Codes {
			p.codes[code] += count
		}
		if line.AckMillis[1] > 0 {
			p.acks = append(p.acks, line.AckMillis[1])
		}
		p.writes += float64(line.Renewals)
		p.bytes += float64(line.LeaseSize)
	}
	p.writes /= float64(max(seconds, 1))
	p.bytes /= float64(max(seconds, 1))
}

type metrics struct {
	Items []struct {
		Metadata struct{ Name string }
		Status   struct{ Timestamp *time.Time }
	}
}

// ask does as a client does that wants to know the load of all nodes: from whichever replica answers.
func (f *fleet) ask(p *phase, until time.Time) {
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	shown := time.Now()
	for count := 0; time.Now().Before(until); count++ {
		r := f.replicas[count%len(f.replicas)]
		path := fmt.Sprintf("https://%s:%d/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics", r.address, r.api)
		begun := time.Now()
		content, err := fetch(client, path)
		if err == nil {
			p.lists = append(p.lists, float64(time.Since(begun).Microseconds())/1000)
			var list metrics
			if err = json.Unmarshal(content, &list); err == nil {
				p.blind = max(p.blind, time.Since(shown))
				shown = time.Now()
				p.judge(list)
			}
		}
		for range 20 {
			begun := time.Now()
			if _, err := fetch(client, path+"/node0000"); err == nil {
				p.gets = append(p.gets, float64(time.Since(begun).Microseconds())/1000)
			}
		}
		time.Sleep(400 * time.Millisecond)
	}
}

func (p *phase) judge(list metrics) {
	if len(list.Items) != p.fleet.agents {
		p.absent++
	}
	ages := []float64{}
	for _, item := range list.Items {
		if item.Status.Timestamp != nil {
			ages = append(ages, time.Since(*item.Status.Timestamp).Seconds())
		}
	}
	if len(ages) > 0 {
		slices.SortFunc(ages, cmp.Compare[float64])
		p.ages = append(p.ages, ages[len(ages)*99/100])
	}
}

func fetch(client *http.Client, path string) ([]byte, error) {
	request, err := http.NewRequest(http.MethodGet, path, nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Authorization", "Bearer admin")
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", response.Status, content)
	}
	return content, err
}
