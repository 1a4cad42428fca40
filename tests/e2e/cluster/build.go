package main

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

const kubernetesVersion = "v1.37.2"

const kubernetesPrograms = "kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubectl"

// cgroupV1Kubelet is the kubelet of node v1: from 1.35 on they refuse cgroup v1 by default.
const cgroupV1Kubelet = "1.34"

// source is the directory of this program's sources, set when it is built: go build needs it for the module's versions.
var source string

// debianPackages are the Debian packages that the cluster needs, each with one of its files.
var debianPackages = map[string]string{
	"containerd":                  "/usr/bin/containerd",
	"runc":                        "/usr/sbin/runc",
	"containernetworking-plugins": "/usr/lib/cni/bridge",
	"iproute2":                    "/usr/sbin/ip",
	"nftables":                    "/usr/sbin/nft",
	"busybox-static":              "/bin/busybox",
	"util-linux":                  "/usr/bin/nsenter",
}

// guestPackages are those that building and running the guest needs in addition.
var guestPackages = map[string]string{
	"qemu-system-x86": "/usr/bin/qemu-system-x86_64",
	"mmdebstrap":      "/usr/bin/mmdebstrap",
	"e2fsprogs":       "/usr/sbin/mke2fs",
	"dropbear-bin":    "/usr/bin/dropbearkey",
	"openssh-client":  "/usr/bin/ssh-keygen",
	"kmod":            "/usr/sbin/depmod",
	"cpio":            "/usr/bin/cpio",
}

// build builds what is missing. Each part is rebuilt when its inputs change.
func build(here layout, nodes []string) error {
	if err := installPackages(debianPackages); err != nil {
		return err
	}
	if err := buildPrograms(here); err != nil {
		return err
	}
	for _, node := range nodes {
		if err := buildKubelet(here, node); err != nil {
			return err
		}
	}
	images, err := fingerprint(here.bin("podtool"), "/bin/busybox")
	if err != nil {
		return err
	}
	if err := once(here, "images", images, buildPodImages); err != nil {
		return err
	}
	if !slices.Contains(nodes, "v2") {
		return nil
	}
	if err := installPackages(guestPackages); err != nil {
		return err
	}
	debian, err := fingerprintFiles("files/debian")
	if err != nil {
		return err
	}
	if err := once(here, "debian", debian, buildDebian); err != nil {
		return err
	}
	guest, err := guestInputs(here)
	if err != nil {
		return err
	}
	return once(here, "guest", images+debian+guest, buildGuest)
}

// buildPrograms builds Kubernetes, Helm and podtool from Go modules, takes promtool from Debian, and builds the extras that EXTRAS names:
// kwok, checkers (kubeconform, kube-score and actionlint).
func buildPrograms(here layout) error {
	extras := strings.Split(os.Getenv("EXTRAS"), ",")
	sources, err := filepath.Glob(filepath.Join(source, "podtool", "*.go"))
	if err != nil {
		return err
	}
	for _, program := range []struct {
		name    string
		inputs  []string
		outputs string
		step    func(layout) error
		extra   bool
	}{
		{"kubernetes", []string{filepath.Join(source, "go.sum")}, kubernetesPrograms + " etcd", buildKubernetes, false},
		{"helm", []string{filepath.Join(source, "helm", "go.sum")}, "helm", buildHelm, false},
		{"podtool", sources, "podtool", buildPodtool, false},
		{"kwok", []string{filepath.Join(source, "kwok", "go.sum")}, "kwok", buildKwok, true},
		{"checkers", []string{filepath.Join(source, "checkers", "go.sum")}, "kubeconform kube-score actionlint", buildCheckers, true},
		{"promtool", nil, "promtool", unpackPromtool, false},
	} {
		if program.extra && !slices.Contains(extras, program.name) {
			continue
		}
		inputs, err := fingerprint(program.inputs...)
		if err != nil {
			return err
		}
		inputs = kubernetesVersion + " " + runtime.Version() + " " + inputs
		cached := cachedStep(program.name, inputs, strings.Fields(program.outputs), program.step)
		if err := once(here, program.name, inputs, cached); err != nil {
			return err
		}
	}
	return nil
}

