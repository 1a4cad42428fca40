package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// supervise runs the cluster inside the sandbox: it starts it in stages, reports each to `up`, and keeps running.
func supervise(here layout) error {
	nodes, err := chosenNodes()
	if err != nil {
		return err
	}
	unix.CloseOnExec(progressFd)
	unix.CloseOnExec(listenerFd)
	network, err := chosenNetwork(nodes)
	if err != nil {
		return err
	}
	s := &supervisor{
		here: here, nodes: nodes, network: network,
		failed: make(chan error, 16),
		ready:  make(chan struct{}),
		report: os.NewFile(progressFd, "progress"),
	}
	if err := s.bringUp(); err != nil {
		return err
	}
	close(s.ready)
	fmt.Fprintln(s.report, "ready")
	s.report.Close()
	select {}
}

// bringUp starts the cluster in stages, and returns when all nodes are Ready.
func (s *supervisor) bringUp() error {
	socket := os.NewFile(listenerFd, "listener")
	listener, err := net.FileListener(socket)
	if err != nil {
		return err
	}
	socket.Close()
	go relay(listener, s.network.controlPlane())

	if err := os.WriteFile(s.here.run("network"), []byte(s.network.String()), 0o644); err != nil {
		return err
	}
	driver, err := chosenDriver()
	if err != nil {
		return err
	}
	if err := os.WriteFile(s.here.run("cgroup-driver"), []byte(driver), 0o644); err != nil {
		return err
	}
	err = s.stage("network", func() error { return s.network.make(s.nodes) })
	if err != nil {
		return err
	}
	err = s.stage("certificates", func() error { return makePki(s.here, s.nodes, s.network, listener.Addr().(*net.TCPAddr).Port) })
	if err != nil {
		return err
	}
	if slices.Contains(s.nodes, "v2") {
		if err := s.stage("guest started", s.startGuest); err != nil {
			return err
		}
	}
	if err := s.stage("API server", s.startControlPlane); err != nil {
		return err
	}
	if slices.Contains(s.nodes, "v1") {
		if err := s.stage("containerd and kubelet of v1 started", s.startNode); err != nil {
			return err
		}
	}
	for _, node := range s.nodes {
		if err := s.stage("node "+node+" Ready", func() error { return s.waitNode(node) }); err != nil {
			return err
		}
	}
	if slices.Contains(s.nodes, "v2") {
		if err := s.stage("shell into v2", s.openGuestShell); err != nil {
			return err
		}
	}
	return s.stage("default service account", func() error {
		return s.wait("kube-controller-manager", 20*time.Second, func() error {
			return s.get("/api/v1/namespaces/default/serviceaccounts/default", nil)
		})
	})
}

