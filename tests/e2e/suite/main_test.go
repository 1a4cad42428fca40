//go:build e2e

package suite

import (
	"cmp"
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// namespace is where Plimsoll is installed.
const namespace = "plimsoll"

// long runs the tests that take minutes too.
var long = flag.Bool("long", false, "also run the tests that take minutes: many kills, a long outage, a reboot")

func TestMain(m *testing.M) {
	flag.Parse()
	start := time.Now()
	end, err := begin()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		end()
		os.Exit(2)
	}
	code := m.Run()
	if *checkUnused {
		if err := checkPermissions(start); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	end()
	os.Exit(code)
}

// begin starts a cluster with Plimsoll; the returned function stops it.
func begin() (end func(), err error) {
	end = func() {}
	kubeconfig := given
	if given == "" {
		clusterTool = absolute("target/e2e/bin/cluster")
		kubeconfig = absolute("target/e2e/kubeconfig")
		if _, err := os.Stat(kubeconfig); err != nil {
			end = func() { run("", clusterTool, "down") }
		}
		out, err := run("", clusterTool, "up")
		if err != nil {
			return end, err
		}
		fmt.Println(out)
	}
	if err := connect(kubeconfig); err != nil {
		return end, err
	}
	if err := findNodes(); err != nil {
		return end, err
	}
	start := time.Now()
	if err := install(); err != nil {
		return end, err
	}
	fmt.Printf("%5.1f s  plimsoll is installed\n", time.Since(start).Seconds())
	return end, startGauge()
}

// findNodes chooses the nodes under test: the cluster's own, or the first two of a larger one.
func findNodes() error {
	list, err := kube.CoreV1().Nodes().List(background, metav1.ListOptions{LabelSelector: "!node-role.kubernetes.io/control-plane"})
	if err != nil {
		return err
	}
	for _, node := range list.Items {
		nodes = append(nodes, node.Name)
	}
	if len(nodes) == 0 {
		return fmt.Errorf("the cluster has no nodes")
	}
	slices.Sort(nodes)
	nodes = nodes[:min(2, len(nodes))]
	for _, node := range nodes {
		busy[node] = &sync.RWMutex{}
	}
	return nil
}

// needShell skips a test that needs a shell on a node where there is none.
func needShell(t testing.TB) {
	t.Helper()
	if given != "" {
		t.Skip("needs a shell on the nodes, which only our own cluster has")
	}
}

// binary is the path of the program under test.
func binary() string {
	return cmp.Or(os.Getenv("PLIMSOLL_E2E_BINARY"), absolute("target/x86_64-unknown-linux-musl/release/plimsoll"))
}

// image is the reference of our image on the nodes, where it is imported if it is missing.
func image() (repository, tag string, err error) {
	if given != "" {
		name := os.Getenv("PLIMSOLL_E2E_IMAGE")
		colon := strings.LastIndex(name, ":")
		if colon < 0 {
			return "", "", fmt.Errorf("PLIMSOLL_E2E_IMAGE=%s: the image on that cluster's nodes is needed, such as registry/plimsoll:1", name)
		}
		return name[:colon], name[colon+1:], nil
	}
	if archive := os.Getenv("PLIMSOLL_E2E_ARCHIVE"); archive != "" {
		repository, err = loadArchive(archive)
	} else {
		repository, err = load("plimsoll", binary())
	}
	return repository, "latest", err
}

// named returns a name with this prefix that is unique for a file's content, and whether all nodes of our own cluster have an image of that name.
func named(prefix, file string) (name string, loaded bool, err error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return "", false, fmt.Errorf("%w: `make build` builds it, PLIMSOLL_E2E_BINARY names another one, PLIMSOLL_E2E_ARCHIVE an archive of `make image`", err)
	}
	name = fmt.Sprintf("%s-%x", prefix, sha256.Sum256(content))[:len(prefix)+16]
	loaded = true
	for _, node := range nodes {
		images, err := tryOnNode(node, "ctr --namespace k8s.io images list --quiet")
		loaded = loaded && err == nil && strings.Contains(images, name)
	}
	return name, loaded, nil
}

