//go:build e2e

package consumers

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"plimsoll.dev/suite/plane"
)

const (
	loadLineQuery = "instance:plimsoll_load_line:ratio"
	cpuQuery      = "instance:plimsoll_cpu:ratio"
	memoryQuery   = "instance:plimsoll_memory:ratio"
	// podsOnEach is the number of pods on each node.
	podsOnEach = 2
)

// TestDescheduler runs the descheduler's LowNodeUtilization with each query: it must evict from the node over the threshold, and from no other.
func TestDescheduler(t *testing.T) {
	nodes := []string{"by-line", "by-cpu", "by-memory", "idle", "unknown"}
	s := &deschedulerScene{scene: open(t, nodes...), nodes: nodes, authority: plane.NewAuthority(t, "cluster-ca")}
	s.untilAnswer(http.StatusServiceUnavailable)
	s.fails(t, "server error: 503", loadLineQuery)
	s.agents.set(map[string]load{
		// Over its load line; the query's result must not exceed 1.
		"by-line": {line: 120, cpu: 58, memory: 29},
		"by-cpu":  {line: 70, cpu: 90, memory: 29},
		// 0.57 times 100 is a little less than 57.
		"by-memory": {line: 57, cpu: 58, memory: 90},
		"idle":      {line: 20, cpu: 20, memory: 20},
	})
	s.untilAnswer(http.StatusOK)
	for query, wanted := range map[string]struct {
		evicted string
		usage   map[string]int
	}{
		loadLineQuery: {"by-line", map[string]int{"by-line": 100, "by-cpu": 70, "by-memory": 57, "idle": 20, "unknown": 57}},
		cpuQuery:      {"by-cpu", map[string]int{"by-line": 58, "by-cpu": 90, "by-memory": 58, "idle": 20, "unknown": 58}},
		memoryQuery:   {"by-memory", map[string]int{"by-line": 29, "by-cpu": 29, "by-memory": 90, "idle": 20, "unknown": 29}},
	} {
		t.Run(query, func(t *testing.T) { s.evicts(t, query, wanted.evicted, wanted.usage) })
	}
	t.Run("with a token from a Secret", s.evictsWithSecret)
	t.Run("unknown query", func(t *testing.T) {
		s.fails(t, "bad_data", "up", loadLineQuery, cpuQuery, memoryQuery)
	})
	t.Run("without the controller's reports", func(t *testing.T) {
		s.agents.set(nil)
		s.untilAnswer(http.StatusServiceUnavailable)
		s.fails(t, "server error: 503", loadLineQuery)
	})
}

// A deschedulerScene has pods of a ReplicaSet on each node.
type deschedulerScene struct {
	*scene
	nodes     []string
	authority *plane.Authority
}

// policy writes the policy of the page docs/scheduling-integrations.md with this query, the address of this controller, and additional fields of the provider.
func (s *deschedulerScene) policy(query, provider string) string {
	s.T.Helper()
	text, err := os.ReadFile(plane.Absolute(s.T, "docs/scheduling-integrations.md"))
	if err != nil {
		s.T.Fatal(err)
	}
	const begin = "apiVersion: descheduler/v1alpha2\n"
	_, rest, found := strings.Cut(string(text), "```yaml\n"+begin)
	policy, _, ended := strings.Cut(rest, "```")
	if !found || !ended {
		s.T.Fatal("the page has no policy of the descheduler")
	}
	policy = begin + policy
	for old, replacement := range map[string]string{
		"http://plimsoll-scheduler-api.plimsoll.svc": plane.Local("http", s.pages) + provider, loadLineQuery: query,
	} {
		if strings.Count(policy, old) != 1 {
			s.T.Fatalf("the policy on the page does not name %s: %s", old, policy)
		}
		policy = strings.Replace(policy, old, replacement, 1)
	}
	return s.Write("policy.yaml", policy)
}

// command is the descheduler, run as in a pod: it finds the token and the CA of its service account where the kubelet mounts them.
func (s *deschedulerScene) command(t *testing.T, policy string, interval time.Duration) *exec.Cmd {
	t.Helper()
	const asInPod = `mount -t tmpfs tmpfs /run && mkdir -p "$1" && cp "$0"/* "$1" && shift && exec "$@"`
	command := exec.Command("unshare", "--map-root-user", "--mount", "sh", "-c", asInPod, s.account(), "/var/run/secrets/kubernetes.io/serviceaccount",
		plane.Tool(t, "descheduler"), "--kubeconfig="+s.Kubeconfig, "--policy-config-file="+policy, "--descheduling-interval="+interval.String(),
		"--v=3", fmt.Sprintf("--secure-port=%d", plane.FreePort(t)), "--bind-address=127.0.0.1", "--cert-dir="+s.File("descheduler"))
	server, err := url.Parse(s.Address)
	if err != nil {
		t.Fatal(err)
	}
	command.Env = append(os.Environ(), "KUBERNETES_SERVICE_HOST="+server.Hostname(), "KUBERNETES_SERVICE_PORT="+server.Port())
	return command
}