// startControlPlane starts etcd, the API server and its clients, and waits for the API server.
func (s *supervisor) startControlPlane() error {
	pki := func(name string) string { return filepath.Join(s.here.run("pki"), name) }
	s.start("etcd", []string{s.here.bin("etcd"), "--data-dir", s.here.run("etcd"), "--unsafe-no-fsync", "--log-level", "warn",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380"})
	audit := s.here.run("audit.yaml")
	if err := renderTo(audit, "audit.yaml", nil); err != nil {
		return err
	}
	if err := os.RemoveAll(s.here.log("audit")); err != nil { // of an earlier cluster
		return err
	}
	s.start("kube-apiserver", []string{s.here.bin("kube-apiserver"),
		"--audit-policy-file=" + audit, "--audit-log-path=" + s.here.log("audit"), "--audit-log-maxsize=1000",
		"--etcd-servers=http://127.0.0.1:2379",
		"--advertise-address=" + s.network[0].controlPlane, "--secure-port=6443",
		"--service-cluster-ip-range=" + s.network.String(),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged",
		"--tls-cert-file=" + pki("apiserver.crt"), "--tls-private-key-file=" + pki("apiserver.key"), "--client-ca-file=" + pki("ca.crt"),
		"--kubelet-certificate-authority=" + pki("ca.crt"), "--kubelet-preferred-address-types=InternalIP",
		"--kubelet-client-certificate=" + pki("kubelet-client.crt"), "--kubelet-client-key=" + pki("kubelet-client.key"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + pki("service-account.key"),
		"--service-account-signing-key-file=" + pki("service-account.key"),
		"--requestheader-client-ca-file=" + pki("front-proxy-ca.crt"), "--requestheader-allowed-names=front-proxy-client",
		"--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file=" + pki("front-proxy.crt"), "--proxy-client-key-file=" + pki("front-proxy.key"),
		"--enable-aggregator-routing"})
	if err := s.wait("kube-apiserver", 60*time.Second, func() error { return s.get("/readyz", nil) }); err != nil {
		return err
	}
	s.start("kube-controller-manager", []string{s.here.bin("kube-controller-manager"), "--leader-elect=false",
		"--kubeconfig=" + pki("controller-manager.kubeconfig"), "--use-service-account-credentials",
		"--flex-volume-plugin-dir=" + s.here.run("volume-plugins"),
		"--service-account-private-key-file=" + pki("service-account.key"), "--root-ca-file=" + pki("ca.crt"),
		"--cluster-signing-cert-file=" + pki("ca.crt"), "--cluster-signing-key-file=" + pki("ca.key")})
	s.start("kube-scheduler", []string{s.here.bin("kube-scheduler"), "--leader-elect=false", "--kubeconfig=" + pki("scheduler.kubeconfig"),
		"--authentication-kubeconfig=" + pki("scheduler.kubeconfig"), "--authorization-kubeconfig=" + pki("scheduler.kubeconfig")})
	config := s.here.run("kube-proxy.yaml")
	if err := renderTo(config, "kube-proxy.yaml", map[string]any{"Pki": s.here.run("pki"), "PodRange": s.network.joined(func(f family) string { return f.podRange }), "Node": s.nodes[0]}); err != nil {
		return err
	}
	s.start("kube-proxy", []string{s.here.bin("kube-proxy"), "--config", config})
	return nil
}

// startNode starts containerd and the kubelet of node v1, on this machine's cgroups.
func (s *supervisor) startNode() error {
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		return errors.New("this machine has cgroup v2 only, which node v1 cannot use; use NODES=v2")
	}
	cgroup := s.here.cgroupName()
	if err := makeCgroup(cgroup); err != nil {
		return err
	}
	cni := s.here.run("cni")
	if err := renderTo(filepath.Join(cni, "10-pods.conflist"), "cni.conflist", s.network.cni("v1")); err != nil {
		return err
	}
	config := s.here.run("containerd.toml")
	if err := renderTo(config, "containerd.toml", containerdConfig("/var/lib/containerd", cni, false)); err != nil {
		return err
	}
	s.start("containerd", []string{"containerd", "--config", config})
	for _, tag := range podImages {
		err := s.wait("containerd", 20*time.Second, func() error { return importImage("/run/containerd", s.here.image(tag)) })
		if err != nil {
			return err
		}
	}
	kubelet := s.here.run("kubelet.yaml")
	err := renderTo(kubelet, "kubelet.yaml",
		map[string]any{"Node": "v1", "Pki": s.here.run("pki"), "CgroupDriver": s.here.cgroupDriver("v1"), "CgroupRoot": "/" + cgroup})
	if err != nil {
		return err
	}
	command := append([]string{s.here.bin("v1/kubelet")}, s.network.kubeletFlags("v1", kubelet, filepath.Join(s.here.run("pki"), "v1.kubeconfig"))...)
	s.start("kubelet", command)
	return nil
}

// cgroupLabel is the nodes' label with their cgroup version.
const cgroupLabel = "e2e.plimsoll.dev/cgroup"

func (n network) kubeletFlags(node, config, kubeconfig string) []string {
	return []string{"--config=" + config, "--kubeconfig=" + kubeconfig, "--hostname-override=" + node,
		"--node-ip=" + strings.Join(n.nodeAddresses(node), ","), "--node-labels=" + cgroupLabel + "=" + node}
}

// waitNode waits until a node is Ready.
func (s *supervisor) waitNode(node string) error {
	component := "kubelet"
	if node == "v2" {
		component = "guest"
	}
	return s.wait(component, 120*time.Second, func() error {
		var object struct {
			Status struct {
				Conditions []struct{ Type, Status, Message string }
			}
		}
		if err := s.get("/api/v1/nodes/"+node, &object); err != nil {
			return err
		}
		for _, condition := range object.Status.Conditions {
			if condition.Type != "Ready" {
				continue
			}
			if condition.Status == "True" {
				return nil
			}
			return errors.New(condition.Message)
		}
		return errors.New("no Ready condition yet")
	})
}
