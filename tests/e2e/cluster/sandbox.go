package main

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// File descriptors that `up` hands to the sandbox.
const (
	progressFd = 3 // a pipe: one line per stage, then "ready"
	listenerFd = 4 // a socket of the host's network, through which the host reaches the API server
)

// oneAtATime serializes the commands build, up and down.
func oneAtATime(here layout, nodes []string, command func(layout, []string) error) error {
	lock, err := os.OpenFile(filepath.Join(here.dir, "commands.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	return command(here, nodes)
}

// up starts the cluster and returns when it is ready. The sandbox keeps running.
func up(here layout, nodes []string) error {
	start := time.Now()
	if _, err := chosenNetwork(nodes); err != nil {
		return err
	}
	if _, err := chosenDriver(); err != nil {
		return err
	}
	if err := build(here, nodes); err != nil {
		return err
	}
	pid, err := sandboxPid(here)
	if err != nil {
		return err
	}
	if pid != 0 {
		return checkRunning(here, nodes)
	}
	if err := removeLeftovers(here); err != nil {
		return err
	}
	if err := borrowDirectories(here); err != nil {
		return err
	}
	if err := startSandbox(here, nodes); err != nil {
		return errors.Join(err, down(here, nodes))
	}
	fmt.Printf("%5.1f s  the cluster is up\n\nexport KUBECONFIG=%s\n", time.Since(start).Seconds(), here.kubeconfig())
	return nil
}

// checkRunning accepts a running cluster if it has the requested nodes.
func checkRunning(here layout, wanted []string) error {
	nodes, err := runningNodes(here)
	if err != nil {
		return err
	}
	if !slices.Equal(nodes, wanted) {
		return fmt.Errorf("a cluster with the nodes %v is already running; `cluster down` stops it", nodes)
	}
	network, err := chosenNetwork(wanted)
	if err != nil {
		return err
	}
	running, err := os.ReadFile(here.run("network"))
	if err != nil {
		return err
	}
	if string(running) != network.String() {
		return fmt.Errorf("a cluster with the service range %s is already running; `cluster down` stops it", running)
	}
	driver, err := chosenDriver()
	if err != nil {
		return err
	}
	if running := here.cgroupDriver("v2"); slices.Contains(wanted, "v2") && running != driver {
		return fmt.Errorf("a cluster with the cgroup driver %s is already running; `cluster down` stops it", running)
	}
	fmt.Printf("the cluster is already running\n\nexport KUBECONFIG=%s\n", here.kubeconfig())
	return nil
}

// startSandbox starts the sandbox's process 1 in its own namespaces, prints its progress, and returns when the cluster is ready.
func startSandbox(here layout, nodes []string) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer listener.Close()
	socket, err := listener.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	progress, report, err := os.Pipe()
	if err != nil {
		return err
	}
	log, err := os.Create(here.log("supervisor"))
	if err != nil {
		return err
	}
	init := exec.Command(here.bin("cluster"), "sandbox-init")
	init.Env = append(os.Environ(), "NODES="+strings.Join(nodes, ","))
	init.Stdout, init.Stderr = log, log
	init.ExtraFiles = []*os.File{report, socket}
	init.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET,
	}
	if err := init.Start(); err != nil {
		return fmt.Errorf("failed to make namespaces (root is needed): %w", err)
	}
	report.Close()
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, unix.SIGINT, unix.SIGTERM)
	go func() {
		<-interrupted
		init.Process.Kill()
	}()
	for lines := bufio.NewScanner(progress); lines.Scan(); {
		if lines.Text() == "ready" {
			return init.Process.Release()
		}
		fmt.Println(lines.Text())
	}
	init.Wait()
	reason, err := os.ReadFile(log.Name())
	return errors.Join(fmt.Errorf("the cluster did not come up; logs are in %s\n%s", filepath.Dir(log.Name()), reason), err)
}