// account is a directory with the files that the kubelet mounts for a service account.
func (s *deschedulerScene) account() string {
	s.T.Helper()
	directory := s.File("account")
	if err := os.MkdirAll(directory, 0o700); err != nil {
		s.T.Fatal(err)
	}
	plane.WriteFile(s.T, filepath.Join(directory, "token"), "it")
	plane.WriteFile(s.T, filepath.Join(directory, "ca.crt"), s.authority.PEM)
	return directory
}

// run runs the descheduler once with this query, and returns its log.
func (s *deschedulerScene) run(t *testing.T, query string) string {
	t.Helper()
	log, err := s.command(t, s.policy(query, ""), 0).CombinedOutput()
	if err != nil {
		t.Fatalf("the descheduler: %v: %s", err, log)
	}
	return string(log)
}

// restore gives each node its pods.
func (s *deschedulerScene) restore(t *testing.T) {
	t.Helper()
	now, yes := int64(0), true
	if err := s.Kube.CoreV1().Pods("default").DeleteCollection(background, metav1.DeleteOptions{GracePeriodSeconds: &now}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, node := range s.nodes {
		for index := range podsOnEach {
			pod := newPod(fmt.Sprintf("%s-%d", node, index), "100m")
			pod.Spec.NodeName, pod.Spec.TerminationGracePeriodSeconds = node, &now
			pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "it", UID: "it", Controller: &yes}}
			s.create(pod)
		}
	}
}

// left is the number of remaining pods by node.
func (s *deschedulerScene) left(t *testing.T) map[string]int {
	t.Helper()
	pods, err := s.Kube.CoreV1().Pods("default").List(background, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	left := map[string]int{}
	for _, pod := range pods.Items {
		if pod.DeletionTimestamp == nil && pod.Status.Phase != corev1.PodFailed {
			left[pod.Spec.NodeName]++
		}
	}
	return left
}

// evicts checks that with this query the descheduler sees these percentages, and evicts one pod of this node.
func (s *deschedulerScene) evicts(t *testing.T, query, evicted string, usage map[string]int) {
	s.restore(t)
	log := s.run(t, query)
	for node, percent := range usage {
		line := fmt.Sprintf(`node=%q usage={"MetricResource":"%[2]d"} usagePercentage={"MetricResource":%[2]d}`, node, percent)
		if !strings.Contains(log, line) {
			t.Errorf("%s is not at %d %%", node, percent)
		}
	}
	for node, left := range s.left(t) {
		// The descheduler does not know how much a pod uses, and therefore evicts one per run.
		if wanted := podsOnEach - map[bool]int{true: 1}[node == evicted]; left != wanted {
			t.Errorf("%s has %d pods left instead of %d", node, left, wanted)
		}
	}
	if t.Failed() {
		t.Log(log)
	}
}

// evictsWithSecret: the descheduler can send a token from a Secret instead of its own, since the page needs none. Its first run comes before
// it has read the Secret, so it has to keep running.
func (s *deschedulerScene) evictsWithSecret(t *testing.T) {
	s.restore(t)
	s.Kubectl("create", "secret", "generic", "none", "--from-literal=prometheusAuthToken=none")
	policy := s.policy(loadLineQuery, ", authToken: {secretReference: {namespace: default, name: none}}")
	descheduler := s.command(t, policy, time.Second)
	log, err := os.Create(s.File("descheduler.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	descheduler.Stdout, descheduler.Stderr = log, log
	if err := descheduler.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		descheduler.Process.Kill()
		descheduler.Wait()
		if text, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Log(string(text))
		}
	}()
	s.Eventually(waitTimeout, "the descheduler evicts", func() error {
		if left := s.left(t)["by-line"]; left == podsOnEach {
			return fmt.Errorf("%d pods are left", left)
		}
		return nil
	})
}

// fails checks that the descheduler evicts nothing, and logs an error with these texts.
func (s *deschedulerScene) fails(t *testing.T, why, query string, texts ...string) {
	t.Helper()
	s.restore(t)
	log := s.run(t, query)
	lines := strings.Split(log, "\n")
	if !slices.ContainsFunc(lines, func(line string) bool {
		return strings.Contains(line, why) && !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) })
	}) {
		t.Errorf("no line of the log has %q and %q: %s", why, texts, log)
	}
	for _, node := range s.nodes {
		if left := s.left(t)[node]; left != podsOnEach {
			t.Errorf("%s has %d pods left", node, left)
		}
	}
}
