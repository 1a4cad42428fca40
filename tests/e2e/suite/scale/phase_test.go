//go:build e2e

package scale

import (
	"bufio"
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

	shared "plimsoll.dev/suite/plane"
)

const (
	// The number of agents in one process: each has a connection to every replica, and a usual limit is 20 000 open files.
	agentsPerProcess = 7500
	// The number of agents started per second: each connects to every replica, on a shared machine.
	startsPerSecond = 250
	// The time between two gets of one node.
	getInterval = 100 * time.Millisecond
	// The largest histogram bucket below the limit of 10 ms.
	quick = "0.0032"
)

// A phase has the measurements of one.
type phase struct {
	name          string
	fleet         *fleet
	lock          sync.Mutex // for what the agents' processes print
	codes         map[string]int
	acks          []float64 // milliseconds
	worst         float64   // the largest p99 of the acks of a second
	largest       int       // bytes of a report
	renewals      float64   // of Leases, a second
	renewed       []float64 // milliseconds
	bytes         float64   // of Leases, a second
	writes, wrote float64   // of etcd, and their bytes, a second
	ages          []float64 // the p99 of each list, in seconds
	lists, passed []float64 // milliseconds, from the leader and forwarded by the standby
	gets          []float64 // milliseconds, from the leader
	cores         []float64 // of the replicas
	others        string    // cores of the other processes
	answered      string    // by the replicas' own metrics
	memory        []string  // of the replicas, in kB
	outage        time.Duration
	incomplete    int // lists without all nodes
}

// quantile is the value at this quantile.
func quantile(values []float64, share float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return values[int(share*float64(len(values)-1)+0.5)]
}

func (p *phase) String() string {
	perNode := make([]string, len(p.cores))
	for index, cores := range p.cores {
		perNode[index] = fmt.Sprintf("%.4f", cores*1000/float64(p.fleet.agents))
	}
	lines := []string{
		fmt.Sprintf("%s: answers %v", p.name, p.codes),
		fmt.Sprintf("acknowledged: p50 %.1f, p99 %.1f, p99.9 %.1f, slowest %.0f ms; p99 of the worst second %.1f ms; reports of at most %d bytes",
			quantile(p.acks, 0.5), quantile(p.acks, 0.99), quantile(p.acks, 0.999), quantile(p.acks, 1), p.worst, p.largest),
		p.answered,
		fmt.Sprintf("Leases: %.1f renewals/s of %.0f bytes/s, p99 %.1f ms; etcd: %.1f writes/s of %.0f bytes/s",
			p.renewals, p.bytes, quantile(p.renewed, 0.99), p.writes, p.wrote),
		fmt.Sprintf("age of data: p99 %.1f s in the median list, %.1f s in the worst; nothing was shown for at most %.1f s",
			quantile(p.ages, 0.5), quantile(p.ages, 1), p.outage.Seconds()),
		fmt.Sprintf("answers of the leader: get p50 %.2f, p99 %.2f ms, list p50 %.1f, p99 %.1f ms; list through the standby p50 %.1f ms",
			quantile(p.gets, 0.5), quantile(p.gets, 0.99), quantile(p.lists, 0.5), quantile(p.lists, 0.99), quantile(p.passed, 0.5)),
		fmt.Sprintf("replicas: %s millicores a node, %s kB of memory; cores of the other processes: %s",
			strings.Join(perNode, " and "), strings.Join(p.memory, " and "), p.others),
	}
	return strings.Join(lines, "\n        ")
}

// checkLimit logs a value, and fails the test if it exceeds the limit, unless the limit is for another size or a longer phase.
func (p *phase) checkLimit(t *testing.T, what string, value, limit float64, isBinding bool) {
	t.Helper()
	t.Logf("%s: %s: %.4g (limit: %g)", p.name, what, value, limit)
	if isBinding && value > limit {
		t.Errorf("%s: %s: %.4g is more than %g", p.name, what, value, limit)
	}
}

