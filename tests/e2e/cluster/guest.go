package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// guestSocket is where ssh shares one connection to the guest: in the sandbox's own /run.
const guestSocket = "/run/guest-ssh"

// buildDebian fetches the guest's Debian packages.
func buildDebian(here layout) error {
	if err := writeEmbedded("files/debian", here.debian()); err != nil {
		return err
	}
	return runQuietly("nice", "-n", "15", "bash", filepath.Join(here.debian(), "build.sh"))
}

// buildGuest makes the guest's initramfs and root file system.
func buildGuest(here layout) error {
	directory := here.guest("")
	if err := writeEmbedded("files/guest", directory); err != nil {
		return err
	}
	for _, file := range guestConfig(here) {
		if err := renderTo(file.path, file.name, file.values); err != nil {
			return err
		}
	}
	command := []string{"nice", "-n", "15", "bash", filepath.Join(directory, "build.sh"), here.debian(), here.bin("v2/kubelet")}
	for _, tag := range podImages {
		command = append(command, here.image(tag))
	}
	return runQuietly(command...)
}

// configFile is a template and where it is rendered to.
type configFile struct {
	path, name string
	values     any
}

// guestConfig are the guest's configuration files, and the one with which its images are imported.
func guestConfig(here layout) []configFile {
	overlay := func(path string) string { return here.guest(filepath.Join("overlay", path)) }
	return []configFile{
		{overlay("etc/cni/net.d/10-pods.conflist"), "cni.conflist", guestNetwork.cni("v2")},
		{overlay("etc/systemd/system/kubelet.service"), "kubelet.service",
			map[string]any{"Flags": guestNetwork.kubeletFlags("v2", "/etc/node/kubelet.yaml", "/etc/node/v2.kubeconfig")}},
		{here.guest("import.toml"), "containerd.toml", containerdConfig(here.guest("root/var/lib/containerd"), here.guest("cni"), true)},
	}
}

// guestInputs are the guest's inputs besides Debian and the pod images.
func guestInputs(here layout) (string, error) {
	inputs, err := fingerprintFiles("files/guest")
	if err != nil {
		return "", err
	}
	kubelet, err := fingerprint(here.bin("v2/kubelet"))
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	for _, file := range guestConfig(here) {
		text, err := render(file.name, file.values)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(sum, "%s %d\n%s", file.path, len(text), text)
	}
	return fmt.Sprintf("%s %s %x", inputs, kubelet, sum.Sum(nil)), nil
}

// writeEmbedded replaces a directory by the files of an embedded one.
func writeEmbedded(source, directory string) error {
	embedded, err := fs.Sub(files, source)
	if err != nil {
		return err
	}
	if err := os.RemoveAll(directory); err != nil {
		return err
	}
	return os.CopyFS(directory, embedded)
}

// startGuest boots the guest of node v2. It starts from the same disk each time; what differs, its identity, comes on a second disk.
// The guest's writes survive its reboots, but not its process.
func (s *supervisor) startGuest() error {
	disk, err := s.makeIdentity()
	if err != nil {
		return err
	}
	// A high priority: a starved node cannot evaluate rules in time.
	s.start("guest", []string{"nice", "-n", "-10", "qemu-system-x86_64", "-M", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max",
		"-smp", "2", "-m", "2048", "-nodefaults", "-display", "none",
		"-serial", "stdio",
		"-kernel", filepath.Join(s.here.debian(), "vmlinuz"), "-initrd", s.here.guest("initrd.gz"),
		"-append", "console=ttyS0 quiet panic=-1 mitigations=off apparmor=0 selinux=0 audit=0 tsc=reliable clocksource=tsc",
		"-drive", "file=" + s.here.guest("root.ext4") + ",format=raw,if=virtio,snapshot=on",
		"-drive", "file=" + disk + ",format=raw,if=virtio,readonly=on",
		"-netdev", "tap,id=nodes,ifname=guest,script=no,downscript=no",
		"-device", "virtio-net-pci,netdev=nodes,romfile=,mac=52:54:00:89:00:02",
		"-device", "virtio-rng-pci"},
		"TMPDIR="+s.here.run(""))
	return nil
}

// makeIdentity writes the disk with the guest's keys and the settings that depend on the cgroup driver, and the key pair for ssh.
func (s *supervisor) makeIdentity() (string, error) {
	directory, disk := s.here.run("identity"), s.here.run("identity.ext4")
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return "", err
	}
	for _, name := range []string{"ca.crt", "v2.crt", "v2.key", "v2.kubeconfig"} {
		if err := copyFile(filepath.Join(s.here.run("pki"), name), filepath.Join(directory, name)); err != nil {
			return "", err
		}
	}
	systemd := s.here.cgroupDriver("v2") == "systemd"
	for _, file := range []configFile{
		{filepath.Join(directory, "containerd.toml"), "containerd.toml", containerdConfig("/var/lib/containerd", "/etc/cni/net.d", systemd)},
		{filepath.Join(directory, "kubelet.yaml"), "kubelet.yaml",
			map[string]any{"Node": "v2", "Pki": "/etc/node", "CgroupDriver": s.here.cgroupDriver("v2"), "CgroupRoot": "/"}},
	} {
		if err := renderTo(file.path, file.name, file.values); err != nil {
			return "", err
		}
	}
	key := s.here.run("guest-key")
	if err := runQuietly("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key); err != nil {
		return "", err
	}
	if err := copyFile(key+".pub", filepath.Join(directory, "authorized_keys")); err != nil {
		return "", err
	}
	return disk, runQuietly("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", directory, disk, "4M")
}

func copyFile(from, to string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	info, err := source.Stat()
	if err != nil {
		return err
	}
	target, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, info.Mode().Perm())
	if err != nil {
		return err
	}
	_, err = io.Copy(target, source)
	return errors.Join(err, target.Close())
}

// guestShell is the command line of ssh into the guest, over the shared connection where there is one.
func guestShell(here layout, options ...string) []string {
	command := []string{"ssh", "-F", "none", "-i", here.run("guest-key"), "-S", guestSocket, "-o", "LogLevel=ERROR",
		"-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"}
	return append(append(command, options...), "root@"+guestNetwork[0].guest)
}

// openGuestShell opens a shared ssh connection to the guest, so that commands start quickly.
func (s *supervisor) openGuestShell() error {
	s.start("guest-ssh", guestShell(s.here, "-M", "-N", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=12"))
	return s.wait("guest-ssh", 20*time.Second, func() error {
		command := guestShell(s.here, "-O", "check")
		out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
		if err != nil {
			return errors.New(strings.TrimSpace(string(out)))
		}
		return nil
	})
}