// cachedStep builds programs at most once per machine: checkouts share them through the user's cache directory.
func cachedStep(name, inputs string, outputs []string, step func(layout) error) func(layout) error {
	return func(here layout) error {
		cache, err := os.UserCacheDir()
		if err != nil {
			return step(here)
		}
		directory := filepath.Join(cache, "plimsoll", "e2e", fmt.Sprintf("%s-%.8x", name, sha256.Sum256([]byte(inputs))))
		if copyFiles(directory, here.bin(""), outputs) == nil {
			return nil
		}
		if err := step(here); err != nil {
			return err
		}
		// Complete or absent: another checkout may read it at any time.
		partial := fmt.Sprintf("%s.%d", directory, os.Getpid())
		defer os.RemoveAll(partial)
		if err := copyFiles(here.bin(""), partial, outputs); err != nil {
			return err
		}
		if err := os.RemoveAll(directory); err != nil {
			return err
		}
		return os.Rename(partial, directory)
	}
}

// copyFiles copies programs from one directory to another, which it creates.
func copyFiles(from, to string, names []string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for _, name := range names {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(to, name)), 0o755); err != nil {
			return err
		}
		if err := copyFile(filepath.Join(from, name), filepath.Join(to, name)); err != nil {
			return err
		}
	}
	return nil
}

// once runs a step unless its stamp says that it was done with the same inputs.
func once(here layout, name, inputs string, step func(layout) error) error {
	stamp := filepath.Join(here.dir, "built", name)
	if done, err := os.ReadFile(stamp); err == nil && string(done) == inputs {
		return nil
	}
	start := time.Now()
	fmt.Printf("building %s ...\n", name)
	if err := step(here); err != nil {
		return err
	}
	fmt.Printf("%5.1f s  %s built\n", time.Since(start).Seconds(), name)
	if err := os.MkdirAll(filepath.Dir(stamp), 0o755); err != nil {
		return err
	}
	return os.WriteFile(stamp, []byte(inputs), 0o644)
}

// buildKubernetes builds Kubernetes and etcd from Go modules. The API server needs its version at build time.
func buildKubernetes(here layout) error {
	flags := versionFlags(kubernetesVersion)
	programs := []string{}
	for _, name := range strings.Fields(kubernetesPrograms) {
		programs = append(programs, "k8s.io/kubernetes/cmd/"+name)
	}
	if err := goBuild(source, flags, here.bin("")+"/", programs...); err != nil {
		return err
	}
	return goBuild(source, flags, here.bin("etcd"), "go.etcd.io/etcd/server/v3")
}

// versionFlags are the linker's flags with which Kubernetes's programs know their version.
func versionFlags(version string) string {
	variable := "k8s.io/component-base/version.git"
	numbers := strings.Split(strings.TrimPrefix(version, "v"), ".")
	return fmt.Sprintf("-s -w -X %sVersion=%s -X %sMajor=%s -X %sMinor=%s", variable, version, variable, numbers[0], variable, numbers[1])
}

// buildKubelet builds the kubelet of a node: bin/NODE/kubelet, since tests find its process by its name.
func buildKubelet(here layout, node string) error {
	directory, version, err := kubeletModule(node)
	if err != nil {
		return err
	}
	inputs, err := fingerprint(filepath.Join(directory, "go.sum"))
	if err != nil {
		return err
	}
	inputs = version + " " + runtime.Version() + " " + inputs
	output := filepath.Join(node, "kubelet")
	step := func(here layout) error {
		if err := os.MkdirAll(here.bin(node), 0o755); err != nil {
			return err
		}
		return goBuild(directory, versionFlags(version), here.bin(output), "k8s.io/kubernetes/cmd/kubelet")
	}
	return once(here, "kubelet-"+node, inputs, cachedStep("kubelet-"+node, inputs, []string{output}, step))
}

// kubeletModule is the Go module that a node's kubelet is built from, and its version. KUBELET chooses another minor version for v2,
// of those in tests/e2e/versions.
func kubeletModule(node string) (directory, version string, err error) {
	minor := os.Getenv("KUBELET")
	if node == "v1" {
		minor = cgroupV1Kubelet
	}
	if minor == "" || strings.HasPrefix(kubernetesVersion, "v"+minor+".") {
		return source, kubernetesVersion, nil
	}
	directory = filepath.Join(source, "..", "versions", minor)
	text, err := os.ReadFile(filepath.Join(directory, "go.mod"))
	if err != nil {
		return "", "", fmt.Errorf("no kubelet %s for node %s: %w", minor, node, err)
	}
	for _, line := range strings.Split(string(text), "\n") {
		if fields := strings.Fields(line); len(fields) >= 2 && fields[0] == "k8s.io/kubernetes" {
			return directory, fields[1], nil
		}
	}
	return "", "", fmt.Errorf("%s/go.mod requires no k8s.io/kubernetes", directory)
}

