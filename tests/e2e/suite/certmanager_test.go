//go:build e2e

package suite

import (
	"crypto/sha256"
	"encoding/pem"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"plimsoll.dev/suite/pages"
	"plimsoll.dev/suite/plane"
	"plimsoll.dev/suite/report"
)

const (
	issuedSecret    = "plimsoll-metrics-tls"
	authoritySecret = "plimsoll-metrics-authority"
)

// TestCertManagerRenewsCertificateWithoutFailedRequest switches an installation to cert-manager as docs/kubernetes.md
// describes. Its controllers run beside the cluster; the kubelets mount the Secrets and update them.
func TestCertManagerRenewsCertificateWithoutFailedRequest(t *testing.T) {
	onlyLong(t)
	needShell(t)
	t.Parallel()
	lockAllNodes(t) // others may restart neither controllers nor agents
	s := newScene(t, nodes[0])
	withCertManager(t)
	waitServed(t, 5*time.Minute)
	waitEvictionsAnswered(t, s.node)
	if out, err := helm("", "test", "plimsoll", "--namespace", namespace); err != nil {
		t.Fatalf("helm test: %v\n%s", err, out)
	}

	before, restarts, changes := issued(t), restartsOf(t), leaderChanges(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(kubectl(t, "logs", "-n", namespace, "-l", "app.kubernetes.io/component=controller", "--prefix", "--tail=40"))
		}
	})
	unharmed := generateTraffic(t)
	for _, name := range []string{authoritySecret, "plimsoll-metrics"} {
		renew(t, name)
	}
	if now := issued(t); string(now["ca.crt"]) == string(before["ca.crt"]) || string(now["tls.key"]) == string(before["tls.key"]) {
		t.Error("the CA or the key was not renewed")
	}
	// A kubelet updates the mount within about two minutes, and the replica waits five.
	t.Logf("both replicas serve the renewed certificate after %s", waitServed(t, 12*time.Minute).Round(time.Second))
	waitEvictionsAnswered(t, s.node)
	events, broken := unharmed()
	// On a stalled machine leadership may change; then watches restart, which is expected.
	if leaderChanged := leaderChanges(t) > changes; (broken != nil || events == 0) && !leaderChanged {
		t.Errorf("the watch received %d events and then failed: %v", events, broken)
	}
	if now := restartsOf(t); now != restarts {
		t.Errorf("replicas restarted: restarts are %s, were %s", now, restarts)
	}
}

// withCertManager follows that page with cert-manager running; the test's cleanup reverts it.
func withCertManager(t *testing.T) {
	t.Helper()
	definitions := plane.CertManagerCRDFiles(t)
	t.Cleanup(func() {
		if err := install(); err != nil {
			t.Error(err)
		}
		kubectl(t, "rollout", "status", "-n", namespace, "deployment/plimsoll-controller", "--timeout=180s")
		for _, file := range definitions {
			kubectl(t, "delete", "-f", file, "--ignore-not-found")
		}
		kubectl(t, "delete", "secret", "-n", namespace, issuedSecret, authoritySecret, "--ignore-not-found")
	})
	for _, file := range definitions {
		kubectl(t, "apply", "--server-side", "-f", file)
	}
	for _, file := range definitions {
		// kubectl does not wait for an object that has no status yet.
		eventually(t, time.Minute, file+" is served", func() error {
			_, err := tryKubectl("", "wait", "--for=condition=Established", "-f", file, "--timeout=30s")
			return err
		})
	}
	kubeconfig := absolute("target/e2e/kubeconfig")
	plane.CertManager(t, kubeconfig)
	repository, tag, err := image()
	if err != nil {
		t.Fatal(err)
	}
	r := &release{values: filepath.Join(t.TempDir(), "values.yaml")}
	r.setValues(t, repository, tag, generousBudgets)
	page := pages.Read(t, absolute("."), "docs/kubernetes.md", binary(), "KUBECONFIG="+kubeconfig)
	page.Helm(plane.Tool(t, plane.Helm()), r.values)
	if out := page.Run(t, "Certificates"); strings.Count(out, "True") != 2 {
		t.Errorf("not both certificates are ready: %s", out)
	}
	waitReplicasReplaced(t)
	runbook := pages.Read(t, absolute("."), "docs/runbook.md", binary(), "KUBECONFIG="+kubeconfig)
	if out := runbook.Run(t, "With cert-manager"); !strings.Contains(out, "Certificate is up to date and has not expired") {
		t.Errorf("the runbook's commands printed %s", out)
	}
}

