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
var long = flag.Bool("long", false, "run what takes minutes as well: many kills, a long outage, a reboot")

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
	if *allUsed {
		if err := checkPermissions(start); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	end()
	os.Exit(code)
}

// begin gives a cluster with Plimsoll on it; the returned function ends what it began.
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

// binary is the plimsoll under test.
func binary() string {
	return cmp.Or(os.Getenv("PLIMSOLL_E2E_BINARY"), absolute("target/x86_64-unknown-linux-musl/release/plimsoll"))
}

// image is the reference under which the nodes have our image.
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

// named is a name for what is in a file, which begins so, and whether all nodes of our own cluster have an image of it.
func named(prefix, file string) (name string, loaded bool, err error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return "", false, fmt.Errorf("%w: `make build` builds it, PLIMSOLL_E2E_BINARY names another one, PLIMSOLL_E2E_ARCHIVE what `make image` made", err)
	}
	name = fmt.Sprintf("%s-%x", prefix, sha256.Sum256(content))[:len(prefix)+16]
	loaded = true
	for _, node := range nodes {
		images, err := tryOnNode(node, "ctr --namespace k8s.io images list --quiet")
		loaded = loaded && err == nil && strings.Contains(images, name)
	}
	return name, loaded, nil
}

// load has the nodes know the image of a binary, each by a name of its own that begins so.
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

// loadArchive has them know the image of an OCI archive, as `make image` makes it.
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
		// containerd names it as the archive does; a registry, or a day, may stand before that. The kubelet goes by that name, too: it stays.
		rename := `set -eu; found=$(ctr --namespace k8s.io images list --quiet | grep -m1 -E '(^|[/:])plimsoll:'); ` +
			`ctr --namespace k8s.io images tag --force "$found" ` + repository + `:latest`
		if out, err := tryOnNode(node, rename); err != nil {
			return "", fmt.Errorf("%w: %s", err, out)
		}
	}
	return repository, nil
}

// packed is the archive of an image whose one file is /bin/plimsoll, whatever the binary's name is.
func packed(name, binary string) (archive string, err error) {
	folder, err := os.MkdirTemp("", "plimsoll-image")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(folder)
	link := filepath.Join(folder, "plimsoll")
	if err := os.Symlink(binary, link); err != nil {
		return "", err
	}
	return run("", clusterTool, "image", name, link)
}

// values are those of a release of this image on our own cluster.
func values(repository, tag string) (string, error) {
	layouts, err := run("", clusterTool, "layouts")
	// Each test has a node to itself: the cap on closed nodes has a test of its own.
	return fmt.Sprintf("%s\nimage: {repository: %s, tag: %s}\ncontroller: {maxUnschedulable: 100%%}\n", layouts, repository, tag), err
}

// generousBudgets is as many evictions as the tests that run beside each other want: the budgets have tests of their own.
const generousBudgets = "evictionBudget: {fleet: 1000/1m, zone: 1000/1m, node: 1000/1m, namespace: 1000/1m, owner: 1000/1m}\n"

// install installs the chart, as its README says, with the values of the cluster under test.
func install() error { return installWith(generousBudgets) }

// installWith does so with other budgets of evictions; empty: the chart's own.
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
		"--set", "agent.podMetrics=true,waitForAgents.timeoutSeconds=120"} // panels of the dashboard show single pods
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

// onEachNode runs a test on the nodes at a time, beside the others.
func onEachNode(t *testing.T, test func(*testing.T, string)) {
	t.Parallel()
	for _, node := range nodes {
		t.Run(node, func(t *testing.T) {
			t.Parallel()
			test(t, node)
		})
	}
}

// onlyLong skips a test unless the long ones are wanted.
func onlyLong(t *testing.T) {
	if !*long {
		t.Skip("takes minutes: make e2e-long")
	}
}

// other is the node that is not this one.
func other(node string) string { return nodes[1-slices.Index(nodes, node)] }
