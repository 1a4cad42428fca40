//go:build e2e

package plane

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// A Process is a program that can be started again after it exited.
type Process struct {
	t       *testing.T
	path    string
	args    []string
	command *exec.Cmd
	log     buffer
}

// buffer has the logs of all runs of a process.
type buffer struct {
	lock sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(text []byte) (int, error) {
	b.lock.Lock()
	defer b.lock.Unlock()
	return b.text.Write(text)
}

func (p *Plane) start(path string, args ...string) *Process { return launch(p.T, path, args...) }

// launch starts a program, which is killed at the end of the test.
func launch(t *testing.T, path string, args ...string) *Process {
	process := &Process{t: t, path: path, args: args}
	process.Start()
	t.Cleanup(func() {
		process.Kill()
		if t.Failed() {
			lines := strings.Split(strings.TrimSpace(process.Log()), "\n")
			t.Logf("%s:\n%s", filepath.Base(path), strings.Join(lines[max(0, len(lines)-15):], "\n"))
		}
	})
	return process
}

// Start starts the program (again).
func (p *Process) Start() {
	p.command = exec.Command(p.path, p.args...)
	p.command.Stdout, p.command.Stderr = io.Discard, &p.log
	if err := p.command.Start(); err != nil {
		p.t.Fatal(err)
	}
}

// Signal sends a signal to the process.
func (p *Process) Signal(signal syscall.Signal) {
	if err := p.command.Process.Signal(signal); err != nil {
		p.t.Error(err)
	}
}

// Kill sends SIGKILL and waits.
func (p *Process) Kill() {
	p.command.Process.Kill()
	p.command.Wait()
}

// Terminate sends SIGTERM and waits.
func (p *Process) Terminate() error {
	p.Signal(syscall.SIGTERM)
	return p.command.Wait()
}

// Log is the log of all runs.
func (p *Process) Log() string {
	p.log.lock.Lock()
	defer p.log.lock.Unlock()
	return p.log.text.String()
}

// Resident is the resident memory of the process in kB.
func (p *Process) Resident() string {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.command.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	return string(regexp.MustCompile(`VmRSS:\s+(\d+)`).FindSubmatch(status)[1])
}

// PID is the process ID.
func (p *Process) PID() int { return p.command.Process.Pid }

// CPU is the CPU time of this run in seconds.
func (p *Process) CPU() float64 { return CPU(p.t, p.PID()) }

// CPU is the CPU time of a process so far in seconds.
func CPU(t *testing.T, process int) float64 {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", process))
	if err != nil {
		t.Fatal(err)
	}
	// After the name, which may contain spaces: utime and stime are fields 14 and 15, in hundredths of a second.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	ticks := 0.0
	for _, field := range fields[11:13] {
		value, _ := strconv.ParseFloat(field, 64)
		ticks += value
	}
	return ticks / 100
}
