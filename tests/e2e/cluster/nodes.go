package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// runningNodes are the nodes that the running cluster was started with.
func runningNodes(here layout) ([]string, error) {
	pid, err := sandboxPid(here)
	if err != nil {
		return nil, err
	}
	if pid == 0 {
		return nil, errors.New("no cluster is running; `cluster up` starts one")
	}
	var nodes []string
	for _, node := range []string{"v1", "v2"} {
		if _, err := os.Stat(filepath.Join(here.run("pki"), node+".crt")); err == nil {
			nodes = append(nodes, node)
		}
	}
	return nodes, nil
}

// chartLayouts is `cluster layouts`: the chart's values for the kubelets' cgroup layouts.
func chartLayouts(here layout) error {
	nodes, err := runningNodes(here)
	if err != nil {
		return err
	}
	fmt.Println("agent:\n  layouts:")
	for _, node := range nodes {
		fmt.Printf("  - {name: %[1]s, cgroup: %[1]s, kubepods: %[2]s, nodeSelector: {%[3]s: %[1]s}}\n", node, here.kubepods(node), cgroupLabel)
	}
	return nil
}

// cgroupDriver is the cgroup driver of a node's kubelet and containerd. That of v2 is chosen by CGROUP_DRIVER when the cluster starts.
func (l layout) cgroupDriver(node string) string {
	if chosen, err := os.ReadFile(l.run("cgroup-driver")); node == "v2" && err == nil {
		return string(chosen)
	}
	return map[string]string{"v1": "cgroupfs", "v2": "systemd"}[node]
}

// chosenDriver reads CGROUP_DRIVER.
func chosenDriver() (string, error) {
	switch driver := cmp.Or(os.Getenv("CGROUP_DRIVER"), "systemd"); driver {
	case "systemd", "cgroupfs":
		return driver, nil
	default:
		return "", fmt.Errorf("CGROUP_DRIVER=%s: it must be systemd or cgroupfs", driver)
	}
}

// kubepods is the cgroup of all pods of a node, below the root of a hierarchy.
func (l layout) kubepods(node string) string {
	switch {
	case node == "v1":
		return l.cgroupName() + "/kubepods"
	case l.cgroupDriver(node) == "cgroupfs":
		return "kubepods"
	}
	return "kubepods.slice"
}

// onNode is `cluster on NODE CMD ARGS...`.
func onNode(here layout, args []string) error {
	if len(args) < 2 {
		return errors.New("on NODE CMD ARGS...")
	}
	command, err := nodeCommand(here, args[0], args[1:])
	if err != nil {
		return err
	}
	return replaceBy(command)
}

// nodeCommand is the command line that runs a command on a node as root.
func nodeCommand(here layout, node string, command []string) ([]string, error) {
	prefix, err := inSandbox(here)
	if err != nil {
		return nil, err
	}
	switch node {
	case "v1":
		return append(prefix, command...), nil
	case "v2":
		return append(append(prefix, guestShell(here)...), quote(command)), nil
	}
	return nil, fmt.Errorf("unknown node %s: it must be v1 or v2", node)
}

// quote quotes a command for a shell.
func quote(words []string) string {
	quoted := make([]string, len(words))
	for i, word := range words {
		quoted[i] = "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
	}
	return strings.Join(quoted, " ")
}

// podCgroup is `cluster cgroup NAMESPACE/POD [FILE]`.
func podCgroup(here layout, args []string) error {
	if len(args) < 1 || !strings.Contains(args[0], "/") {
		return errors.New("cgroup NAMESPACE/POD [FILE]")
	}
	namespace, name, _ := strings.Cut(args[0], "/")
	command := append(here.kubectl(), "get", "pod", "-n", namespace, name, "-o", "json")
	out, err := exec.Command(command[0], command[1:]...).Output()
	if err != nil {
		return fmt.Errorf("failed to get pod %s: %w", args[0], err)
	}
	var pod pod
	if err := json.Unmarshal(out, &pod); err != nil {
		return err
	}
	directory := pod.cgroup(here)
	if len(args) == 1 {
		fmt.Println(directory)
		return nil
	}
	path := "/sys/fs/cgroup/" + directory + "/" + args[1]
	if pod.Spec.NodeName == "v1" {
		controller, _, _ := strings.Cut(args[1], ".")
		path = "/sys/fs/cgroup/" + controller + "/" + directory + "/" + args[1]
	}
	return onNode(here, []string{pod.Spec.NodeName, "cat", path})
}

// pod has the fields of a Pod that determine its cgroup.
type pod struct {
	Metadata struct{ UID string }
	Spec     struct{ NodeName string }
	Status   struct{ QosClass string }
}

// cgroup is the pod's cgroup below the root of a hierarchy, as the kubelet names it with the driver of its node.
func (p pod) cgroup(here layout) string {
	class := strings.ToLower(p.Status.QosClass)
	directory := here.kubepods(p.Spec.NodeName)
	if here.cgroupDriver(p.Spec.NodeName) == "cgroupfs" {
		if class == "guaranteed" {
			class = ""
		}
		return filepath.Join(directory, class, "pod"+p.Metadata.UID)
	}
	parent := "kubepods"
	if class != "guaranteed" {
		parent += "-" + class
		directory += "/" + parent + ".slice"
	}
	return directory + "/" + parent + "-pod" + strings.ReplaceAll(p.Metadata.UID, "-", "_") + ".slice"
}
