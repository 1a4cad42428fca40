// Command load simulates the agents of many nodes: each reports to every replica of the controller over its
// own connection, and renews its Lease, at fixed times, however long the answers take (an open loop: delays of a
// replica show up as latency, not as fewer requests). Once a second it prints its results as a line of JSON.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	options := options{}
	flag.IntVar(&options.first, "first", 0, "number of the first node")
	flag.IntVar(&options.nodes, "nodes", 5000, "number of agents")
	flag.StringVar(&options.name, "name", "node%04d", "pattern of the nodes' names")
	flag.StringVar(&options.endpoints, "endpoints", "", "file with the replicas' addresses, one per line; read again every second")
	flag.StringVar(&options.serverName, "server-name", "", "name in the replicas' certificate")
	flag.StringVar(&options.authority, "ca", "", "file with the CA of that certificate")
	flag.StringVar(&options.signer, "sign-with", "", "private key (EC, PEM) with which the cluster signs tokens of ServiceAccounts")
	flag.StringVar(&options.kubeconfig, "kubeconfig", "", "cluster in which to renew Leases; if empty, none are renewed")
	flag.StringVar(&options.leases, "lease-namespace", "plimsoll-node-lease", "namespace of the Leases")
	flag.DurationVar(&options.interval, "interval", 10*time.Second, "time between two reports of an agent")
	flag.DurationVar(&options.begin, "begin", 10*time.Second, "all agents start within this time")
	flag.BoolVar(&options.reports, "reports", true, "send reports; if false, only Leases are renewed")
	flag.DurationVar(&options.length, "for", 0, "duration; 0 means until interrupted")
	flag.Parse()
	if err := run(options); err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}

type options struct {
	first, nodes                           int
	name, endpoints, serverName, authority string
	signer, kubeconfig, leases             string
	interval, begin, length                time.Duration
	reports                                bool
}

func run(options options) error {
	running, end := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer end()
	if options.length > 0 {
		running, end = context.WithTimeout(running, options.length)
		defer end()
	}
	allowConnections(options.nodes)
	// This program shares the machine with what it measures, so trade memory for fewer garbage collections.
	debug.SetGCPercent(400)
	sender, err := newSender(options)
	if err != nil {
		return err
	}
	leases, err := newLeases(options)
	if err != nil {
		return err
	}
	tally := &tally{}
	var all sync.WaitGroup
	started := time.Now()
	for index := options.first; index < options.first+options.nodes; index++ {
		first := started.Add(time.Duration(rand.Int64N(int64(options.begin))))
		agent, err := newAgent(options, index, sender, leases, tally)
		if err != nil {
			return err
		}
		all.Add(1)
		go func() {
			defer all.Done()
			agent.run(running, first, options.interval)
		}()
	}
	all.Add(1)
	go func() {
		defer all.Done()
		tally.print(running, started)
	}()
	<-running.Done()
	all.Wait()
	return nil
}

// allowConnections raises the limit of open files if that is needed and allowed.
func allowConnections(nodes int) {
	limit := syscall.Rlimit{}
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil {
		return
	}
	if wanted := uint64(2*nodes + 1000); limit.Cur < wanted {
		more := syscall.Rlimit{Cur: wanted, Max: max(limit.Max, wanted)}
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &more); err != nil {
			fmt.Fprintf(os.Stderr, "load: at most %d files may be open, but %d are needed: %v\n", limit.Cur, wanted, err)
		}
	}
}

// tally has the results since the last line of output.
type tally struct {
	lock sync.Mutex
	line line
}

// A line is the output of one second.
type line struct {
	Second     int            `json:"second"`
	Codes      map[string]int `json:"codes"`
	Acks       []int64        `json:"acks"`    // microseconds for each report, from the time at which it was due
	Largest    int            `json:"largest"` // bytes of a report
	Renewals   int            `json:"renewals"`
	LeaseBytes int            `json:"leaseBytes"`
	Renewed    []int64        `json:"renewed"` // microseconds
}

func (t *tally) sent(size int) {
	t.lock.Lock()
	defer t.lock.Unlock()
	t.line.Largest = max(t.line.Largest, size)
}

// answered counts an answer by its kind; a latency of zero means that it was not for a report.
func (t *tally) answered(what string, took time.Duration) {
	t.lock.Lock()
	defer t.lock.Unlock()
	if t.line.Codes == nil {
		t.line.Codes = map[string]int{}
	}
	t.line.Codes[what]++
	if took > 0 {
		t.line.Acks = append(t.line.Acks, took.Microseconds())
	}
}

func (t *tally) renewed(size int, took time.Duration) {
	t.lock.Lock()
	defer t.lock.Unlock()
	t.line.Renewals++
	t.line.LeaseBytes += size
	t.line.Renewed = append(t.line.Renewed, took.Microseconds())
}

func (t *tally) print(running context.Context, started time.Time) {
	out := bufio.NewWriter(os.Stdout)
	ticks := time.NewTicker(time.Second)
	defer ticks.Stop()
	for running.Err() == nil {
		select {
		case <-ticks.C:
		case <-running.Done():
		}
		t.lock.Lock()
		now := t.line
		t.line = line{}
		t.lock.Unlock()
		now.Second = int(time.Since(started).Seconds())
		json.NewEncoder(out).Encode(now)
		out.Flush()
	}
}

func lines(file string) []string {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	return strings.Fields(string(content))
}
