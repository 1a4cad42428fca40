//go:build e2e

// Package plane starts an etcd, an API server and controllers that are real, on this machine's loopback: no kubelet is needed, so
// that it runs without root. What it starts ends with the test.
package plane

import (
	"cmp"
	"context"
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
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// A Plane is an API server that has the project's definitions.
type Plane struct {
	T          *testing.T
	Kubeconfig string
	Kube       kubernetes.Interface
	Objects    dynamic.Interface
	// Server is the API server, Address where it is.
	Server  *Process
	Address string
	// Etcd is its store.
	Etcd     *Process
	etcdPort int
	dir      string
}

// Start starts one with more flags for its API server. It knows the tokens "admin" and users, as administrators.
func Start(t *testing.T, flags []string, users ...string) *Plane {
	etcd, server := FreePort(t), FreePort(t)
	p := &Plane{T: t, dir: t.TempDir(), etcdPort: etcd}
	p.Etcd = p.Run("etcd", "--unsafe-no-fsync", "--data-dir", p.File("etcd"), "--listen-client-urls", Local("http", etcd),
		"--advertise-client-urls", Local("http", etcd), "--listen-peer-urls", Local("http", FreePort(t)))
	p.keys()
	tokens := ""
	for _, user := range append(users, "admin") {
		tokens += fmt.Sprintf("%[1]s,%[1]s,%[1]s,system:masters\n", user)
	}
	p.Write("tokens.csv", tokens)
	p.Address = Local("https", server)
	p.Server = p.Run("kube-apiserver", append([]string{"--etcd-servers=" + Local("http", etcd), "--bind-address=127.0.0.1",
		"--secure-port=" + strconv.Itoa(server), "--service-cluster-ip-range=10.0.0.0/24",
		"--disable-admission-plugins=ServiceAccount,TaintNodesByCondition", "--authorization-mode=RBAC",
		"--cert-dir=" + p.File("certificates"), "--token-auth-file=" + p.File("tokens.csv"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + p.File("sa.pub"),
		"--service-account-signing-key-file=" + p.File("sa.key")}, flags...)...)
	p.Kubeconfig = p.KubeconfigOf("admin")
	config := p.Config()
	config.QPS, config.Burst, config.Timeout = 500, 1000, 15*time.Second
	p.Kube, p.Objects = kubernetes.NewForConfigOrDie(config), dynamic.NewForConfigOrDie(config)
	p.UntilReady()
	p.Define(p.Definitions())
	p.Kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
	return p
}

// UntilReady waits for the API server.
func (p *Plane) UntilReady() {
	p.T.Helper()
	p.Eventually(2*time.Minute, "the API server is ready", func() error {
		return p.Kube.Discovery().RESTClient().Get().AbsPath("/readyz").Do(context.Background()).Error()
	})
}

// Config is how the administrator reaches the API server.
func (p *Plane) Config() *rest.Config {
	config := &rest.Config{Host: p.Address, BearerToken: "admin"}
	config.TLSClientConfig.Insecure = true
	return config
}

// KubeconfigOf is a file by which a user reaches the API server.
func (p *Plane) KubeconfigOf(user string) string { return p.KubeconfigBy(user, user) }

// KubeconfigBy is one for the bearer of a token.
func (p *Plane) KubeconfigBy(name, token string) string { return p.kubeconfig(name, token, p.Address) }

// KubeconfigAt is one by which a user reaches it at another address.
func (p *Plane) KubeconfigAt(user, address string) string { return p.kubeconfig(user, user, address) }

func (p *Plane) kubeconfig(name, token, address string) string {
	return p.Write(name+".kubeconfig", fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"it",
		"contexts":[{"name":"it","context":{"cluster":"it","user":"it"}}],"users":[{"name":"it","user":{"token":%q}}],
		"clusters":[{"name":"it","cluster":{"server":%q,"insecure-skip-tls-verify":true}}]}`, token, address))
}

// Controller starts the project's controller as this user.
func (p *Plane) Controller(user string, args ...string) *Process {
	return p.ControllerBy(p.KubeconfigOf(user), 0, args...)
}

// ControllerBy starts it with this kubeconfig, and a wall clock that is ahead by so much.
func (p *Plane) ControllerBy(kubeconfig string, ahead time.Duration, args ...string) *Process {
	return p.Plimsoll(ahead, append([]string{"controller", "--kubeconfig", kubeconfig, "--namespace", "default"}, args...)...)
}

// Plimsoll starts the project's program with a wall clock that is ahead of the machine's by so much.
func (p *Plane) Plimsoll(ahead time.Duration, args ...string) *Process {
	p.T.Helper()
	path := os.Getenv("PLIMSOLL_E2E_BINARY")
	if path == "" {
		path = Absolute(p.T, "target/x86_64-unknown-linux-musl/release/plimsoll")
	}
	if ahead == 0 {
		return p.start(path, args...)
	}
	if runtime.GOARCH != "amd64" {
		p.T.Skip("NOT TESTED: programs get another clock (./clock) on amd64 alone")
	}
	return p.start(p.build("./clock"), append([]string{"-by", ahead.String(), path}, args...)...)
}

// build builds one of the programs that tests need.
func (p *Plane) build(folder string) string {
	p.T.Helper()
	program := p.File(filepath.Base(folder))
	build := exec.Command("go", "build", "-o", program, folder)
	build.Dir = Absolute(p.T, "tests/e2e/suite")
	if out, err := build.CombinedOutput(); err != nil {
		p.T.Fatalf("go build: %v: %s", err, out)
	}
	return program
}

// Absolute is the path of a file of the repository.
func Absolute(t *testing.T, path string) string {
	t.Helper()
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for folder := here; folder != filepath.Dir(folder); folder = filepath.Dir(folder) {
		if _, err := os.Stat(filepath.Join(folder, "Cargo.toml")); err == nil {
			return filepath.Join(folder, path)
		}
	}
	t.Fatalf("%s is not in the repository", here)
	return ""
}

// Those that tests listen on: none that the kernel gives to connections, which would have it back before it is listened on.
const firstPort, ports = 12000, 18000

// What says to others that a port is taken, for as long as this process lives.
var claims sync.Map

// FreePort is a port that nobody listens on, and that nobody else is given.
func FreePort(t *testing.T) int {
	for index := range ports {
		port := firstPort + (os.Getpid()+index)%ports
		claim, err := net.ListenPacket("udp4", fmt.Sprintf("0.0.0.0:%d", port))
		if err != nil {
			continue
		}
		listener, err := net.Listen("tcp4", fmt.Sprintf("0.0.0.0:%d", port))
		if err != nil {
			claim.Close()
			continue
		}
		listener.Close()
		claims.Store(port, claim)
		return port
	}
	t.Fatal("no port is free")
	return 0
}

// Local is the URL of a port of this machine.
func Local(scheme string, port int) string { return fmt.Sprintf("%s://127.0.0.1:%d", scheme, port) }

// File is the path of a file of the plane's own.
func (p *Plane) File(name string) string { return filepath.Join(p.dir, name) }

// Write writes one.
func (p *Plane) Write(name, content string) string {
	p.T.Helper()
	return WriteFile(p.T, p.File(name), content)
}

// WriteFile writes a file, whole at any time, and gives its path.
func WriteFile(t *testing.T, path, content string) string {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	return path
}

// keys makes the pair that signs tokens of service accounts.
func (p *Plane) keys() {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		p.T.Fatal(err)
	}
	private, _ := x509.MarshalECPrivateKey(key)
	public, _ := x509.MarshalPKIXPublicKey(&key.PublicKey)
	p.Write("sa.key", string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private})))
	p.Write("sa.pub", string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public})))
}

// Tool is the path of one of the test cluster's programs.
func (p *Plane) Tool(name string) string { return Tool(p.T, name) }

// Helm is the Helm that is tried: PLIMSOLL_E2E_HELM may name the next one, helm4.
func Helm() string { return cmp.Or(os.Getenv("PLIMSOLL_E2E_HELM"), "helm") }

// Tool is the same where no plane is needed.
func Tool(t *testing.T, name string) string {
	t.Helper()
	bin := os.Getenv("PLIMSOLL_E2E_BIN")
	if bin == "" {
		bin = Absolute(t, "target/e2e/bin")
	}
	path := filepath.Join(bin, name)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: `make cluster-build` builds it (metrics-server: `make compare`, cert-manager: `make cert-manager`), PLIMSOLL_E2E_BIN names another folder", err)
	}
	return path
}

// Run starts one of the test cluster's programs.
func (p *Plane) Run(name string, args ...string) *Process { return p.start(p.Tool(name), args...) }

// TryKubectl runs kubectl with an input: its output, and what it complains of.
func (p *Plane) TryKubectl(input string, args ...string) (string, error) {
	command := exec.Command(p.Tool("kubectl"), append([]string{"--kubeconfig", p.Kubeconfig}, args...)...)
	command.Env = append(os.Environ(), "HOME="+p.dir)
	command.Stdin = strings.NewReader(input)
	out, err := command.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// Kubectl runs kubectl, which has to succeed.
func (p *Plane) Kubectl(args ...string) string {
	p.T.Helper()
	out, err := p.TryKubectl("", args...)
	if err != nil {
		p.T.Fatal(err)
	}
	return out
}

// Apply does as `kubectl apply` does.
func (p *Plane) Apply(manifests ...string) {
	p.T.Helper()
	if _, err := p.TryKubectl(strings.Join(manifests, "\n---\n"), "apply", "-f", "-"); err != nil {
		p.T.Fatal(err)
	}
}

// Version is that of the API server: v1.34.4.
func (p *Plane) Version() string {
	p.T.Helper()
	version, err := p.Kube.Discovery().ServerVersion()
	if err != nil {
		p.T.Fatal(err)
	}
	return version.GitVersion
}

// Definitions are the files of ours, those for the API server's version.
func (p *Plane) Definitions() []string {
	p.T.Helper()
	files, err := filepath.Glob(Absolute(p.T, "crds") + "/*.yaml")
	if err != nil || len(files) == 0 {
		p.T.Fatalf("no definitions (%v)", err)
	}
	if !strings.HasPrefix(p.Version(), "v1.33.") {
		return files
	}
	for i, file := range files {
		older := filepath.Join(Absolute(p.T, "charts/plimsoll/files/crds-before-1.34"), filepath.Base(file))
		if _, err := os.Stat(older); err == nil {
			files[i] = older
		}
	}
	return files
}

// Define has the API server serve what these files define.
func (p *Plane) Define(files []string) {
	p.T.Helper()
	for _, file := range files {
		p.Kubectl("apply", "--server-side", "-f", file)
	}
	for _, file := range files {
		// kubectl does not wait for what has no status yet.
		p.Eventually(time.Minute, file+" is served", func() error {
			_, err := p.TryKubectl("", "wait", "--for=condition=Established", "-f", file, "--timeout=30s")
			return err
		})
	}
}

// Eventually waits for a condition, and says how long it took.
func (p *Plane) Eventually(limit time.Duration, what string, condition func() error) time.Duration {
	p.T.Helper()
	started := time.Now()
	for {
		err := condition()
		if err == nil {
			return time.Since(started)
		}
		if time.Since(started) > limit {
			p.T.Fatalf("%s: not within %s: %v", what, limit, err)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// Written is how many writes its store has carried out so far, and their bytes.
func (p *Plane) Written() (writes, bytes float64) {
	p.T.Helper()
	figure := func(series string) float64 {
		value, err := Metric(p.etcdPort, series)
		if err != nil {
			p.T.Fatal(err)
		}
		return value
	}
	return figure("etcd_mvcc_put_total"), figure("etcd_debugging_mvcc_total_put_size_in_bytes")
}

// Metric is the sum of a series that is served at this port.
func Metric(port int, series string) (float64, error) {
	client := http.Client{Timeout: 5 * time.Second}
	response, err := client.Get(Local("http", port) + "/metrics")
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	sum := 0.0
	for _, line := range regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(series)+`.* (\S+)$`).FindAllStringSubmatch(string(text), -1) {
		value, _ := strconv.ParseFloat(line[1], 64)
		sum += value
	}
	return sum, err
}
