//go:build e2e

package clients

import (
	"net"
	"sync"
	"testing"
)

// A wire is the only connection from some programs to another. It can be cut like a network: packets are dropped without
// notice. Open connections do not resume when it is restored.
type wire struct {
	address, to string
	lock        sync.Mutex
	cuts        int
	// whole is closed while the wire is not cut.
	whole chan struct{}
}

func newWire(t *testing.T, to string) *wire {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{address: listener.Addr().String(), to: to, whole: make(chan struct{})}
	close(w.whole)
	t.Cleanup(func() { listener.Close(); w.mend() })
	go func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			go w.carry(near)
		}
	}()
	return w
}

func (w *wire) cut() {
	w.lock.Lock()
	defer w.lock.Unlock()
	select {
	case <-w.whole:
		w.cuts++
		w.whole = make(chan struct{})
	default:
	}
}

func (w *wire) mend() {
	w.lock.Lock()
	defer w.lock.Unlock()
	select {
	case <-w.whole:
	default:
		close(w.whole)
	}
}

// wait waits until it is not cut, and returns how often it was cut.
func (w *wire) wait() int {
	w.lock.Lock()
	whole := w.whole
	w.lock.Unlock()
	<-whole
	w.lock.Lock()
	defer w.lock.Unlock()
	return w.cuts
}

func (w *wire) carry(near net.Conn) {
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
