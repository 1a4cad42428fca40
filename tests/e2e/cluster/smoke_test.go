//go:build smoke

package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func testNodes(t *testing.T) []string {
	t.Helper()
	nodes, err := chosenNodes()
	if err != nil {
		t.Fatal(err)
	}
	return nodes
}

const server = `
apiVersion: v1
kind: Pod
metadata: {name: %[1]s, labels: {app: smoke, on: %[1]s}}
spec:
  nodeSelector: {e2e.plimsoll.dev/cgroup: %[1]s}
  terminationGracePeriodSeconds: 1
  containers:
  - name: serve
    image: plimsoll.dev/e2e/tools:latest
    imagePullPolicy: Never
    args: [serve, ":8080"]
    resources: {requests: {cpu: 100m}, limits: {cpu: 200m, memory: 64Mi}}
---
apiVersion: v1
kind: Service
metadata: {name: %[1]s}
spec:
  selector: {on: %[1]s}
  ports: [{port: 80, targetPort: 8080}]
`

const deployment = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: wanderer}
spec:
  selector: {matchLabels: {app: wanderer}}
  template:
    metadata: {labels: {app: wanderer}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: pause, image: "plimsoll.dev/e2e/tools:latest", imagePullPolicy: Never, args: [pause]}]
`

func TestClusterWorksAndLeavesNothing(t *testing.T) {
	if os.Getenv(givenKubeconfig) != "" {
		t.Skip(givenKubeconfig + " names another cluster")
	}
	nodes := testNodes(t)
	must(t, "down")
	settings := machineSettings(t)
	started := time.Now()
	t.Log(must(t, "up"))
	if took := time.Since(started); took > 30*time.Second {
		t.Errorf("it took %s until the cluster was up", took)
	}
	t.Cleanup(func() { cluster(t, "", "down") })

	t.Run("nodes are Ready", func(t *testing.T) {
		must(t, "kubectl", "wait", "node", "--all", "--for=condition=Ready", "--timeout=5s")
		names := strings.Fields(must(t, "kubectl", "get", "nodes", "-o", "jsonpath={.items[*].metadata.name}"))
		if !slices.Equal(names, nodes) {
			t.Fatalf("nodes are %v", names)
		}
	})
	for _, node := range nodes {
		t.Run("a pod runs on "+node, func(t *testing.T) {
			apply(t, fmt.Sprintf(server, node))
			must(t, "kubectl", "wait", "pod/"+node, "--for=condition=Ready", "--timeout=60s")
		})
	}
	for _, node := range nodes {
		t.Run("its cgroup on "+node+" has its name and limit", func(t *testing.T) { checkCgroup(t, node) })
		t.Run("exec and logs work on "+node, func(t *testing.T) {
			must(t, "kubectl", "exec", node, "--", "sh", "-c", "echo logged >/proc/1/fd/1")
			eventually(t, 10*time.Second, func() error {
				out, err := cluster(t, "", "kubectl", "logs", node)
				if err == nil && out != "logged" {
					err = fmt.Errorf("the log is %q", out)
				}
				return err
			})
		})
		t.Run("a pod on "+node+" reaches the API server's service", func(t *testing.T) {
			if out := must(t, "kubectl", "exec", node, "--", "podtool", "get", "https://"+families["ipv4"].serviceIP+":443/version"); !strings.Contains(out, kubernetesVersion) {
				t.Fatal(out)
			}
		})
		t.Run("the API server reaches a pod on "+node, func(t *testing.T) {
			if out := must(t, "kubectl", "get", "--raw", "/api/v1/namespaces/default/pods/"+node+":8080/proxy/"); out != node {
				t.Fatalf("it answered %q", out)
			}
		})
		for _, other := range nodes {
			t.Run("a pod on "+node+" reaches a service on "+other, func(t *testing.T) {
				address := must(t, "kubectl", "get", "service", other, "-o", "jsonpath={.spec.clusterIP}")
				eventually(t, 10*time.Second, func() error { // the proxy learns of a ready pod a moment later
					out, err := cluster(t, "", "kubectl", "exec", node, "--", "podtool", "get", "http://"+address+"/")
					if err == nil && out != other {
						err = fmt.Errorf("it answered %q", out)
					}
					return err
				})
			})
		}
	}
	t.Run("a deleted pod of a Deployment is replaced, on another node if its own is cordoned", func(t *testing.T) { checkRescheduled(t, nodes) })
	t.Run("an image packed here is on every node", func(t *testing.T) {
		must(t, "load", must(t, "image", "smoke", testLayout(t).bin("podtool")))
		for _, node := range nodes {
			if images := must(t, "on", node, "ctr", "--namespace", "k8s.io", "images", "list", "--quiet"); !strings.Contains(images, imageName("smoke")) {
				t.Errorf("%s has only %s", node, images)
			}
		}
	})
	t.Run("a component that exits is restarted", func(t *testing.T) {
		old := must(t, "on", "v1", "pgrep", "-x", "kube-scheduler")
		must(t, "on", "v1", "pkill", "-x", "kube-scheduler")
		eventually(t, 10*time.Second, func() error {
			now, err := cluster(t, "", "on", "v1", "pgrep", "-x", "kube-scheduler")
			if err == nil && now == old {
				err = fmt.Errorf("process %s is still running", old)
			}
			return err
		})
	})
	t.Run("after SIGKILL, down leaves nothing behind", func(t *testing.T) {
		pid, err := sandboxPid(testLayout(t))
		if err != nil || pid == 0 {
			t.Fatal(pid, err)
		}
		network := networkOf(t, fmt.Sprint(pid))
		if err := unix.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		must(t, "down")
		checkNothingLeft(t, network)
		if now := machineSettings(t); !maps.Equal(now, settings) {
			t.Errorf("kernel settings were %v, now they are %v", settings, now)
		}
	})
}

// machineSettings reads the settings of the machine's kernel that a kubelet would change.
func machineSettings(t *testing.T) map[string]string {
	t.Helper()
	settings := map[string]string{}
	for name := range kernelSettings {
		value, err := os.ReadFile(filepath.Join("/proc/sys", name))
		if err != nil {
			t.Fatal(err)
		}
		settings[name] = string(value)
	}
	return settings
}

// checkCgroup reads the limit from the path that the kubelet's documentation gives, not from the one that `cluster cgroup` computes.
func checkCgroup(t *testing.T, node string) {
	uid := must(t, "kubectl", "get", "pod", node, "-o", "jsonpath={.metadata.uid}")
	if node == "v1" {
		directory := "/sys/fs/cgroup/cpu/" + testLayout(t).cgroupName() + "/kubepods/burstable/pod" + uid
		quota, err := os.ReadFile(directory + "/cpu.cfs_quota_us")
		if err != nil || string(quota) != "20000\n" {
			t.Fatalf("quota %q, %v", quota, err)
		}
		return
	}
	if name := must(t, "on", "v2", "cat", "/proc/1/comm"); name != "systemd" {
		t.Fatalf("process 1 is %s", name)
	}
	directory := "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice"
	if got := must(t, "cgroup", "default/"+node); got != directory {
		t.Fatalf("cluster cgroup prints %s, not %s", got, directory)
	}
	if limit := must(t, "cgroup", "default/"+node, "cpu.max"); limit != "20000 100000" {
		t.Fatalf("cpu.max is %q", limit)
	}
	scopes := must(t, "on", "v2", "sh", "-c", "cd /sys/fs/cgroup/"+directory+" && ls -d cri-containerd-*.scope | wc -l")
	if scopes != "2" {
		t.Fatalf("%s scopes instead of 2, the sandbox's and the container's", scopes)
	}
}

func checkRescheduled(t *testing.T, nodes []string) {
	apply(t, deployment)
	runningPod := func() (name, node string) {
		must(t, "kubectl", "rollout", "status", "deployment/wanderer", "--timeout=60s")
		fields := strings.Fields(must(t, "kubectl", "get", "pods", "-l", "app=wanderer", "--field-selector=status.phase=Running",
			"-o", "go-template={{range .items}}{{if not .metadata.deletionTimestamp}}{{.metadata.name}} {{.spec.nodeName}} {{end}}{{end}}"))
		if len(fields) != 2 {
			t.Fatalf("pods: %v", fields)
		}
		return fields[0], fields[1]
	}
	name, node := runningPod()
	if len(nodes) > 1 {
		must(t, "kubectl", "cordon", node)
		defer must(t, "kubectl", "uncordon", node)
	}
	must(t, "kubectl", "delete", "pod", name)
	nextName, nextNode := runningPod()
	if nextName == name || (len(nodes) > 1 && nextNode == node) {
		t.Fatalf("%s on %s was replaced by %s on %s", name, node, nextName, nextNode)
	}
}

// networkOf is the network namespace of a process.
func networkOf(t *testing.T, pid string) string {
	t.Helper()
	network, err := os.Readlink("/proc/" + pid + "/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	return network
}

// checkNothingLeft fails the test if cgroups, processes, mounts or files of the cluster with this network namespace are left.
func checkNothingLeft(t *testing.T, network string) {
	here := testLayout(t)
	points, err := hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	for _, point := range points {
		if _, err := os.Stat(filepath.Join(point, here.cgroupName())); err == nil {
			t.Errorf("cgroup %s in %s is left", here.cgroupName(), point)
		}
	}
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, process := range processes {
		if used, err := os.Readlink(process + "/ns/net"); err == nil && used == network {
			name, _ := os.ReadFile(process + "/cmdline")
			t.Errorf("process %s %q is left in the cluster's network", process, name)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), here.dir) {
		t.Errorf("mounts are left:\n%s", mounts)
	}
	for _, path := range append(borrowed, here.run(""), here.kubeconfig()) {
		if _, err := os.Stat(path); err == nil && !existedBefore[path] {
			t.Errorf("%s is left", path)
		}
	}
}
