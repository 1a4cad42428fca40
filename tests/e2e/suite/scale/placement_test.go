//go:build e2e

package scale

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"
)

// TestSchedulersOfAThousandNodes: a replica serves everything that schedulers read while 1000 agents report to it, within 0.1 core and 100 MB.
// It is the standby: the leader also stores the history from which watches of NodeMetrics resume, which no scheduler reads.
func TestSchedulersOfAThousandNodes(t *testing.T) {
	const agents, length = 1000, time.Minute
	f, reach := newFleet(t, agents, 10*time.Second)
	within, settled := f.settled()
	load := exec.Command(f.program, append(reach, "--kubeconfig", f.account(), "--nodes", strconv.Itoa(agents), "--begin", within.String())...)
	load.Stderr = os.Stderr
	if err := load.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { load.Process.Signal(os.Interrupt); load.Wait() }()
	time.Sleep(settled)
	of, leader := f.replicas[0], f.replicas[1]
	if of.leads() {
		of, leader = leader, of
	}
	alone, before := of.coresFor(length), of.Resident()
	page := fmt.Sprintf("http://%s:%d", of.address, of.schedulers)
	read := func(path string) {
		response, err := http.Get(page + path)
		if err != nil {
			t.Error(err)
			return
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			t.Errorf("%s answers %s", path, response.Status)
		}
	}
	ended := make(chan struct{})
	// A scheduler with the extender places 10 pods a second, each among the 42 % of nodes that it considers; Trimaran and the descheduler read at
	// their own intervals.
	for every, request := range map[time.Duration]func(int){
		100 * time.Millisecond: func(count int) { prioritize(t, page, count, agents*42/100) },
		30 * time.Second:       func(int) { read("/watcher") },
		time.Minute: func(int) {
			for _, query := range []string{"load_line", "cpu", "memory"} {
				read("/api/v1/query?query=instance:plimsoll_" + query + ":ratio")
			}
		},
	} {
		go func() {
			tick := time.NewTicker(every)
			defer tick.Stop()
			for count := 0; ; count++ {
				request(count)
				select {
				case <-ended:
					return
				case <-tick.C:
				}
			}
		}()
	}
	all := of.coresFor(length)
	close(ended)
	memory, _ := strconv.Atoi(of.Resident())
	t.Logf("%d reporting agents take %.3f cores and %s kB of a replica; with all that schedulers read %.3f cores and %d kB (the leader has %s kB)",
		agents, alone, before, all, memory, leader.Resident())
	if all > 0.1 || memory > 100_000 {
		t.Error("more than 0.1 core or 100 MB")
	}
}

// coresFor is the CPU that a replica uses in this time, in cores.
func (r *replica) coresFor(length time.Duration) float64 {
	before := r.CPU()
	time.Sleep(length)
	return (r.CPU() - before) / length.Seconds()
}

// prioritize requests the extender's points for a pod, as a scheduler does.
func prioritize(t *testing.T, page string, pod, candidates int) {
	var names []string
	for index := range candidates {
		names = append(names, fmt.Sprintf("node%04d", index))
	}
	body, err := json.Marshal(map[string]any{"NodeNames": names, "Pod": map[string]any{
		"metadata": map[string]any{"name": fmt.Sprintf("web-%d", pod), "namespace": "shop", "uid": fmt.Sprintf("uid-%d", pod)},
		"spec":     map[string]any{"containers": []any{map[string]any{"name": "it", "resources": map[string]any{"requests": map[string]any{"cpu": "100m"}}}}},
	}})
	if err != nil {
		t.Error(err)
		return
	}
	response, err := http.Post(page+"/extender/prioritize", "application/json", bytes.NewReader(body))
	if err != nil {
		t.Error(err)
		return
	}
	defer response.Body.Close()
	var points []struct{ Score int }
	if err := json.NewDecoder(response.Body).Decode(&points); err != nil || len(points) != candidates {
		t.Errorf("%d of %d nodes have points: %v", len(points), candidates, err)
	}
}