// issued is the data of the Secret that cert-manager wrote.
func issued(t *testing.T) map[string][]byte {
	t.Helper()
	found, err := kube.CoreV1().Secrets(namespace).Get(background, issuedSecret, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return found.Data
}

// waitServed waits until both replicas serve that certificate, and returns how long it took.
func waitServed(t *testing.T, limit time.Duration) time.Duration {
	t.Helper()
	started := time.Now()
	eventually(t, limit, "both replicas serve the certificate that cert-manager issued last", func() error {
		block, _ := pem.Decode(issued(t)["tls.crt"])
		wanted := fmt.Sprintf("%X", sha256.Sum256(block.Bytes))
		pods := componentPods(t, "controller")
		for _, pod := range pods {
			script := fmt.Sprintf("openssl s_client -connect %s </dev/null 2>/dev/null | openssl x509 -noout -fingerprint -sha256", net.JoinHostPort(pod.Status.PodIP, "8443"))
			served, err := tryOnNode("v1", script)
			if err != nil {
				return err
			}
			if !strings.Contains(strings.ReplaceAll(served, ":", ""), wanted) {
				return fmt.Errorf("%s serves %s", pod.Name, served)
			}
		}
		if len(pods) != 2 {
			return fmt.Errorf("expected two controller pods: %v", podNames(pods))
		}
		return nil
	})
	return time.Since(started)
}

// renew has cert-manager renew a Certificate.
func renew(t *testing.T, name string) {
	t.Helper()
	var renewed func() error
	eventually(t, time.Minute, "renewal of "+name+" is requested", func() (err error) {
		renewed, err = plane.Renew(objects.Resource(plane.Certificates).Namespace(namespace), name)
		return err
	})
	eventually(t, 2*time.Minute, name+" is renewed", renewed)
}

// waitEvictionsAnswered requests, as a node's agent through the API server, the eviction of a deleted pod until the leader answers.
func waitEvictionsAnswered(t *testing.T, node string) {
	t.Helper()
	agent, err := kubernetes.NewForConfig(plane.AsAgent(access, namespace, node))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "the leader answers an eviction request", func() error {
		verdict, err := plane.Evict(background, agent, node, gone())
		if err == nil && verdict.Result != "gone" {
			err = fmt.Errorf("unexpected response: %+v", verdict)
		}
		return err
	})
}

// gone is a unique request to evict a pod that does not exist, with a boot ID that no node has.
func gone() report.Eviction {
	return report.Eviction{BootID: "e2e", Sequence: time.Now().UnixNano(), Namespace: "default", Name: "gone", UID: "gone", Rule: "none/none", Hash: "none"}
}

// leaderChanges counts the changes of leadership in the replicas' logs.
func leaderChanges(t *testing.T) int {
	t.Helper()
	logs := kubectl(t, "logs", "-n", namespace, "-l", "app.kubernetes.io/component=controller", "--tail=-1")
	return strings.Count(logs, "leadership changed")
}

// restartsOf lists the UID and restart count of each replica.
func restartsOf(t *testing.T) string {
	t.Helper()
	var restarts []string
	for _, pod := range componentPods(t, "controller") {
		restarts = append(restarts, fmt.Sprintf("%s %d", pod.UID, pod.Status.ContainerStatuses[0].RestartCount))
	}
	return strings.Join(restarts, ", ")
}
