package main

import (
	"bufio"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// hierarchies are the mount points of every cgroup hierarchy, v1 and v2.
func hierarchies() ([]string, error) {
	mounts, err := os.Open("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	defer mounts.Close()
	var points []string
	for lines := bufio.NewScanner(mounts); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) > 2 && (fields[2] == "cgroup" || fields[2] == "cgroup2") && !slices.Contains(points, fields[1]) {
			points = append(points, fields[1])
		}
	}
	return points, nil
}

// makeCgroup creates the kubelet's root cgroup in every v1 hierarchy. A new cpuset is empty until it is filled.
func makeCgroup(name string) error {
	points, err := hierarchies()
	if err != nil {
		return err
	}
	for _, point := range points {
		directory := filepath.Join(point, name)
		if _, err := os.Stat(filepath.Join(point, "cgroup.controllers")); err == nil {
			continue
		}
		if err := os.MkdirAll(directory, 0o755); err != nil {
			return err
		}
		// High weights, so that builds on this machine do not starve the pods.
		err := os.WriteFile(filepath.Join(directory, "cpu.shares"), []byte("16384"), 0o644)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
			return err
		}
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			value, err := os.ReadFile(filepath.Join(point, file))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			} else if err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(directory, file), value, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// removeCgroup removes the tree, bottom up, from every hierarchy. Cgroups of killed processes stay busy for a moment.
func removeCgroup(name string) error {
	points, err := hierarchies()
	if err != nil {
		return err
	}
	for _, point := range points {
		deadline := time.Now().Add(10 * time.Second)
		for {
			err := removeTree(filepath.Join(point, name))
			if err == nil {
				break
			}
			if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
				return err
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	return nil
}

// removeTree removes a cgroup and those below it. The kernel removes the files of a cgroup with its directory.
func removeTree(directory string) error {
	entries, err := os.ReadDir(directory)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.IsDir() {
			if err := removeTree(filepath.Join(directory, entry.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(directory); err != nil && !errors.Is(err, unix.ENOENT) {
		return &fs.PathError{Op: "rmdir", Path: directory, Err: err}
	}
	return nil
}
