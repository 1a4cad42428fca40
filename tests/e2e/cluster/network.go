package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"strings"
)

// The sandbox's network: one bridge on which the nodes sit, a pod range for each node, all routed, no NAT between pods.
const (
	controlPlane = "10.89.0.1" // also the address of node v1
	serviceIP    = "10.96.0.1"
	podRange     = "10.244.0.0/16"
	serviceRange = "10.96.0.0/16"
)

func nodeAddress(node string) string {
	if node == "v2" {
		return "10.89.0.2"
	}
	return controlPlane
}

func nodePodRange(node string) string {
	if node == "v2" {
		return "10.244.2.0/24"
	}
	return "10.244.1.0/24"
}

// makeNetwork sets up the sandbox's own network. The tap device is the guest's network card.
// The service range of the guest needs no proxy of its own: its traffic passes node v1, whose kube-proxy translates it.
func makeNetwork(nodes []string) error {
	commands := `
link set lo up
link add nodes type bridge
addr add 10.89.0.1/24 dev nodes
link set nodes up
route add default dev nodes`
	for _, node := range nodes {
		if node == "v2" {
			commands += `
tuntap add guest mode tap
link set guest master nodes up
route add ` + nodePodRange(node) + ` via ` + nodeAddress(node)
		}
	}
	batch := exec.Command("ip", "-batch", "-")
	batch.Stdin = strings.NewReader(commands + "\n")
	if out, err := batch.CombinedOutput(); err != nil {
		return fmt.Errorf("failed to set up the network: %w\n%s", err, out)
	}
	// A bridge that translates addresses itself sends nothing back through the port that it came from: the guest's pods could not
	// reach each other's services.
	err := os.WriteFile("/proc/sys/net/bridge/bridge-nf-call-iptables", []byte("0"), 0o644)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644)
}

// relay passes connections from the host's network to an address in the sandbox.
func relay(listener net.Listener, address string) {
	for {
		outer, err := listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer outer.Close()
			inner, err := net.Dial("tcp", address)
			if err != nil {
				return
			}
			defer inner.Close()
			go func() {
				io.Copy(inner, outer)
				inner.(*net.TCPConn).CloseWrite()
			}()
			io.Copy(outer, inner)
		}()
	}
}