// phase measures the fleet for this long; the leader may be killed in the middle.
func (f *fleet) phase(name string, length time.Duration, reach []string, flags ...string) *phase {
	p := &phase{name: name, codes: map[string]int{}, fleet: f}
	kill := flags[len(flags)-1] == "kill"
	if kill {
		flags = flags[:len(flags)-1]
	}
	within, settled := f.settled()
	args := slices.Concat(reach, []string{"--kubeconfig", f.account(), "--begin", within.String()}, flags)
	var reading sync.WaitGroup
	var loads []*exec.Cmd
	for first := 0; first < f.agents; first += agentsPerProcess {
		part := []string{"--first", strconv.Itoa(first), "--nodes", strconv.Itoa(min(agentsPerProcess, f.agents-first))}
		load := exec.Command(f.program, slices.Concat(args, part)...)
		load.Stderr = os.Stderr
		out, err := load.StdoutPipe()
		if err != nil {
			f.T.Fatal(err)
		}
		if err := load.Start(); err != nil {
			f.T.Fatal(err)
		}
		loads = append(loads, load)
		reading.Go(func() { p.read(out, settled) })
	}
	time.Sleep(settled)
	before := f.used(loads)
	polled := make(chan struct{})
	reading.Go(func() {
		defer close(polled)
		f.poll(p, time.Now().Add(length))
	})
	if kill {
		time.Sleep(length / 2)
		f.replace()
	}
	<-polled
	p.record(before, f.used(loads), kill)
	for _, load := range loads {
		load.Process.Signal(os.Interrupt)
	}
	reading.Wait()
	for _, load := range loads {
		load.Wait()
	}
	return p
}

// settled is the time until all agents have started and reported twice: the first report connects, and after the second Leases are renewed at
// the longer interval.
func (f *fleet) settled() (within, settled time.Duration) {
	within = max(10*time.Second, time.Duration(f.agents/startsPerSecond)*time.Second)
	return within, within + 15*time.Second
}

// usage is the resource usage at a point in time.
type usage struct {
	at            time.Time
	replicas      []float64 // CPU time in seconds
	others        []float64
	writes, bytes float64    // of etcd
	answers       [2]float64 // of the replicas: all, and quick ones
}

var others = []string{"etcd", "API server", "agents", "client"}

// used reads the resource usage of all processes so far.
func (f *fleet) used(loads []*exec.Cmd) usage {
	now := usage{at: time.Now()}
	for _, r := range f.replicas {
		now.replicas = append(now.replicas, r.CPU())
		for index, series := range []string{"count", fmt.Sprintf("bucket{le=%q}", quick)} {
			value, err := shared.Metric(r.metrics, "plimsoll_controller_report_answer_seconds_"+series)
			if err != nil {
				f.T.Error(err)
			}
			now.answers[index] += value
		}
	}
	agents := 0.0
	for _, load := range loads {
		agents += shared.CPU(f.T, load.Process.Pid)
	}
	of := func(process int) float64 { return shared.CPU(f.T, process) }
	now.others = []float64{of(f.Etcd.PID()), of(f.Server.PID()), agents, of(os.Getpid())}
	now.writes, now.bytes = f.StoreWrites()
	return now
}

// record records the usage between two times. The CPU of replicas is omitted if one was killed: its replacement has its index.
func (p *phase) record(before, after usage, killed bool) {
	took := after.at.Sub(before.at).Seconds()
	for index, used := range after.replicas {
		p.memory = append(p.memory, p.fleet.replicas[index].Resident())
		if !killed {
			p.cores = append(p.cores, (used-before.replicas[index])/took)
		}
	}
	parts := []string{}
	for index, name := range others {
		parts = append(parts, fmt.Sprintf("%s %.2f", name, (after.others[index]-before.others[index])/took))
	}
	p.others = strings.Join(parts, ", ")
	p.writes, p.wrote = (after.writes-before.writes)/took, (after.bytes-before.bytes)/took
	p.answered = "by the replicas' own metrics: omitted because a replica was killed"
	if all := after.answers[0] - before.answers[0]; !killed && all > 0 {
		share := 100 * (after.answers[1] - before.answers[1]) / all
		p.answered = fmt.Sprintf("by the replicas' own metrics %.2f %% of reports were answered within %s s", share, quick)
	}
}