// sandboxInit is process 1 of the sandbox: it makes the mounts, starts the supervisor and reaps orphans. When it exits, the kernel kills everything in the sandbox.
func sandboxInit(here layout) error {
	if err := takeLock(here); err != nil {
		return err
	}
	if err := mountSandbox(here); err != nil {
		return err
	}
	pipe, socket := os.NewFile(progressFd, "progress"), os.NewFile(listenerFd, "listener")
	nothing, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	supervisor, err := os.StartProcess(here.bin("cluster"), []string{"cluster", "supervise"},
		&os.ProcAttr{Files: []*os.File{nothing, os.Stdout, os.Stderr, pipe, socket}})
	if err != nil {
		return err
	}
	pipe.Close()
	socket.Close()
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		} else if err != nil {
			return err
		}
		if pid == supervisor.Pid {
			return fmt.Errorf("the supervisor exited with status %d", status.ExitStatus())
		}
	}
}

// takeLock takes the lock that the other commands use to find the sandbox's process. The kernel releases it when the process exits.
func takeLock(here layout) error {
	lock, err := unix.Open(here.lock(), unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	return unix.FcntlFlock(uintptr(lock), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
}

// sandboxPid is the host's PID of the sandbox's process 1, and 0 if no sandbox is running.
func sandboxPid(here layout) (int, error) {
	lock, err := os.OpenFile(here.lock(), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	defer lock.Close()
	query := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(lock.Fd(), unix.F_GETLK, &query); err != nil {
		return 0, err
	}
	if query.Type == unix.F_UNLCK {
		return 0, nil
	}
	return int(query.Pid), nil
}

// down stops the sandbox, whatever state it is in, and removes what it leaves on this machine. Logs stay.
func down(here layout, _ []string) error {
	pid, err := sandboxPid(here)
	if err != nil {
		return err
	}
	if pid != 0 {
		if err := killAndWait(pid); err != nil {
			return err
		}
	}
	return removeLeftovers(here)
}

// killAndWait kills process 1 of the sandbox. The kernel kills all others in it before that process exits.
func killAndWait(pid int) error {
	handle, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	} else if err != nil {
		return err
	}
	defer unix.Close(handle)
	if err := unix.PidfdSendSignal(handle, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(handle), Events: unix.POLLIN}}, 20_000)
		if errors.Is(err, unix.EINTR) {
			continue
		} else if err != nil {
			return err
		}
		if n == 0 {
			return fmt.Errorf("process %d was killed but did not exit within 20 s", pid)
		}
		return nil
	}
}

// removeLeftovers removes what a stopped or crashed sandbox left on the host.
func removeLeftovers(here layout) error {
	if err := removeCgroup(here.cgroupName()); err != nil {
		return err
	}
	if err := returnDirectories(here); err != nil {
		return err
	}
	for _, path := range []string{here.run(""), here.kubeconfig(), here.lock()} {
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	return nil
}

func status(here layout) error {
	pid, err := sandboxPid(here)
	if err != nil {
		return err
	}
	if pid == 0 {
		return errors.New("no cluster is running; `cluster up` starts one")
	}
	fmt.Printf("process %d, KUBECONFIG=%s\n", pid, here.kubeconfig())
	return replaceBy(append(here.kubectl(), "get", "nodes", "-o", "wide"))
}

// inSandbox is the prefix of a command line that runs the rest in the sandbox's namespaces.
func inSandbox(here layout) ([]string, error) {
	pid, err := sandboxPid(here)
	if err != nil {
		return nil, err
	}
	if pid == 0 {
		return nil, errors.New("no cluster is running; `cluster up` starts one")
	}
	return []string{"nsenter", "--target", strconv.Itoa(pid), "--mount", "--net", "--pid",
		"env", "KUBECONFIG=" + filepath.Join(here.run("pki"), "admin.kubeconfig")}, nil
}

// replaceBy replaces this process by a command (exec).
func replaceBy(command []string) error {
	path, err := exec.LookPath(command[0])
	if err != nil {
		return err
	}
	return unix.Exec(path, command, os.Environ())
}
