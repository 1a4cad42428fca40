// Command load stands for the agents of many nodes: each reports to every replica of the controller over a connection of its
// own, and renews its Lease, at times that were fixed before it began, whatever the answers take (an open loop: what a
// replica is late with is seen as latency, not as fewer requests). Once a second it prints what was answered, as JSON lines.
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
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	options := options{}
	flag.IntVar(&options.nodes, "nodes", 5000, "how many agents")
	flag.StringVar(&options.name, "name", "node%04d", "pattern of the nodes' names")
	flag.StringVar(&options.endpoints, "endpoints", "", "file with the replicas' addresses, one a line; read again each second")
	flag.StringVar(&options.serverName, "server-name", "", "name on the replicas' certificate")
	flag.StringVar(&options.authority, "ca", "", "file with the authority of that certificate")
	flag.StringVar(&options.signer, "sign-with", "", "private key (EC, PEM) with which the cluster signs tokens of ServiceAccounts")
	flag.StringVar(&options.issuer, "issuer", "https://kubernetes.default.svc", "issuer of the tokens")
	flag.StringVar(&options.subject, "subject", "system:serviceaccount:default:plimsoll-agent", "whose tokens they are")
	flag.StringVar(&options.kubeconfig, "kubeconfig", "", "cluster in which to renew Leases; empty: none are renewed")
	flag.StringVar(&options.leases, "lease-namespace", "plimsoll-node-lease", "where they are")
	flag.DurationVar(&options.interval, "interval", 10*time.Second, "time between two reports of an agent")
	flag.BoolVar(&options.reports, "reports", true, "report directly; without, only Leases are renewed")
	flag.DurationVar(&options.length, "for", 0, "how long; 0: until interrupted")
	flag.Parse()
	if err := run(options); err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}

type options struct {
	nodes                                       int
	name, endpoints, serverName, authority      string
	signer, issuer, subject, kubeconfig, leases string
	interval, length                            time.Duration
	reports                                     bool
}

func run(options options) error {
	running, end := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer end()
	if options.length > 0 {
		running, end = context.WithTimeout(running, options.length)
		defer end()
	}
	sender, err := newSender(options)
	if err != nil {
		return err
	}
	leases, err := newLeases(options)
	if err != nil {
		return err
	}
	tally := &tally{codes: map[string]int{}}
	var all sync.WaitGroup
	begun := time.Now()
	for index := range options.nodes {
		// Spread over the interval as agents are that started at different times.
		first := begun.Add(time.Duration(rand.Int64N(int64(options.interval))))
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
		tally.print(running, begun)
	}()
	<-running.Done()
	all.Wait()
	return nil
}

// tally is what was answered since it was printed last.
type tally struct {
	lock      sync.Mutex
	codes     map[string]int
	acks      []time.Duration
	renewals  []time.Duration
	leaseSize int
}

// A line is what is printed each second.
type line struct {
	Second    int            `json:"second"`
	Codes     map[string]int `json:"codes"`
	AckMillis [3]float64     `json:"ackMillis"` // median, p99, most; from the moment a report was to be sent
	Renewals  int            `json:"renewals"`
	LeaseSize int            `json:"leaseBytes"`
	Renewed   [3]float64     `json:"renewalMillis"`
}

func (t *tally) answered(what string, took time.Duration) {
	t.lock.Lock()
	defer t.lock.Unlock()
	t.codes[what]++
	t.acks = append(t.acks, took)
}

func (t *tally) renewed(size int, took time.Duration) {
	t.lock.Lock()
	defer t.lock.Unlock()
	t.leaseSize += size
	t.renewals = append(t.renewals, took)
}

func (t *tally) print(running context.Context, begun time.Time) {
	out := bufio.NewWriter(os.Stdout)
	ticks := time.NewTicker(time.Second)
	defer ticks.Stop()
	for running.Err() == nil {
		select {
		case <-ticks.C:
		case <-running.Done():
		}
		t.lock.Lock()
		now := line{
			Second: int(time.Since(begun).Seconds()), Codes: t.codes, AckMillis: spread(t.acks),
			Renewals: len(t.renewals), LeaseSize: t.leaseSize, Renewed: spread(t.renewals),
		}
		t.codes, t.acks, t.renewals, t.leaseSize = map[string]int{}, nil, nil, 0
		t.lock.Unlock()
		json.NewEncoder(out).Encode(now)
		out.Flush()
	}
}

func spread(times []time.Duration) [3]float64 {
	if len(times) == 0 {
		return [3]float64{}
	}
	slices.Sort(times)
	at := func(share float64) float64 {
		return float64(times[int(share*float64(len(times)-1))].Microseconds()) / 1000
	}
	return [3]float64{at(0.5), at(0.99), at(1)}
}

func lines(file string) []string {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	return strings.Fields(string(content))
}
