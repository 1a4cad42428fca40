package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

// supervisor starts the components and waits for them. Before the cluster is ready the exit of one is fatal; later it is restarted.
type supervisor struct {
	here    layout
	nodes   []string
	network network
	failed  chan error
	ready   chan struct{}
	report  *os.File
}

// stage runs one step of the start and reports its time.
func (s *supervisor) stage(name string, step func() error) error {
	start := time.Now()
	if err := step(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	fmt.Fprintf(s.report, "%5.1f s  %s\n", time.Since(start).Seconds(), name)
	return nil
}

// start runs a component, its output in logs/NAME.log.
func (s *supervisor) start(name string, command []string, env ...string) {
	os.Remove(s.here.log(name))
	go func() {
		for {
			err := runLogged(s.here.log(name), command, env)
			select {
			case <-s.ready:
				fmt.Printf("%s %s exited (%v), restarting it\n", time.Now().Format(time.TimeOnly), name, err)
				time.Sleep(time.Second)
			default:
				s.failed <- fmt.Errorf("%s exited: %v\n%s", name, err, s.tail(name))
				return
			}
		}
	}()
}

func runLogged(path string, command, env []string) error {
	log, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	process := exec.Command(command[0], command[1:]...)
	process.Env = append(os.Environ(), env...)
	process.Stdout, process.Stderr = log, log
	return process.Run()
}

// wait polls a condition until it is met. It fails with the end of the component's log at the deadline, and at once if any component exits.
func (s *supervisor) wait(component string, limit time.Duration, condition func() error) error {
	deadline := time.After(limit)
	for {
		err := condition()
		if err == nil {
			return nil
		}
		select {
		case failure := <-s.failed:
			return failure
		case <-deadline:
			return fmt.Errorf("%w\n%s", errors.Join(fmt.Errorf("%s was not ready after %s", component, limit), err), s.tail(component))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// tail is the end of a component's log.
func (s *supervisor) tail(component string) string {
	text, err := os.ReadFile(s.here.log(component))
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return fmt.Sprintf("-- the end of %s:\n%s", s.here.log(component), strings.Join(lines[max(0, len(lines)-25):], "\n"))
}

// runQuietly runs a command and returns its output as part of the error if it fails.
func runQuietly(command ...string) error {
	if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("failed to run %s: %w\n%s", strings.Join(command, " "), err, out)
	}
	return nil
}