// load imports an image of a binary into the nodes, under a unique name with this prefix.
func load(prefix, binary string) (repository string, err error) {
	name, loaded, err := named(prefix, binary)
	if err != nil {
		return "", err
	}
	if !loaded {
		archive, err := packed(name, binary)
		if err != nil {
			return "", err
		}
		defer os.Remove(archive)
		if _, err := run("", clusterTool, "load", archive); err != nil {
			return "", err
		}
	}
	return "plimsoll.dev/e2e/" + name, nil
}

// loadArchive imports an OCI archive that `make image` built into the nodes.
func loadArchive(file string) (repository string, err error) {
	name, loaded, err := named("plimsoll", file)
	if err != nil {
		return "", err
	}
	repository = "plimsoll.dev/e2e/" + name
	if loaded {
		return repository, nil
	}
	if _, err := run("", clusterTool, "load", file); err != nil {
		return "", err
	}
	for _, node := range nodes {
		// containerd uses the archive's name, perhaps after a registry or a date. The kubelet uses that name, too, so it stays.
		rename := `set -eu; found=$(ctr --namespace k8s.io images list --quiet | grep -m1 -E '(^|[/:])plimsoll:'); ` +
			`ctr --namespace k8s.io images tag --force "$found" ` + repository + `:latest`
		if out, err := tryOnNode(node, rename); err != nil {
			return "", fmt.Errorf("%w: %s", err, out)
		}
	}
	return repository, nil
}

// packed packs the archive of an image whose only file is /bin/plimsoll, whatever the binary's name is. Without symbols, which are most of a debug
// build: an emulated node unpacks it.
func packed(name, binary string) (archive string, err error) {
	directory, err := os.MkdirTemp("", "plimsoll-image")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(directory)
	stripped := filepath.Join(directory, "plimsoll")
	if _, err := run("", "strip", "-o", stripped, binary); err != nil {
		return "", err
	}
	return run("", clusterTool, "image", name, stripped)
}

// values are the values for a release with this image on our own cluster.
func values(repository, tag string) (string, error) {
	layouts, err := run("", clusterTool, "layouts")
	// Tests close both nodes; the cap on unschedulable nodes has its own test.
	return fmt.Sprintf("%s\nimage: {repository: %s, tag: %s}\ncontroller: {maxUnschedulable: 100%%}\n", layouts, repository, tag), err
}

// generousBudgets never limit parallel tests; the budgets have their own tests.
const generousBudgets = "evictionBudget: {fleet: 1000/1m, zone: 1000/1m, node: 1000/1m, namespace: 1000/1m, owner: 1000/1m}\n"

// install installs the chart, as its README says, with the values of the cluster under test.
func install() error { return installWith(generousBudgets) }

// installWith installs the chart with these eviction budgets, or the chart's defaults if empty.
func installWith(budgets string) error {
	repository, tag, err := image()
	if err != nil {
		return err
	}
	labelled := fmt.Sprintf("{apiVersion: v1, kind: Namespace, metadata: {name: %s, labels: {pod-security.kubernetes.io/enforce: privileged}}}", namespace)
	if _, err := tryKubectl(labelled, "apply", "-f", "-"); err != nil {
		return err
	}
	args := []string{"upgrade", "--install", "plimsoll", absolute("charts/plimsoll"), "--namespace", namespace, "--wait", "--timeout", "240s", "--values", "-",
		"--set", "agent.podMetrics=true,agent.evaluationPeriod=1s,waitForAgents.timeoutSeconds=120"} // panels of the dashboard show individual pods
	if given == "" {
		ours, err := values(repository, tag)
		if err == nil {
			_, err = helm(ours+budgets, args...)
		}
		return err
	}
	if file := os.Getenv("PLIMSOLL_E2E_VALUES"); file != "" {
		args = append(args, "--values", file)
	}
	_, err = helm(fmt.Sprintf("image: {repository: %s, tag: %s}\ncontroller: {maxUnschedulable: 100%%}\n", repository, tag)+budgets, args...)
	return err
}

// onEachNode runs a test on all nodes in parallel.
func onEachNode(t *testing.T, test func(*testing.T, string)) {
	t.Parallel()
	for _, node := range nodes {
		t.Run(node, func(t *testing.T) {
			t.Parallel()
			test(t, node)
		})
	}
}

// onlyLong skips a test unless -long is set.
func onlyLong(t *testing.T) {
	if !*long {
		t.Skip("takes minutes: make e2e-long")
	}
}

// other is the other node.
func other(node string) string { return nodes[1-slices.Index(nodes, node)] }
