//go:build e2e

package scale

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	shared "plimsoll.dev/suite/plane"
)

const (
	// The number of slow clients, and their user.
	slowReaders = 50
	slowUser    = "slow"
	// The bytes per read and the pause after it: slightly faster than the rate below which a replica closes the connection.
	slowPart, slowPause = 4 << 10, 100 * time.Millisecond
	// The chart's memory limit of a replica, in kB.
	memoryLimit = 512 << 10
)

// A crowd is many clients that list all nodes and read slowly, and reconnect when the replica closes their connection.
type crowd struct {
	started, cut atomic.Int64
	running      sync.WaitGroup
	stop         context.CancelFunc
}

// readSlowly starts `slowReaders` clients of the leader, a fifth of them with streaming lists.
func (f *fleet) readSlowly() *crowd {
	running, stop := context.WithCancel(background)
	c := &crowd{stop: stop}
	for index := range slowReaders {
		c.running.Go(func() {
			// Staggered starts, so that each pins a different version of the data.
			sleep(running, time.Duration(index)*time.Second)
			for running.Err() == nil {
				if leader := f.leader(); leader != nil {
					c.read(running, leader, index%5 == 0)
				}
				sleep(running, time.Second)
			}
		})
	}
	return c
}

func sleep(running context.Context, length time.Duration) {
	select {
	case <-running.Done():
	case <-time.After(length):
	}
}

// read sends a request on its own connection with a small TCP window, and reads until the response is complete or the connection is closed.
func (c *crowd) read(running context.Context, from *replica, watches bool) {
	dialer := &net.Dialer{Timeout: 10 * time.Second}
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dialer.DialContext(ctx, network, address)
			if err == nil {
				err = conn.(*net.TCPConn).SetReadBuffer(slowPart)
			}
			return conn, err
		},
	}
	query := map[bool]string{true: "?watch=1"}[watches]
	url := fmt.Sprintf("https://%s:%d/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics%s", from.address, from.api, query)
	request, err := http.NewRequestWithContext(running, http.MethodGet, url, nil)
	if err != nil {
		return
	}
	request.Header.Set("Authorization", "Bearer "+slowUser)
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return
	}
	c.started.Add(1)
	part := make([]byte, slowPart)
	for err == nil {
		_, err = response.Body.Read(part)
		sleep(running, slowPause)
	}
	if err != io.EOF && running.Err() == nil {
		c.cut.Add(1)
	}
}

// end stops the clients.
func (c *crowd) end() {
	c.stop()
	c.running.Wait()
}

// peaks polls the memory of the replicas until it is stopped, and returns the maxima in kB.
func (f *fleet) peaks(running context.Context) map[*replica]int {
	highest := map[*replica]int{}
	for running.Err() == nil {
		for _, r := range f.known() {
			resident, _ := strconv.Atoi(r.Resident())
			highest[r] = max(highest[r], resident)
		}
		sleep(running, 500*time.Millisecond)
	}
	return highest
}

// TestFleetLeaderSurvivesSlowReaders: fifty clients read lists and watches of all nodes slowly while agents report. The leader stays below
// the chart's memory limit, and normal readers are not affected.
func TestFleetLeaderSurvivesSlowReaders(t *testing.T) {
	agents, length, interval := sizes(t)
	f, reach := newFleet(t, agents, interval)
	length = max(length, 2*slowReaders*time.Second)
	alone := f.phase("without slow readers", length/2, reach, "--reports=true")
	t.Log(alone)

	following, stop := context.WithCancel(background)
	peaks := make(chan map[*replica]int, 1)
	go func() { peaks <- f.peaks(following) }()
	crowd := f.readSlowly()
	beside := f.phase("beside fifty slow readers", length, reach, "--reports=true")
	leader := f.leader()
	crowd.end()
	stop()
	highest := <-peaks
	t.Log(beside)

	pinned := func() (float64, float64) {
		bytes, err := shared.Metric(leader.metrics, "plimsoll_controller_metrics_api_pinned_bytes")
		cut, none := shared.Metric(leader.metrics, `plimsoll_controller_metrics_api_connections_cut_total{reason="pinned"}`)
		if err != nil {
			t.Error(err)
		}
		if none != nil {
			cut = 0
		}
		return bytes, cut
	}
	f.Eventually(time.Minute, "the slow readers' data is freed", func() error {
		if bytes, _ := pinned(); bytes > 1<<20 {
			return fmt.Errorf("%.0f bytes are still in use", bytes)
		}
		return nil
	})
	_, cut := pinned()
	t.Logf("%d slow reads started, %d were cut off; the leader closed %.0f of them because of the memory that they pinned", crowd.started.Load(), crowd.cut.Load(), cut)
	if crowd.started.Load() < slowReaders {
		t.Errorf("only %d slow reads started", crowd.started.Load())
	}
	for r, resident := range highest {
		beside.checkLimit(t, "memory of replica "+r.address+" at most, in kB", float64(resident), memoryLimit, agents <= size)
	}
	if agents >= size && cut == 0 {
		t.Error("no client was disconnected: the clients were not slow enough to test anything")
	}
	if beside.incomplete > 0 {
		t.Errorf("%d lists lacked nodes", beside.incomplete)
	}
	if len(beside.lists) == 0 {
		t.Fatal("no client could list")
	}
	beside.checkLimit(t, "time for which a client got no data, in s", beside.outage.Seconds(), 2, true)
	beside.checkLimit(t, "slowest list of the leader, in ms", quantile(beside.lists, 1), 2*quantile(alone.lists, 1)+2000, true)
	beside.checkLimit(t, "p99 of acknowledgements, in ms", quantile(beside.acks, 0.99), 2*quantile(alone.acks, 0.99)+5, agents == size)
	beside.checkLimit(t, "age of data, p99 of the worst list, in s", quantile(beside.ages, 1), quantile(alone.ages, 1)+5, true)
}