// buildHelm builds Helm, in its own module: it needs other versions of Kubernetes's libraries.
// Without the flags `helm template` assumes Kubernetes 1.20.
func buildHelm(here layout) error {
	numbers := strings.Split(strings.TrimPrefix(kubernetesVersion, "v"), ".")
	flags := "-s -w"
	for _, pkg := range []string{"chartutil", "lint/rules"} {
		flags += fmt.Sprintf(" -X helm.sh/helm/v3/pkg/%[1]s.k8sVersionMajor=%[2]s -X helm.sh/helm/v3/pkg/%[1]s.k8sVersionMinor=%[3]s",
			pkg, numbers[0], numbers[1])
	}
	return goBuild(filepath.Join(source, "helm"), flags, here.bin("helm"), "helm.sh/helm/v3/cmd/helm")
}

// buildCheckers builds the checkers of manifests and workflows, in their own module.
func buildCheckers(here layout) error {
	return goBuild(filepath.Join(source, "checkers"), "-s -w", here.bin("")+"/",
		"github.com/yannh/kubeconform/cmd/kubeconform", "github.com/zegl/kube-score/cmd/kube-score", "github.com/rhysd/actionlint/cmd/actionlint")
}

// unpackPromtool extracts promtool from Debian's Prometheus package without installing it, which would start a server. Building it from its Go
// module takes minutes and pulls in all cloud clients.
func unpackPromtool(here layout) error {
	const script = `apt-get update -qq && cd "$1" && apt-get download -qq -o APT::Sandbox::User=root prometheus >/dev/null &&
		dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x --to-stdout ./usr/bin/promtool >"$2" && chmod 755 "$2"`
	directory, err := os.MkdirTemp("", "promtool")
	if err != nil {
		return err
	}
	defer os.RemoveAll(directory)
	return runQuietly("sh", "-c", script, "sh", directory, here.bin("promtool"))
}

// buildPodtool builds the program of the tests' pods.
func buildPodtool(here layout) error {
	return goBuild(source, "-s -w", here.bin("podtool"), "./podtool")
}

func goBuild(directory, flags, output string, packages ...string) error {
	arguments := append([]string{"-n", "15", "go", "build", "-C", directory, "-trimpath", "-ldflags", flags, "-o", output}, packages...)
	command := exec.Command("nice", arguments...)
	command.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-mod=readonly -buildvcs=false")
	command.Stdout, command.Stderr = os.Stdout, os.Stderr
	if err := command.Run(); err != nil {
		return fmt.Errorf("failed to build %s: %w", strings.Join(packages, " "), err)
	}
	return nil
}

// installPackages installs what this Debian machine lacks.
func installPackages(packages map[string]string) error {
	var missing []string
	for name, file := range packages {
		if _, err := os.Stat(file); err != nil {
			missing = append(missing, name)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	slices.Sort(missing)
	fmt.Printf("installing %s\n", strings.Join(missing, " "))
	if err := runQuietly("apt-get", "update", "-qq"); err != nil {
		return err
	}
	return runQuietly(append([]string{"env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "DPkg::Lock::Timeout=120",
		"install", "-y", "-qq", "--no-install-recommends"}, missing...)...)
}

// fingerprint is a hash of the content of files.
func fingerprint(paths ...string) (string, error) {
	sum := sha256.New()
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		sum.Write(content)
	}
	return fmt.Sprintf("%x", sum.Sum(nil)), nil
}

// fingerprintFiles hashes the embedded files of a directory.
func fingerprintFiles(directory string) (string, error) {
	sum := sha256.New()
	err := fs.WalkDir(files, directory, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := files.ReadFile(path)
		fmt.Fprintf(sum, "%s %d\n", path, len(content))
		sum.Write(content)
		return err
	})
	return fmt.Sprintf("%x", sum.Sum(nil)), err
}
