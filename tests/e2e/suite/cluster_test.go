//go:build e2e

package suite

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// repository is the root of the project, seen from this directory.
const repository = "../../.."

// clients of the cluster under test, and their configuration.
var (
	access  *rest.Config
	kube    kubernetes.Interface
	objects dynamic.Interface
)

// clusterTool is the command that runs our own cluster; given is the kubeconfig of another cluster to test on, if any.
var (
	clusterTool string
	given       = os.Getenv("PLIMSOLL_E2E_KUBECONFIG")
)

// run runs a command and returns its output, trimmed.
func run(stdin string, command ...string) (string, error) {
	process := exec.Command(command[0], command[1:]...)
	process.Stdin = strings.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	process.Stdout, process.Stderr = &stdout, &stderr
	err := process.Run()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s%s", strings.Join(command, " "), err, stdout.Bytes(), stderr.Bytes())
	}
	return strings.TrimSpace(stdout.String()), err
}

// tryKubectl runs kubectl as a user does.
func tryKubectl(stdin string, args ...string) (string, error) {
	if given != "" {
		return run(stdin, append([]string{"kubectl", "--kubeconfig", given}, args...)...)
	}
	return run(stdin, append([]string{clusterTool, "kubectl"}, args...)...)
}

func kubectl(t testing.TB, args ...string) string {
	t.Helper()
	out, err := tryKubectl("", args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func apply(t testing.TB, manifest string) {
	t.Helper()
	if _, err := tryKubectl(manifest, "apply", "--validate=strict", "-f", "-"); err != nil {
		t.Fatal(err)
	}
}

func helm(stdin string, args ...string) (string, error) {
	if given != "" {
		return run(stdin, append([]string{"helm", "--kubeconfig", given}, args...)...)
	}
	return run(stdin, append([]string{clusterTool, "helm"}, args...)...)
}

// tryOnNode runs a shell script on a node as root.
func tryOnNode(node, script string) (string, error) {
	return run("", clusterTool, "on", node, "sh", "-c", script)
}

func onNode(t testing.TB, node, script string) string {
	t.Helper()
	needShell(t)
	out, err := tryOnNode(node, script)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// eventually waits for a condition with a deadline.
func eventually(t testing.TB, limit time.Duration, what string, condition func() error) {
	t.Helper()
	limit *= patience
	start := time.Now()
	for {
		err := condition()
		if err == nil {
			return
		}
		if time.Since(start) > limit {
			t.Fatalf("%s: not within %s: %v", what, limit, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// patience multiplies every limit of waiting: PLIMSOLL_E2E_PATIENCE, for clusters whose controllers run on an emulated node.
var patience = func() time.Duration {
	factor, err := strconv.Atoi(cmp.Or(os.Getenv("PLIMSOLL_E2E_PATIENCE"), "1"))
	if err != nil || factor < 1 {
		panic("PLIMSOLL_E2E_PATIENCE is not a number of 1 or more")
	}
	return time.Duration(factor)
}()

// always checks a condition for this long, and fails the test as soon as it is not met.
func always(t testing.TB, length time.Duration, what string, condition func() error) {
	t.Helper()
	for start := time.Now(); time.Since(start) < length; time.Sleep(200 * time.Millisecond) {
		if err := condition(); err != nil {
			t.Fatalf("%s: after %s: %v", what, time.Since(start).Round(time.Millisecond), err)
		}
	}
}

// repeatedly calls poll several times a second in the background, until stop is called or the test ends.
func repeatedly(t testing.TB, poll func()) (stop func()) {
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			poll()
			select {
			case <-end:
				return
			case <-time.After(200 * time.Millisecond):
			}
		}
	}()
	stop = sync.OnceFunc(func() { close(end); <-ended })
	t.Cleanup(stop)
	return stop
}

// connect creates the clients.
func connect(kubeconfig string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	config.QPS, config.Burst, config.Timeout = 200, 400, 15*time.Second
	access = config
	if kube, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	objects, err = dynamic.NewForConfig(config)
	return err
}

var background = context.Background()

// absolute is the absolute path of a file of the repository.
func absolute(path string) string {
	full, err := filepath.Abs(filepath.Join(repository, path))
	if err != nil {
		panic(err)
	}
	return full
}
