//go:build e2e

package clients

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"plimsoll.dev/suite/plane"
	"plimsoll.dev/suite/report"
)

const (
	certificate = "plimsoll-metrics"
	secret      = "plimsoll-metrics-tls"
	// The chart's certificates are valid for 90 days, and replicas use a new one after five minutes; with this lifetime, after a tenth of the rest.
	lifetime = 10 * time.Minute
	// How late kubelets update a mounted Secret; replicas wait for that.
	lag = 10 * time.Second
)

// TestClientsDoNotNoticeCertManagerRenewals: cert-manager issues the chart's certificates and renews all of them, as with `cmctl
// renew`. No request of clients or agents fails, neither reports nor evictions through the API server; and nothing is
// restarted.
func TestClientsDoNotNoticeCertManagerRenewals(t *testing.T) {
	s := openWith(t, setting{directly: true, issued: true})
	for _, r := range s.replicas {
		s.serves(r, s.issued())
	}
	all := append(s.all(), s.strictClient())
	trusted, answered := s.verifyingClients(), s.evictor()
	s.waitUpToDate(waitTimeout, all)
	before := s.issued()

	s.renew("plimsoll-metrics-authority")
	s.renew(certificate)
	next := s.issued()
	if bytes.Equal(next["ca.crt"], before["ca.crt"]) || bytes.Equal(next["tls.key"], before["tls.key"]) {
		t.Error("the CA or the key was not renewed")
	}
	for _, r := range s.replicas {
		t.Logf("%s serves the renewed certificate after %s", r.name, s.serves(r, next).Round(time.Second))
	}
	s.logUpToDate("with another certificate of another CA: all clients", all)
	s.more(trusted, "agents trust the replicas")
	s.more(answered, "agents request evictions through the API server")
}

// install applies the chart, whose pods do not run here, runs cert-manager's controllers, and waits for the certificates.
func (s *scene) install() {
	s.T.Helper()
	s.ApplyCRDs(plane.CertManagerCRDFiles(s.T))
	command := exec.Command(s.Tool("helm"), "template", "plimsoll", plane.Absolute(s.T, "charts/plimsoll"), "--namespace=default",
		"--set=metricsAPI.certManager.enabled=true")
	objects, err := command.Output()
	if err == nil {
		_, err = s.TryKubectl(string(objects), "apply", "--server-side", "--force-conflicts", "-f", "-")
	}
	if err != nil {
		s.T.Fatal(err)
	}
	s.Kubectl("patch", "certificates.cert-manager.io", certificate, "--type=merge", "-p", fmt.Sprintf(`{"spec":{"duration":%q}}`, lifetime))
	plane.CertManager(s.T, s.Kubeconfig)
	s.Kubectl("wait", "--for=condition=Ready", "certificates.cert-manager.io", "--all", "--timeout=120s")
}

// issued is the data of the Secret that cert-manager wrote.
func (s *scene) issued() map[string][]byte {
	s.T.Helper()
	found, err := s.Kube.CoreV1().Secrets("default").Get(background, secret, metav1.GetOptions{})
	if err != nil {
		s.T.Fatal(err)
	}
	return found.Data
}

// serves waits until a replica serves with this certificate, and returns how long it took.
func (s *scene) serves(r *replica, wanted map[string][]byte) time.Duration {
	s.T.Helper()
	return s.Eventually(lifetime, r.name+" serves with another certificate", func() error {
		connection, err := tls.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", r.api), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			return err
		}
		defer connection.Close()
		served := connection.ConnectionState().PeerCertificates[0]
		if block, _ := pem.Decode(wanted["tls.crt"]); !bytes.Equal(block.Bytes, served.Raw) {
			return fmt.Errorf("the served certificate is still the one of %s", served.NotBefore)
		}
		return nil
	})
}

// renew has cert-manager renew a Certificate.
func (s *scene) renew(name string) {
	s.T.Helper()
	var renewed func() error
	s.Eventually(waitTimeout, "renewal of "+name+" is requested", func() (err error) {
		renewed, err = plane.Renew(s.Objects.Resource(plane.Certificates).Namespace("default"), name)
		return err
	})
	s.Eventually(waitTimeout, name+" is renewed", renewed)
}

// verifyingClients connect to the replicas continuously like agents, with the CA bundle that a kubelet would have mounted. The returned counter
// has the successes.
func (s *scene) verifyingClients() *atomic.Int64 {
	l, running, count := s.ledger("an agent that trusts its CA bundle"), s.running(), &atomic.Int64{}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM([]byte(s.ReportAuthority()))
	read := time.Now()
	go func() {
		for running.Err() == nil {
			if time.Since(read) > lag {
				if bundle, err := s.Kube.CoreV1().ConfigMaps("default").Get(running, plane.ReportService+"-ca", metav1.GetOptions{}); err == nil {
					roots = x509.NewCertPool()
					roots.AppendCertsFromPEM([]byte(bundle.Data["ca.crt"]))
					read = time.Now()
				}
			}
			for _, r := range s.replicas {
				with := &tls.Config{RootCAs: roots, ServerName: plane.ReportService + ".default.svc"}
				connection, err := tls.DialWithDialer(&net.Dialer{Timeout: 10 * time.Second}, "tcp", fmt.Sprintf("127.0.0.1:%d", r.report), with)
				if err != nil {
					l.unexpected(fmt.Errorf("%s: %w", r.name, err))
					continue
				}
				connection.Close()
				count.Add(1)
			}
			time.Sleep(100 * time.Millisecond)
		}
	}()
	return count
}

// evictor continuously requests the eviction of a deleted pod through the API server, as a node's agent. The returned counter has the
// leader's answers.
func (s *scene) evictor() *atomic.Int64 {
	s.T.Helper()
	l, running, count := s.ledger("an agent that requests evictions"), s.running(), &atomic.Int64{}
	node := s.agents.nodes[0]
	agent := kubernetes.NewForConfigOrDie(plane.AsAgent(s.fastConfig(), "default", node))
	go func() {
		for running.Err() == nil {
			eviction := report.Eviction{BootID: "it", Sequence: time.Now().UnixNano(), Namespace: "default", Name: "gone", UID: "gone", Rule: "none/none", Hash: "none"}
			verdict, err := plane.Evict(running, agent, node, eviction)
			switch {
			case err == nil && verdict.Result == "gone":
				count.Add(1)
			case err == nil:
				// A new leader has not read the eviction record yet.
				l.refused(fmt.Errorf("unexpected response: %+v", verdict))
			case strings.Contains(err.Error(), "x509") || strings.Contains(err.Error(), "tls:"):
				l.unexpected(err)
			default:
				l.refused(err)
			}
			time.Sleep(200 * time.Millisecond)
		}
	}()
	return count
}

// more waits until a counter has grown by five.
func (s *scene) more(count *atomic.Int64, what string) {
	s.T.Helper()
	wanted := count.Load() + 5
	s.Eventually(waitTimeout, what, func() error {
		if now := count.Load(); now < wanted {
			return fmt.Errorf("%d of %d times", now, wanted)
		}
		return nil
	})
}
