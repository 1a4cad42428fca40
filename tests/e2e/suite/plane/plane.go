//go:build e2e

// Package plane starts a real etcd, API server and controllers on the loopback interface, without a kubelet and without root. All
// processes end with the test.
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

// A Plane is an API server with the project's CRDs.
type Plane struct {
	T          *testing.T
	Kubeconfig string
	Kube       kubernetes.Interface
	Objects    dynamic.Interface
	// Server is the API server, Address its URL.
	Server  *Process
	Address string
	// Etcd is the API server's etcd.
	Etcd     *Process
	etcdPort int
	dir      string
}

// Start starts a Plane with additional API server flags. "admin" and each of users is an administrator, with its name as token.
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
	p.Kubeconfig = p.KubeconfigFor("admin")
	config := p.Config()
	config.QPS, config.Burst, config.Timeout = 500, 1000, 15*time.Second
	p.Kube, p.Objects = kubernetes.NewForConfigOrDie(config), dynamic.NewForConfigOrDie(config)
	p.WaitReady()
	p.ApplyCRDs(p.CRDFiles())
	p.Kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
	return p
}

// WaitReady waits for the API server.
func (p *Plane) WaitReady() {
	p.T.Helper()
	p.Eventually(2*time.Minute, "the API server is ready", func() error {
		return p.Kube.Discovery().RESTClient().Get().AbsPath("/readyz").Do(context.Background()).Error()
	})
}

// Config is the administrator's client config.
func (p *Plane) Config() *rest.Config {
	config := &rest.Config{Host: p.Address, BearerToken: "admin"}
	config.TLSClientConfig.Insecure = true
	return config
}

// KubeconfigFor writes a kubeconfig for a user.
func (p *Plane) KubeconfigFor(user string) string { return p.KubeconfigForToken(user, user) }

// KubeconfigForToken writes a kubeconfig with a token.
func (p *Plane) KubeconfigForToken(name, token string) string {
	return p.kubeconfig(name, token, p.Address)
}

// KubeconfigAt writes a kubeconfig with another address of the API server.
func (p *Plane) KubeconfigAt(user, address string) string { return p.kubeconfig(user, user, address) }

func (p *Plane) kubeconfig(name, token, address string) string {
	return p.Write(name+".kubeconfig", fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"it",
		"contexts":[{"name":"it","context":{"cluster":"it","user":"it"}}],"users":[{"name":"it","user":{"token":%q}}],
		"clusters":[{"name":"it","cluster":{"server":%q,"insecure-skip-tls-verify":true}}]}`, token, address))
}

// Controller starts the project's controller as this user of the API server.
func (p *Plane) Controller(user string, args ...string) *Process {
	return p.ControllerWith(p.KubeconfigFor(user), 0, args...)
}

// ControllerWith starts the controller with this kubeconfig and a wall clock that is ahead by this much.
func (p *Plane) ControllerWith(kubeconfig string, ahead time.Duration, args ...string) *Process {
	return p.Plimsoll(ahead, append([]string{"controller", "--kubeconfig", kubeconfig, "--namespace", "default"}, args...)...)
}

// Plimsoll starts the project's program with a wall clock that is ahead by this much.
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
		p.T.Skip("NOT TESTED: a program with another clock (./clock) needs amd64")
	}
	return p.start(p.build("./clock"), append([]string{"-by", ahead.String(), path}, args...)...)
}

// build builds one of the programs that tests need.
func (p *Plane) build(directory string) string {
	p.T.Helper()
	program := p.File(filepath.Base(directory))
	build := exec.Command("go", "build", "-o", program, directory)
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
	for directory := here; directory != filepath.Dir(directory); directory = filepath.Dir(directory) {
		if _, err := os.Stat(filepath.Join(directory, "Cargo.toml")); err == nil {
			return filepath.Join(directory, path)
		}
	}
	t.Fatalf("%s is not in the repository", here)
	return ""
}

// The ports for tests are outside the kernel's ephemeral range, so that no connection takes one before a program listens on it.
const firstPort, ports = 12000, 18000

// claims has a UDP socket for each port, which reserves it against other test processes.
var claims sync.Map

// FreePort reserves a free port for the life of this process.
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

// File is the path of a file in the plane's directory.
func (p *Plane) File(name string) string { return filepath.Join(p.dir, name) }

// Write writes a file into the plane's directory.
func (p *Plane) Write(name, content string) string {
	p.T.Helper()
	return WriteFile(p.T, p.File(name), content)
}

// WriteFile writes a file atomically, and returns its path.
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

// keys creates the key pair for service account tokens.
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

// Helm is the name of the Helm under test: helm, or PLIMSOLL_E2E_HELM (helm4).
func Helm() string { return cmp.Or(os.Getenv("PLIMSOLL_E2E_HELM"), "helm") }

// Tool is the path of one of the test cluster's programs.
func Tool(t *testing.T, name string) string {
	t.Helper()
	bin := os.Getenv("PLIMSOLL_E2E_BIN")
	if bin == "" {
		bin = Absolute(t, "target/e2e/bin")
	}
	path := filepath.Join(bin, name)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: `make cluster-build` builds it (metrics-server: `make compare`, cert-manager: `make cert-manager`, trimaran-scheduler and descheduler: `make consumers`), PLIMSOLL_E2E_BIN names another directory", err)
	}
	return path
}

// Run starts one of the test cluster's programs.
func (p *Plane) Run(name string, args ...string) *Process { return p.start(p.Tool(name), args...) }

// TryKubectl runs kubectl with this stdin, and returns its output, also as part of the error.
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

// Kubectl runs kubectl, which must succeed.
func (p *Plane) Kubectl(args ...string) string {
	p.T.Helper()
	out, err := p.TryKubectl("", args...)
	if err != nil {
		p.T.Fatal(err)
	}
	return out
}

// Apply runs `kubectl apply`.
func (p *Plane) Apply(manifests ...string) {
	p.T.Helper()
	if _, err := p.TryKubectl(strings.Join(manifests, "\n---\n"), "apply", "-f", "-"); err != nil {
		p.T.Fatal(err)
	}
}

// Version is the API server's version, such as v1.34.4.
func (p *Plane) Version() string {
	p.T.Helper()
	version, err := p.Kube.Discovery().ServerVersion()
	if err != nil {
		p.T.Fatal(err)
	}
	return version.GitVersion
}

// CRDFiles are the project's CRD files for the API server's version.
func (p *Plane) CRDFiles() []string {
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

// ApplyCRDs applies CRDs, and waits until they are served.
func (p *Plane) ApplyCRDs(files []string) {
	p.T.Helper()
	for _, file := range files {
		p.Kubectl("apply", "--server-side", "-f", file)
	}
	for _, file := range files {
		// kubectl wait fails for an object that has no status yet.
		p.Eventually(time.Minute, file+" is served", func() error {
			_, err := p.TryKubectl("", "wait", "--for=condition=Established", "-f", file, "--timeout=30s")
			return err
		})
	}
}

// Eventually waits for a condition, and returns how long it took.
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

// StoreWrites returns the number of etcd writes so far, and their total size.
func (p *Plane) StoreWrites() (writes, bytes float64) {
	p.T.Helper()
	value := func(series string) float64 {
		value, err := Metric(p.etcdPort, series)
		if err != nil {
			p.T.Fatal(err)
		}
		return value
	}
	return value("etcd_mvcc_put_total"), value("etcd_debugging_mvcc_total_put_size_in_bytes")
}

// Metric is the sum of the series with this prefix at this port.
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