// read collects the agents' output, once they have settled.
func (p *phase) read(out io.Reader, settled time.Duration) {
	seconds, renewals, bytes := 0, 0, 0
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var line struct {
			Second, Renewals, LeaseBytes, Largest int
			Codes                                 map[string]int
			Acks, Renewed                         []float64
		}
		if json.Unmarshal(lines.Bytes(), &line) != nil || line.Second <= int(settled.Seconds()) {
			continue
		}
		seconds++
		p.lock.Lock()
		for code, count := range line.Codes {
			p.codes[code] += count
		}
		for _, micros := range line.Acks {
			p.acks = append(p.acks, micros/1000)
		}
		for _, micros := range line.Renewed {
			p.renewed = append(p.renewed, micros/1000)
		}
		p.worst = max(p.worst, quantile(line.Acks, 0.99)/1000)
		p.largest = max(p.largest, line.Largest)
		p.lock.Unlock()
		renewals += line.Renewals
		bytes += line.LeaseBytes
	}
	p.lock.Lock()
	defer p.lock.Unlock()
	p.renewals += float64(renewals) / float64(max(seconds, 1))
	p.bytes += float64(bytes) / float64(max(seconds, 1))
}

// metrics has the fields of a list of NodeMetrics that are read.
type metrics struct {
	Items []struct {
		Metadata struct{ Name string }
		Status   struct{ Timestamp *time.Time }
	}
}

// poll acts as a client: it gets a single node continuously and lists all nodes occasionally, from alternating replicas.
func (f *fleet) poll(p *phase, until time.Time) {
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	shown, listed := time.Now(), time.Time{}
	var leader *replica
	for count := 0; time.Now().Before(until); count++ {
		// A replica may be removed meanwhile.
		replicas := f.known()
		r := replicas[count%len(replicas)]
		path := fmt.Sprintf("https://%s:%d/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics", r.address, r.api)
		if took, _, err := timed(client, path+"/node0000"); err == nil {
			p.outage = max(p.outage, time.Since(shown))
			shown = time.Now()
			if r == leader {
				p.gets = append(p.gets, took)
			}
		}
		if time.Since(listed) > f.listInterval() {
			listed, leader = time.Now(), f.leader()
			p.list(client, path, r == leader)
		}
		time.Sleep(getInterval)
	}
	p.outage = max(p.outage, time.Since(shown))
}

// listInterval is the time between two lists of all nodes: reading one takes this client longer than it takes the replica to write it.
func (f *fleet) listInterval() time.Duration {
	return 2 * time.Second * time.Duration(max(1, f.agents/size))
}

func (p *phase) list(client *http.Client, path string, leads bool) {
	took, content, err := timed(client, path)
	if err != nil {
		return
	}
	if leads {
		p.lists = append(p.lists, took)
	} else {
		p.passed = append(p.passed, took)
	}
	var list metrics
	if json.Unmarshal(content, &list) == nil {
		p.addAges(list)
	}
}

// addAges records how old the data of a list is, and whether it has all nodes.
func (p *phase) addAges(list metrics) {
	if len(list.Items) != p.fleet.agents {
		p.incomplete++
	}
	ages := []float64{}
	for _, item := range list.Items {
		if item.Status.Timestamp != nil {
			ages = append(ages, time.Since(*item.Status.Timestamp).Seconds())
		}
	}
	if len(ages) > 0 {
		p.ages = append(p.ages, quantile(ages, 0.99))
	}
}

// timed fetches a URL and returns the latency in milliseconds.
func timed(client *http.Client, path string) (float64, []byte, error) {
	started := time.Now()
	content, err := fetch(client, path)
	return float64(time.Since(started).Microseconds()) / 1000, content, err
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
