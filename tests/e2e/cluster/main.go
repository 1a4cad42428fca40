// Command cluster runs a real Kubernetes cluster on this machine for the end-to-end tests: see README.md.
package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

const usage = `usage: cluster COMMAND

  build                  builds what is missing: Kubernetes, the pod images, the guest (see NODES)
  up                     starts the cluster and waits until its nodes are Ready
  down                   stops it and removes what it left behind, also after a crash
  status                 checks whether it is running
  kubectl ARGS...        runs kubectl against it
  helm ARGS...           runs helm against it
  on NODE CMD ARGS...    runs a command on a node (v1 or v2) as root
  cgroup NS/POD [FILE]   prints the directory of a pod's cgroup on its node, or a file in it
  layouts                prints the values with which Plimsoll's Helm chart fits the nodes
  image TAG BINARY...    packs static binaries as an image FROM scratch, the first its entrypoint: TAG.tar
  load ARCHIVE...        imports image archives into every node

NODES=v1 or NODES=v1,v2 (the default) chooses the nodes of build and up. KUBELET=1.36 builds another kubelet for v2,
CGROUP_DRIVER=cgroupfs starts it with that driver instead of systemd. With EXTRAS=kwok,checkers build also builds these.
With IP_FAMILY=ipv6 or dual, and NODES=v1, up gives nodes, pods and services only IPv6 addresses, or both.
`

func main() {
	if len(os.Args) < 2 {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	here, err := findLayout()
	if err == nil {
		err = run(here, os.Args[1], os.Args[2:])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "cluster:", err)
		os.Exit(1)
	}
}

func run(here layout, command string, args []string) error {
	switch command {
	case "build", "up", "down":
		nodes, err := chosenNodes()
		if err != nil {
			return err
		}
		return oneAtATime(here, nodes, map[string]func(layout, []string) error{"build": build, "up": up, "down": down}[command])
	case "status":
		return status(here)
	case "kubectl":
		return replaceBy(append(here.kubectl(), args...))
	case "helm":
		return replaceBy(append(here.helm(), args...))
	case "on":
		return onNode(here, args)
	case "cgroup":
		return podCgroup(here, args)
	case "layouts":
		return chartLayouts(here)
	case "image":
		return packImage(here, args)
	case "load":
		return loadImages(here, args)
	case "help", "-h", "--help":
		fmt.Print(usage)
		return nil
	case "sandbox-init":
		return sandboxInit(here)
	case "supervise":
		return supervise(here)
	}
	fmt.Fprint(os.Stderr, usage)
	return fmt.Errorf("unknown command %q", command)
}

// chosenNodes reads NODES.
func chosenNodes() ([]string, error) {
	value := os.Getenv("NODES")
	if value == "" {
		value = "v1,v2"
	}
	nodes := strings.Split(value, ",")
	slices.Sort(nodes)
	for _, node := range nodes {
		if node != "v1" && node != "v2" {
			return nil, fmt.Errorf("NODES=%s: each node must be v1 or v2", value)
		}
	}
	return nodes, nil
}
