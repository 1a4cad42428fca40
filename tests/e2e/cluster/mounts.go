package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// borrowed are mount points on this machine for the sandbox's directories; `down` removes those that did not exist.
var borrowed = []string{"/var/lib/kubelet", "/var/lib/containerd", "/var/lib/cni", "/var/lib/plimsoll", "/var/log/pods", "/var/log/containers"}

// kernelSettings are machine-wide settings that a kubelet changes. In the sandbox they appear as already set, so that the kubelet leaves the
// machine's alone.
var kernelSettings = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

// coverKernelSettings mounts a file over each of kernelSettings.
func coverKernelSettings() error {
	for name, value := range kernelSettings {
		file := filepath.Join("/run/kernel-settings", name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte(value+"\n"), 0o444); err != nil {
			return err
		}
		if err := unix.Mount(file, filepath.Join("/proc/sys", name), "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("failed to cover /proc/sys/%s: %w", name, err)
		}
	}
	return nil
}

// mountSandbox gives the sandbox its own /proc, /run and node directories, which are not visible outside.
func mountSandbox(here layout) error {
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("failed to make the mounts private: %w", err)
	}
	for target, kind := range map[string]string{"/proc": "proc", "/run": "tmpfs"} {
		if err := unix.Mount(kind, target, kind, 0, ""); err != nil {
			return fmt.Errorf("failed to mount %s: %w", target, err)
		}
	}
	if err := coverKernelSettings(); err != nil {
		return err
	}
	for _, directory := range borrowed {
		source := here.run(strings.TrimPrefix(directory, "/"))
		if directory == "/var/log/pods" {
			source = filepath.Join(here.dir, "logs", "pods")
		}
		if err := os.MkdirAll(source, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(source, directory, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("failed to mount %s: %w", directory, err)
		}
	}
	return nil
}

// borrowDirectories creates missing mount points, after recording them.
func borrowDirectories(here layout) error {
	var missing []string
	for _, directory := range borrowed {
		if _, err := os.Stat(directory); errors.Is(err, fs.ErrNotExist) {
			missing = append(missing, directory)
		}
	}
	if err := os.MkdirAll(here.run(""), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(here.run("borrowed"), []byte(strings.Join(missing, "\n")), 0o644); err != nil {
		return err
	}
	for _, directory := range missing {
		if err := os.MkdirAll(directory, 0o755); err != nil {
			return err
		}
	}
	return os.MkdirAll(filepath.Join(here.dir, "logs"), 0o755)
}

// returnDirectories removes the mount points that borrowDirectories created, if they are empty.
func returnDirectories(here layout) error {
	recorded, err := os.ReadFile(here.run("borrowed"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, directory := range strings.Fields(string(recorded)) {
		if err := unix.Rmdir(directory); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EBUSY) {
			return &fs.PathError{Op: "rmdir", Path: directory, Err: err}
		}
	}
	return nil
}
