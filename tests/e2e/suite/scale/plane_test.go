//go:build e2e

// Package scale shows what the controller does with many nodes. Nodes and their pods are simulated by kwok and their agents by
// this test, on an etcd, an API server and a controller that are real: no kubelet is needed, so that it runs without root.
package scale

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const repository = "../../../.."

// A plane is an API server with a controller; it ends with its test.
type plane struct {
	t          *testing.T
	dir, bin   string
	kubeconfig string
	metrics    string
	controller *exec.Cmd
	kube       kubernetes.Interface
	objects    dynamic.Interface
}

func start(t *testing.T) *plane {
	bin := os.Getenv("PLIMSOLL_E2E_BIN")
	if bin == "" {
		bin = absolute(t, "target/e2e/bin")
	}
	p := &plane{t: t, dir: t.TempDir(), bin: bin}
	etcd, server, metrics := freePort(t), freePort(t), freePort(t)
	p.run("etcd", "--unsafe-no-fsync", "--data-dir", p.file("etcd"), "--listen-client-urls", local("http", etcd),
		"--advertise-client-urls", local("http", etcd), "--listen-peer-urls", local("http", freePort(t)))
	p.keys()
	p.write("tokens.csv", "admin,admin,admin,system:masters\n")
	p.run("kube-apiserver", "--etcd-servers="+local("http", etcd), "--bind-address=127.0.0.1", "--secure-port="+strconv.Itoa(server),
		"--service-cluster-ip-range=10.0.0.0/24", "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
		"--authorization-mode=RBAC", "--cert-dir="+p.file("certificates"), "--token-auth-file="+p.file("tokens.csv"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+p.file("sa.pub"),
		"--service-account-signing-key-file="+p.file("sa.key"), "--max-requests-inflight=800", "--max-mutating-requests-inflight=400")
	p.kubeconfig = p.write("kubeconfig", fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"it",
		"contexts":[{"name":"it","context":{"cluster":"it","user":"admin"}}],"users":[{"name":"admin","user":{"token":"admin"}}],
		"clusters":[{"name":"it","cluster":{"server":%q,"insecure-skip-tls-verify":true}}]}`, local("https", server)))
	config := &rest.Config{Host: local("https", server), BearerToken: "admin", QPS: 500, Burst: 1000, Timeout: 15 * time.Second}
	config.TLSClientConfig.Insecure = true
	p.kube, p.objects = kubernetes.NewForConfigOrDie(config), dynamic.NewForConfigOrDie(config)
	p.eventually(time.Minute, "the API server is ready", func() error { return p.kube.Discovery().RESTClient().Get().AbsPath("/readyz").Do(background).Error() })
	p.kubectl("apply", "--server-side", "-f", absolute(t, "crds"))
	p.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
	p.run("kwok", "--kubeconfig="+p.kubeconfig, "--manage-all-nodes=true", "--node-lease-duration-seconds=200")
	p.metrics = local("http", metrics) + "/metrics"
	p.controller = p.start(binary(t), "controller", "--kubeconfig", p.kubeconfig, "--namespace", "default", "--listen", fmt.Sprintf("127.0.0.1:%d", metrics))
	return p
}

func binary(t *testing.T) string {
	if binary := os.Getenv("PLIMSOLL_E2E_BINARY"); binary != "" {
		return binary
	}
	return absolute(t, "target/x86_64-unknown-linux-musl/release/plimsoll")
}

func absolute(t *testing.T, path string) string {
	full, err := filepath.Abs(filepath.Join(repository, path))
	if err != nil {
		t.Fatal(err)
	}
	return full
}

func freePort(t *testing.T) int {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port
}

func local(scheme string, port int) string { return fmt.Sprintf("%s://127.0.0.1:%d", scheme, port) }

func (p *plane) file(name string) string { return filepath.Join(p.dir, name) }

func (p *plane) write(name, content string) string {
	if err := os.WriteFile(p.file(name), []byte(content), 0o600); err != nil {
		p.t.Fatal(err)
	}
	return p.file(name)
}

// keys makes the pair that signs tokens of service accounts.
func (p *plane) keys() {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		p.t.Fatal(err)
	}
	private, _ := x509.MarshalECPrivateKey(key)
	public, _ := x509.MarshalPKIXPublicKey(&key.PublicKey)
	p.write("sa.key", string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private})))
	p.write("sa.pub", string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public})))
}

// run starts one of the test cluster's programs.
func (p *plane) run(name string, args ...string) {
	path := filepath.Join(p.bin, name)
	if _, err := os.Stat(path); err != nil {
		p.t.Fatalf("%v: `make cluster-build` builds it, PLIMSOLL_E2E_BIN names another folder", err)
	}
	p.start(path, args...)
}

func (p *plane) start(path string, args ...string) *exec.Cmd {
	command := exec.Command(path, args...)
	var log bytes.Buffer
	command.Stdout, command.Stderr = io.Discard, &log
	if err := command.Start(); err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() {
		command.Process.Kill()
		command.Wait()
		if p.t.Failed() {
			lines := strings.Split(strings.TrimSpace(log.String()), "\n")
			p.t.Logf("%s:\n%s", filepath.Base(path), strings.Join(lines[max(0, len(lines)-15):], "\n"))
		}
	})
	return command
}

func (p *plane) kubectl(args ...string) string {
	command := exec.Command(filepath.Join(p.bin, "kubectl"), append([]string{"--kubeconfig", p.kubeconfig}, args...)...)
	out, err := command.CombinedOutput()
	if err != nil {
		p.t.Fatalf("kubectl %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// apply does as `kubectl apply` does.
func (p *plane) apply(manifests ...string) {
	command := exec.Command(filepath.Join(p.bin, "kubectl"), "--kubeconfig", p.kubeconfig, "apply", "-f", "-")
	command.Stdin = strings.NewReader(strings.Join(manifests, "\n---\n"))
	if out, err := command.CombinedOutput(); err != nil {
		p.t.Fatalf("kubectl apply: %v: %s", err, out)
	}
}

func (p *plane) eventually(limit time.Duration, what string, condition func() error) time.Duration {
	p.t.Helper()
	begun := time.Now()
	for {
		err := condition()
		if err == nil {
			return time.Since(begun)
		}
		if time.Since(begun) > limit {
			p.t.Fatalf("%s: not within %s: %v", what, limit, err)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// metric is the sum of a series of the controller.
func (p *plane) metric(series string) float64 {
	response, err := http.Get(p.metrics)
	if err != nil {
		return 0
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(response.Body)
	sum := 0.0
	for _, line := range regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(series)+`.* (\S+)$`).FindAllStringSubmatch(string(text), -1) {
		value, _ := strconv.ParseFloat(line[1], 64)
		sum += value
	}
	return sum
}

// resident is the controller's memory, in kB.
func (p *plane) resident() string {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.controller.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	return string(regexp.MustCompile(`VmRSS:\s+(\d+)`).FindSubmatch(status)[1])
}
