//go:build linux && amd64

// Command clock runs a program whose wall clock is off, and no other clock: `clock -by -1h PROGRAM ARGUMENTS...`. The machine's own clock
// stays as it is. The program is traced: it gets no vDSO, so that it has to ask the kernel for the time, and its question is answered here.
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
	// Of <linux/prctl.h>, <linux/seccomp.h>, <linux/ptrace.h>, <linux/auxvec.h>.
	setSeccomp, setNoNewPrivileges = 22, 38
	filterMode                     = 2
	returnAllow, returnTrace       = 0x7fff0000, 0x7ff00000
	traceSeccomp, exitKill         = 0x80, 0x100000
	eventSeccomp                   = 7
	auxIgnore, auxVDSO             = 1, 33
	realtime, realtimeCoarse       = 0, 5
	// confined begins the second life of this program, in which it becomes the other.
	confined = "--confined"
)

func main() {
	if len(os.Args) > 2 && os.Args[1] == confined {
		fail(confine(os.Args[2:]))
	}
	by := flag.Duration("by", 0, "how far the program's clock is ahead")
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

// confine becomes the program, whose questions for the wall clock stop it.
func confine(command []string) error {
	const load, equal, answer = syscall.BPF_LD | syscall.BPF_W | syscall.BPF_ABS, syscall.BPF_JMP | syscall.BPF_JEQ | syscall.BPF_K, syscall.BPF_RET | syscall.BPF_K
	// Of seccomp_data: the call's number is at 0, its first argument at 16.
	filter := []syscall.SockFilter{
		{Code: load, K: 0},
		{Code: equal, K: syscall.SYS_CLOCK_GETTIME, Jf: 4},
		{Code: load, K: 16},
		{Code: equal, K: realtime, Jt: 1},
		{Code: equal, K: realtimeCoarse, Jf: 1},
		{Code: answer, K: returnTrace},
		{Code: answer, K: returnAllow},
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

// run runs the program until it ends, with what code.
func run(by time.Duration, command []string) (int, error) {
	if len(command) == 0 {
		return 0, fmt.Errorf("which program?")
	}
	path, err := exec.LookPath(command[0])
	if err != nil {
		return 0, err
	}
	// A traced process knows only the thread that began it.
	runtime.LockOSThread()
	child := exec.Command("/proc/self/exe", append([]string{confined, path}, command[1:]...)...)
	child.Stdin, child.Stdout, child.Stderr = os.Stdin, os.Stdout, os.Stderr
	child.SysProcAttr = &syscall.SysProcAttr{Ptrace: true}
	if err := child.Start(); err != nil {
		return 0, err
	}
	t := &tracer{by: by, main: child.Process.Pid, known: map[int]bool{}}
	// It stops where it begins.
	if _, err := syscall.Wait4(t.main, nil, 0, nil); err != nil {
		return 0, err
	}
	options := syscall.PTRACE_O_TRACECLONE | syscall.PTRACE_O_TRACEFORK | syscall.PTRACE_O_TRACEVFORK | syscall.PTRACE_O_TRACEEXEC | traceSeccomp | exitKill
	if err := syscall.PtraceSetOptions(t.main, options); err != nil {
		return 0, err
	}
	t.known[t.main] = true
	t.passOn(os.Interrupt, syscall.SIGTERM)
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

// passOn lets the program have the signals that end this one.
func (t *tracer) passOn(signals ...os.Signal) {
	told := make(chan os.Signal, 1)
	signal.Notify(told, signals...)
	go func() {
		for told := range told {
			syscall.Kill(t.main, told.(syscall.Signal))
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
			// A thread that was killed meanwhile is not there any more.
			if err := syscall.PtraceCont(thread, t.stopped(thread, status)); err != nil && err != syscall.ESRCH {
				return 0, err
			}
		}
	}
}

// stopped does what a stop asks for; the signal that the thread is to have.
func (t *tracer) stopped(thread int, status syscall.WaitStatus) int {
	begins := !t.known[thread]
	t.known[thread] = true
	switch event := int(status>>16) & 0xff; {
	case event == eventSeccomp:
		t.answer(thread)
	case event == syscall.PTRACE_EVENT_EXEC:
		t.hideVDSO(thread)
	case event == 0 && !(begins && status.StopSignal() == syscall.SIGSTOP):
		return int(status.StopSignal())
	}
	return 0
}

// answer carries out clock_gettime in the thread's place.
func (t *tracer) answer(thread int) {
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
	// The kernel has nothing more to do.
	registers.Orig_rax, registers.Rax = ^uint64(0), 0
	syscall.PtraceSetRegs(thread, &registers)
}

// hideVDSO keeps from a program that begins that it could read clocks without asking.
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
	// The number of arguments; they; a zero; the environment; a zero; pairs.
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
