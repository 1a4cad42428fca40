package main

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
)

// layout is the directory with all of the cluster's files (target/e2e), the parent of this binary's bin/.
type layout struct{ dir string }

func findLayout() (layout, error) {
	exe, err := os.Executable()
	if err != nil {
		return layout{}, err
	}
	return layout{filepath.Dir(filepath.Dir(exe))}, nil
}

func (l layout) bin(name string) string  { return filepath.Join(l.dir, "bin", name) }
func (l layout) log(name string) string  { return filepath.Join(l.dir, "logs", name+".log") }
func (l layout) image(tag string) string { return filepath.Join(l.dir, "images", tag+".tar") }
func (l layout) kubeconfig() string      { return filepath.Join(l.dir, "kubeconfig") }
func (l layout) lock() string            { return filepath.Join(l.dir, "lock") }

// kubectl is the start of a command line that talks to the cluster.
func (l layout) kubectl() []string {
	return []string{l.bin("kubectl"), "--kubeconfig", l.kubeconfig(), "--cache-dir", l.run("kubectl")}
}

// helm is the same for helm, or for what PLIMSOLL_E2E_HELM names: helm4.
func (l layout) helm() []string {
	return []string{l.bin(cmp.Or(os.Getenv("PLIMSOLL_E2E_HELM"), "helm")), "--kubeconfig", l.kubeconfig(), "--repository-cache", l.run("helm"), "--registry-config", l.run("helm/registry.json")}
}

// debian is the directory of the guest's Debian files, including the kernel.
func (l layout) debian() string { return filepath.Join(l.dir, "debian") }

// guest is the directory of the guest's initramfs and root disk, which stay between runs.
func (l layout) guest(name string) string { return filepath.Join(l.dir, "guest", name) }

// run is the directory of one run: keys, databases, container stores. It is deleted with the cluster.
func (l layout) run(name string) string { return filepath.Join(l.dir, "run", name) }

// cgroupName is the one cgroup, in every hierarchy of this machine, below which the v1 node's pods live.
// It is the cluster's own: two checkouts can each run a cluster.
func (l layout) cgroupName() string {
	return fmt.Sprintf("plimsoll-e2e-%x", sha256.Sum256([]byte(l.dir)))[:21]
}
