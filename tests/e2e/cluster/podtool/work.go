package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"
)

// burn uses this many millicores by its own CPU time, without catching up if it gets less.
func burn(millicores int) {
	runtime.LockOSThread()
	const period = 20 * time.Millisecond
	for share := period * time.Duration(millicores) / 1000; ; {
		begin, used := time.Now(), threadTime()
		for threadTime()-used < share {
		}
		time.Sleep(max(0, period-time.Since(begin)))
	}
}

// threadTime is the CPU time of this thread.
func threadTime() time.Duration {
	const thread = 1 // RUSAGE_THREAD
	var usage syscall.Rusage
	if err := syscall.Getrusage(thread, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// linger reports that it is alive until it is killed.
func linger(url string) {
	client := http.Client{Timeout: time.Second}
	for {
		if response, err := client.Get(url); err == nil {
			response.Body.Close()
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// report has the first and last time of a pod's notes, and their number.
type report struct {
	First, Last time.Time
	Times       int
}

// newGauge serves a metric that a test sets, and records notes of pods.
func newGauge() http.Handler {
	var lock sync.Mutex
	values, notes := map[string]string{}, map[string]report{}
	handle := http.NewServeMux()
	locked := func(path string, answer http.HandlerFunc) {
		handle.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			lock.Lock()
			defer lock.Unlock()
			answer(w, r)
		})
	}
	locked("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		names := make([]string, 0, len(values))
		for name := range values {
			names = append(names, name)
		}
		slices.Sort(names)
		for _, name := range names {
			fmt.Fprintf(w, "# TYPE %s gauge\n%s %s\n", name, name, values[name])
		}
	})
	locked("/set", func(_ http.ResponseWriter, r *http.Request) {
		for name, given := range r.URL.Query() {
			if values[name] = given[0]; given[0] == "" {
				delete(values, name)
			}
		}
	})
	locked("/note", func(_ http.ResponseWriter, r *http.Request) {
		who, now := r.URL.Query().Get("who"), time.Now()
		note := notes[who]
		if note.Times == 0 {
			note.First = now
		}
		notes[who] = report{First: note.First, Last: now, Times: note.Times + 1}
	})
	locked("/notes", func(w http.ResponseWriter, _ *http.Request) {
		if err := json.NewEncoder(w).Encode(notes); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	return handle
}
