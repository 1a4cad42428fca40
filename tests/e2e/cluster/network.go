package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// The sandbox's network: one bridge that connects the nodes, a pod range for each node, all routed, no NAT between pods. Nodes and pods
// have an address of each family of the cluster.
type family struct {
	controlPlane  string // also the address of node v1
	guest         string // of node v2, which has only IPv4
	bridge        string // the control plane's address, as `ip` takes it
	serviceIP     string // of the API server
	serviceRange  string
	podRange      string
	nodePodRanges map[string]string
	defaultRoute  string
}

var families = map[string]family{
	"ipv4": {
		controlPlane: "10.89.0.1", guest: "10.89.0.2", bridge: "10.89.0.1/24", serviceIP: "10.96.0.1", serviceRange: "10.96.0.0/16",
		podRange: "10.244.0.0/16", nodePodRanges: map[string]string{"v1": "10.244.1.0/24", "v2": "10.244.2.0/24"},
		defaultRoute: "0.0.0.0/0",
	},
	"ipv6": {
		controlPlane: "fd00:89::1", bridge: "fd00:89::1/64 nodad", serviceIP: "fd00:96::1", serviceRange: "fd00:96::/112",
		podRange: "fd00:244::/48", nodePodRanges: map[string]string{"v1": "fd00:244:0:1::/64"},
		defaultRoute: "::/0",
	},
}

// network has the address families of a cluster. The first is that of single-family services.
type network []family

// guestNetwork is the only one that node v2 supports.
var guestNetwork = network{families["ipv4"]}

// chosenNetwork reads IP_FAMILY.
func chosenNetwork(nodes []string) (network, error) {
	name := cmp.Or(os.Getenv("IP_FAMILY"), "ipv4")
	names := map[string][]string{"ipv4": {"ipv4"}, "ipv6": {"ipv6"}, "dual": {"ipv4", "ipv6"}}[name]
	if names == nil {
		return nil, fmt.Errorf("IP_FAMILY=%s: it must be ipv4, ipv6 or dual", name)
	}
	if name != "ipv4" && !slices.Equal(nodes, []string{"v1"}) {
		return nil, fmt.Errorf("IP_FAMILY=%s needs NODES=v1: the guest has only IPv4", name)
	}
	var chosen network
	for _, name := range names {
		chosen = append(chosen, families[name])
	}
	return chosen, nil
}

// all collects a value of every family.
func (n network) all(of func(family) string) []string {
	var all []string
	for _, family := range n {
		all = append(all, of(family))
	}
	return all
}

func (n network) joined(of func(family) string) string { return strings.Join(n.all(of), ",") }

// controlPlane is the API server's address.
func (n network) controlPlane() string { return net.JoinHostPort(n[0].controlPlane, "6443") }

func (n network) nodeAddresses(node string) []string {
	return n.all(func(f family) string {
		if node == "v2" {
			return f.guest
		}
		return f.controlPlane
	})
}

// String lists the service IP ranges, which identify the network.
func (n network) String() string { return n.joined(func(f family) string { return f.serviceRange }) }

// cni is the data for a node's CNI configuration.
func (n network) cni(node string) map[string]any {
	return map[string]any{
		"PodRanges": n.all(func(f family) string { return f.nodePodRanges[node] }),
		"Routes":    n.all(func(f family) string { return f.defaultRoute }),
	}
}

// make sets up the sandbox's own network. The tap device is the guest's network card.
// The guest needs no kube-proxy: its traffic to services passes node v1, whose kube-proxy translates it.
func (n network) make(nodes []string) error {
	commands := `
link set lo up
link add nodes type bridge`
	for _, family := range n {
		commands += `
addr add ` + family.bridge + ` dev nodes`
	}
	commands += `
link set nodes up`
	for _, family := range n {
		commands += `
route add ` + family.defaultRoute + ` dev nodes`
	}
	for _, node := range nodes {
		if node == "v2" {
			commands += `
tuntap add guest mode tap
link set guest master nodes up`
			for _, family := range n {
				commands += `
route add ` + family.nodePodRanges[node] + ` via ` + family.guest
			}
		}
	}
	batch := exec.Command("ip", "-batch", "-")
	batch.Stdin = strings.NewReader(commands + "\n")
	if out, err := batch.CombinedOutput(); err != nil {
		return fmt.Errorf("failed to set up the network: %w\n%s", err, out)
	}
	// With bridge netfilter, translated packets are not sent back through the port that they came from: the guest's pods could not
	// reach each other's services.
	err := os.WriteFile("/proc/sys/net/bridge/bridge-nf-call-iptables", []byte("0"), 0o644)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, forwarding := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/net/"+forwarding, []byte("1"), 0o644); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
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
