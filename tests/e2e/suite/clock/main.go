//go:build linux && amd64

// Command clock runs a program with another wall clock: `clock -by -1h PROGRAM ARGUMENTS...`. Its other clocks and the machine's clock are
// not changed. The program is traced. It gets no vDSO, so it has to call clock_gettime, and the tracer returns the changed time.
package main

import (
	"encoding/binary"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"
	"time"
	"unsafe"
)

const (
	// From <linux/prctl.h>, <linux/seccomp.h>, <linux/ptrace.h>, <linux/auxvec.h>.
	setSeccomp, setNoNewPrivileges = 22, 38
	filterMode                     = 2
	returnAllow, returnTrace       = 0x7fff0000, 0x7ff00000
	traceSeccomp, exitKill         = 0x80, 0x100000
	eventSeccomp                   = 7
	auxIgnore, auxVDSO             = 1, 33
	realtime, realtimeCoarse       = 0, 5
	// confined is the argument with which this program starts itself again, to set the seccomp filter and execute the other program.
	confined = "--confined"
)

func main() {
	if len(os.Args) > 2 && os.Args[1] == confined {
		fail(confine(os.Args[2:]))
	}
	by := flag.Duration("by", 0, "offset of the program's clock")
	flag.Parse()
	code, err := run(*by, flag.Args())
	if err != nil {
		fail(err)
	}
	os.Exit(code)
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "clock:", err)
	os.Exit(125)
}

// confine executes the program with a seccomp filter that stops it at each read of the wall clock.
func confine(command []string) error {
	const load, equal, result = syscall.BPF_LD | syscall.BPF_W | syscall.BPF_ABS, syscall.BPF_JMP | syscall.BPF_JEQ | syscall.BPF_K, syscall.BPF_RET | syscall.BPF_K
	// In seccomp_data the call's number is at 0, its first argument at 16.
	filter := []syscall.SockFilter{
		{Code: load, K: 0},
		{Code: equal, K: syscall.SYS_CLOCK_GETTIME, Jf: 4},
		{Code: load, K: 16},
		{Code: equal, K: realtime, Jt: 1},
		{Code: equal, K: realtimeCoarse, Jf: 1},
		{Code: result, K: returnTrace},
		{Code: result, K: returnAllow},
	}
	program := syscall.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	runtime.LockOSThread()
	if _, _, failed := syscall.RawSyscall(syscall.SYS_PRCTL, setNoNewPrivileges, 1, 0); failed != 0 {
		return fmt.Errorf("prctl(PR_SET_NO_NEW_PRIVS): %w", failed)
	}
	if _, _, failed := syscall.RawSyscall(syscall.SYS_PRCTL, setSeccomp, filterMode, uintptr(unsafe.Pointer(&program))); failed != 0 {
		return fmt.Errorf("prctl(PR_SET_SECCOMP): %w", failed)
	}
	return fmt.Errorf("%s: %w", command[0], syscall.Exec(command[0], command, os.Environ()))
}

// run runs the program and returns its exit code.
func run(by time.Duration, command []string) (int, error) {
	if len(command) == 0 {
		return 0, fmt.Errorf("no program given")
	}
	path, err := exec.LookPath(command[0])
	if err != nil {
		return 0, err
	}
	// Only the thread that started a process may trace it.
	runtime.LockOSThread()
	child := exec.Command("/proc/self/exe", append([]string{confined, path}, command[1:]...)...)
	child.Stdin, child.Stdout, child.Stderr = os.Stdin, os.Stdout, os.Stderr
	child.SysProcAttr = &syscall.SysProcAttr{Ptrace: true}
	if err := child.Start(); err != nil {
		return 0, err
	}
	t := &tracer{by: by, main: child.Process.Pid, known: map[int]bool{}}
	// The child stops at its exec.
	if _, err := syscall.Wait4(t.main, nil, 0, nil); err != nil {
		return 0, err
	}
	options := syscall.PTRACE_O_TRACECLONE | syscall.PTRACE_O_TRACEFORK | syscall.PTRACE_O_TRACEVFORK | syscall.PTRACE_O_TRACEEXEC | traceSeccomp | exitKill
	if err := syscall.PtraceSetOptions(t.main, options); err != nil {
		return 0, err
	}
	t.known[t.main] = true
	t.forwardSignals(os.Interrupt, syscall.SIGTERM)
	if err := syscall.PtraceCont(t.main, 0); err != nil {
		return 0, err
	}
	return t.trace()
}

type tracer struct {
	by    time.Duration
	main  int
	known map[int]bool
}

// forwardSignals forwards these signals to the program.
func (t *tracer) forwardSignals(signals ...os.Signal) {
	received := make(chan os.Signal, 1)
	signal.Notify(received, signals...)
	go func() {
		for received := range received {
			syscall.Kill(t.main, received.(syscall.Signal))
		}
	}()
}

func (t *tracer) trace() (int, error) {
	for {
		var status syscall.WaitStatus
		thread, err := syscall.Wait4(-1, &status, syscall.WALL, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return 0, err
		case status.Exited() && thread == t.main:
			return status.ExitStatus(), nil
		case status.Signaled() && thread == t.main:
			return 128 + int(status.Signal()), nil
		case status.Stopped():
			// The thread may have been killed meanwhile.
			if err := syscall.PtraceCont(thread, t.handleStop(thread, status)); err != nil && err != syscall.ESRCH {
				return 0, err
			}
		}
	}
}

// handleStop handles a stop of a thread, and returns the signal to deliver.
func (t *tracer) handleStop(thread int, status syscall.WaitStatus) int {
	isNew := !t.known[thread]
	t.known[thread] = true
	switch event := int(status>>16) & 0xff; {
	case event == eventSeccomp:
		t.setTime(thread)
	case event == syscall.PTRACE_EVENT_EXEC:
		t.hideVDSO(thread)
	case event == 0 && !(isNew && status.StopSignal() == syscall.SIGSTOP):
		return int(status.StopSignal())
	}
	return 0
}

// setTime makes the thread's clock_gettime return the changed time.
func (t *tracer) setTime(thread int) {
	var registers syscall.PtraceRegs
	if syscall.PtraceGetRegs(thread, &registers) != nil {
		return
	}
	now := time.Now().Add(t.by)
	text := make([]byte, 16)
	binary.LittleEndian.PutUint64(text, uint64(now.Unix()))
	binary.LittleEndian.PutUint64(text[8:], uint64(now.Nanosecond()))
	if _, err := syscall.PtracePokeData(thread, uintptr(registers.Rsi), text); err != nil {
		return
	}
	// Skip the system call.
	registers.Orig_rax, registers.Rax = ^uint64(0), 0
	syscall.PtraceSetRegs(thread, &registers)
}

// hideVDSO removes the vDSO from the auxiliary vector of a new program, so that the program reads clocks with system calls.
func (t *tracer) hideVDSO(thread int) {
	var registers syscall.PtraceRegs
	if syscall.PtraceGetRegs(thread, &registers) != nil {
		return
	}
	at, ends := uintptr(registers.Rsp), 0
	word := make([]byte, 8)
	next := func() uint64 {
		syscall.PtracePeekData(thread, at, word)
		at += 8
		return binary.LittleEndian.Uint64(word)
	}
	// The stack: argc, argv, 0, envp, 0, auxv.
	for next(); ends < 2; {
		if next() == 0 {
			ends++
		}
	}
	for kind := next(); kind != 0; kind = next() {
		if kind == auxVDSO {
			binary.LittleEndian.PutUint64(word, auxIgnore)
			syscall.PtracePokeData(thread, at-8, word)
			return
		}
		next()
	}
}
