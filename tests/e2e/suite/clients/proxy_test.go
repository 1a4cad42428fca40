//go:build e2e

package clients

import (
	"net"
	"sync"
	"testing"
)

// A proxy is the only path from some programs to another. It can be cut like a network: packets are dropped without
// notice. Open connections do not resume when it is restored.
type proxy struct {
	address, to string
	lock        sync.Mutex
	cuts        int
	// intact is closed while the connection is not cut.
	intact chan struct{}
}

func newProxy(t *testing.T, to string) *proxy {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &proxy{address: listener.Addr().String(), to: to, intact: make(chan struct{})}
	close(w.intact)
	t.Cleanup(func() { listener.Close(); w.restore() })
	go func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			go w.forward(near)
		}
	}()
	return w
}

func (w *proxy) cut() {
	w.lock.Lock()
	defer w.lock.Unlock()
	select {
	case <-w.intact:
		w.cuts++
		w.intact = make(chan struct{})
	default:
	}
}

func (w *proxy) restore() {
	w.lock.Lock()
	defer w.lock.Unlock()
	select {
	case <-w.intact:
	default:
		close(w.intact)
	}
}

// wait waits until it is not cut, and returns how often it has been cut.
func (w *proxy) wait() int {
	w.lock.Lock()
	intact := w.intact
	w.lock.Unlock()
	<-intact
	w.lock.Lock()
	defer w.lock.Unlock()
	return w.cuts
}

// forward copies data in both directions. It drops what arrives after a cut.
func (w *proxy) forward(near net.Conn) {
	defer near.Close()
	cuts := w.wait()
	far, err := net.Dial("tcp", w.to)
	if err != nil {
		return
	}
	defer far.Close()
	ended := make(chan struct{}, 2)
	pass := func(to, from net.Conn) {
		defer func() { ended <- struct{}{} }()
		part := make([]byte, 32<<10)
		for {
			length, err := from.Read(part)
			if w.wait() != cuts {
				return
			}
			if _, unsent := to.Write(part[:length]); err != nil || unsent != nil {
				return
			}
		}
	}
	go pass(far, near)
	go pass(near, far)
	<-ended
}
