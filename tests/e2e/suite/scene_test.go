//go:build e2e

package suite

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"plimsoll.dev/suite/plane"
)

// nodes are the names of the nodes under test: one or two.
var nodes []string

// toolsImage is the image of the tests' pods.
var toolsImage = cmp.Or(os.Getenv("PLIMSOLL_E2E_TOOLS_IMAGE"), "plimsoll.dev/e2e/tools:latest")

const (
	taintKey = "interference.crane.io"
	// threshold is the threshold of each scene's rule; cold and hot are values of its metric below and above it.
	threshold, cold, hot = 50, 10, 90
)

// scene is one test on one node, with its own namespace, metric and policies, which select only that node.
type scene struct {
	*testing.T
	node string
	// name is the name of the namespace, and of the policy objects if a test has only one of a kind.
	name string
	// settleTimeout is how long restoring may take once the policies are deleted.
	settleTimeout time.Duration
}

// busy are the locks of the nodes: scenes that affect only their own pods share a node, others have it to themselves.
var busy = map[string]*sync.RWMutex{}

// alone is a scene that has its node to itself.
func alone(t *testing.T, node string) *scene {
	t.Helper()
	busy[node].Lock()
	t.Cleanup(busy[node].Unlock)
	return newScene(t, node)
}

// aloneWithSpareNode is a scene that has all nodes to itself, so that another one is schedulable.
func aloneWithSpareNode(t *testing.T, node string) *scene {
	t.Helper()
	if len(nodes) < 2 {
		t.Skip("needs a second node")
	}
	lockAllNodes(t)
	return newScene(t, node)
}

// lockAllNodes locks all nodes until the test ends.
func lockAllNodes(t *testing.T) {
	t.Helper()
	for _, node := range nodes { // always in this order
		busy[node].Lock()
		t.Cleanup(busy[node].Unlock)
	}
}

// shared is a scene on a node that other scenes may use at the same time.
func shared(t *testing.T, node string) *scene {
	t.Helper()
	busy[node].RLock()
	t.Cleanup(busy[node].RUnlock)
	return newScene(t, node)
}

// newScene creates the namespace. The cleanup deletes the policies and waits until none of their effects is in force.
func newScene(t *testing.T, node string) *scene {
	t.Helper()
	words := strings.ToLower(regexp.MustCompile("[A-Z][a-z]+").FindString(strings.TrimPrefix(t.Name(), "Test")))
	s := &scene{t, node, fmt.Sprintf("%s-%s-%04x", words, node, rand.IntN(1<<16)), 30 * time.Second}
	_, err := kube.CoreV1().Namespaces().Create(background, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.name}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			s.logState()
		}
		s.noPolicies()
		s.waitSettled()
		s.set(0)
		kubectl(t, "delete", "namespace", s.name, "--wait=false")
	})
	s.set(cold)
	return s
}

// logState logs what an operator would check first.
func (s *scene) logState() {
	for _, args := range [][]string{
		{"get", "nodewatermarks"},
		{"get", "nodewatermark", s.node, "-o", "jsonpath={.status}"},
		{"get", "pods", "-n", s.name, "-o", "wide"},
		{"get", "events", "-n", s.name, "--field-selector=reason!=MissingClusterDNS", "-o", "custom-columns=AT:.metadata.creationTimestamp,ON:.involvedObject.name,REASON:.reason,MESSAGE:.message"},
		{"logs", "-n", namespace, agentPod(s.node), "--tail=25"},
	} {
		out, err := tryKubectl("", args...)
		if lines := strings.Split(out, "\n"); len(lines) > 40 {
			out = strings.Join(lines[len(lines)-40:], "\n")
		}
		s.Logf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// metric is the name of the scene's metric.
func (s *scene) metric() string { return "e2e_" + strings.ReplaceAll(s.name, "-", "_") }

// set sets the scene's metric; 0 removes it.
func (s *scene) set(value int) { s.setMetric(s.metric(), value) }

func (s *scene) setMetric(name string, value int) {
	s.Helper()
	text := fmt.Sprint(value)
	if value == 0 {
		text = ""
	}
	if _, err := queryGauge("/set", name, text); err != nil {
		s.Fatal(err)
	}
}

// action applies an AvoidanceAction; spec is YAML in flow style.
func (s *scene) action(name, spec string) {
	s.Helper()
	s.policy("AvoidanceAction", name, spec)
}

// rule is a NodeQOS with one rule, hot, that selects the scene's node.
type rule struct {
	action    string
	strategy  string // Enforce by default
	metric    string // the scene's own by default
	threshold int    // the constant by default
	labels    string // of the node, besides its name
}

// rule applies a NodeQOS.
func (s *scene) rule(name string, r rule) {
	s.Helper()
	if r.strategy == "" {
		r.strategy = "Enforce"
	}
	if r.metric == "" {
		r.metric = s.metric()
	}
	if r.threshold == 0 {
		r.threshold = threshold
	}
	s.policy("NodeQOS", name, fmt.Sprintf(`{selector: {matchLabels: {kubernetes.io/hostname: %s, %s}},
  nodeQualityProbe: {timeoutSeconds: 2, httpGet: {scheme: HTTP, host: %s, port: 80, path: /metrics}},
  rules: [{name: hot, avoidanceThreshold: 2, restoreThreshold: 2, actionName: %s, strategy: %s, metricRule: {name: %s, value: %d}}]}`,
		s.node, r.labels, gaugeAddress, r.action, r.strategy, r.metric, r.threshold))
}

// allow applies a PodQOS that matches the pods of an app in the scene's namespace, or all of them if app is empty.
func (s *scene) allow(name, app string, actions ...string) {
	s.Helper()
	labels := ""
	if app != "" {
		labels = "labelSelector: {matchLabels: {app: " + app + "}}, "
	}
	s.policy("PodQOS", name, fmt.Sprintf("{allowedActions: [%s], %sscopeSelector: {matchExpressions: [{scopeName: Namespace, operator: In, values: [%s]}]}}",
		strings.Join(actions, ", "), labels, s.name))
}

// policy applies one policy object. Edits reach the node at once.
func (s *scene) policy(kind, name, spec string) {
	s.Helper()
	apply(s, fmt.Sprintf(`apiVersion: ensurance.crane.io/v1alpha1
kind: %s
metadata: {name: %s, labels: {e2e: %s}, annotations: {plimsoll.dev/rollout: immediate}}
spec: %s
`, kind, name, s.name, spec))
}

// noPolicies deletes the scene's policies.
func (s *scene) noPolicies() {
	s.Helper()
	kubectl(s, "delete", "nodeqos,podqos,avoidanceaction", "-l", "e2e="+s.name, "--ignore-not-found")
}

// waitSettled waits until nothing of the scene is in force on the node.
func (s *scene) waitSettled() {
	s.Helper()
	eventually(s, s.settleTimeout, "nothing is in force any more", func() error {
		now, err := watermarkOf(s.node)
		if err != nil {
			return err
		}
		for _, pod := range now.Status.Throttled {
			if pod.Namespace == s.name {
				return fmt.Errorf("%s is throttled to %d %%", pod.Pod, pod.Ratio)
			}
		}
		for _, rule := range now.Status.Rules {
			if strings.HasPrefix(rule.ID, s.name) {
				return fmt.Errorf("rule %s is still enforced", rule.ID)
			}
		}
		return nil
	})
}

// work is a pod of the tests.
type work struct {
	name             string
	args             []string // of podtool
	requests, limits string   // of CPU, none if empty
	labels           map[string]string
	annotations      map[string]string
	grace            int64 // grace period in seconds, by default 1
	anywhere         bool  // may run on any node, not only the scene's
	intolerant       bool  // does not tolerate our taint
	priority         string
}

// template is the pod template of a work.
func (s *scene) template(w work) corev1.PodTemplateSpec {
	resources := func(cpu string) corev1.ResourceList {
		if cpu == "" {
			return nil
		}
		return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse("32Mi")}
	}
	spec := corev1.PodSpec{
		TerminationGracePeriodSeconds: ptr.To(max(1, w.grace)),
		PriorityClassName:             w.priority,
		AutomountServiceAccountToken:  ptr.To(false),
		Containers: []corev1.Container{{
			Name: "work", Image: toolsImage, ImagePullPolicy: corev1.PullIfNotPresent, Args: w.args,
			Resources: corev1.ResourceRequirements{Requests: resources(w.requests), Limits: resources(w.limits)},
		}},
	}
	if !w.anywhere {
		spec.NodeSelector = map[string]string{corev1.LabelHostname: s.node}
	}
	if !w.intolerant {
		spec.Tolerations = []corev1.Toleration{{Key: taintKey, Operator: corev1.TolerationOpExists}}
	}
	labels := map[string]string{"app": w.name}
	for key, value := range w.labels {
		labels[key] = value
	}
	return corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels, Annotations: w.annotations}, Spec: spec}
}

// start creates pods without waiting for them.
func (s *scene) start(pods ...work) {
	s.Helper()
	for _, w := range pods {
		s.startChanged(w, func(*corev1.PodSpec) {})
	}
}

// startChanged creates a pod that is changed by a function first.
func (s *scene) startChanged(w work, change func(*corev1.PodSpec)) {
	s.Helper()
	template := s.template(w)
	template.Name = w.name
	change(&template.Spec)
	_, err := kube.CoreV1().Pods(s.name).Create(background, &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}, metav1.CreateOptions{})
	if err != nil {
		s.Fatal(err)
	}
}

// running creates pods and waits until they run.
func (s *scene) running(pods ...work) {
	s.Helper()
	s.start(pods...)
	for _, w := range pods {
		s.waitRunning(w.name)
	}
}

func (s *scene) waitRunning(name string) {
	s.Helper()
	eventually(s, 90*time.Second, "pod "+name+" runs", func() error {
		pod, err := kube.CoreV1().Pods(s.name).Get(background, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if !plane.IsReady(pod) {
			return fmt.Errorf("it is %s", pod.Status.Phase)
		}
		return nil
	})
}

// pod reads a pod of the scene.
func (s *scene) pod(name string) *corev1.Pod {
	s.Helper()
	pod, err := kube.CoreV1().Pods(s.name).Get(background, name, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	return pod
}

// events are the events about an object, oldest first, as `Reason: message`.
func events(t testing.TB, kind, ns, name string) []string {
	t.Helper()
	list, err := kube.CoreV1().Events(ns).List(background, metav1.ListOptions{FieldSelector: "involvedObject.kind=" + kind + ",involvedObject.name=" + name})
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(list.Items, func(a, b corev1.Event) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
	var reported []string
	for _, event := range list.Items {
		reported = append(reported, event.Reason+": "+event.Message)
	}
	return reported
}

// eventCounts counts the events about an object, by `Reason: message`.
func eventCounts(t testing.TB, kind, ns, name string) map[string]int {
	t.Helper()
	list, err := kube.CoreV1().Events(ns).List(background, metav1.ListOptions{FieldSelector: "involvedObject.kind=" + kind + ",involvedObject.name=" + name})
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]int{}
	for _, event := range list.Items {
		counts[event.Reason+": "+event.Message] += max(1, int(event.Count))
	}
	return counts
}

// packetFilter is iptables or ip6tables, depending on the cluster's pod addresses.
func packetFilter(t *testing.T) string {
	t.Helper()
	if strings.Contains(componentPods(t, "controller")[0].Status.PodIP, ":") {
		return "ip6tables"
	}
	return "iptables"
}

// gaugeAddress is the address of the service that serves the tests' metrics.
var gaugeAddress string

const gauge = `
apiVersion: v1
kind: Namespace
metadata: {name: e2e}
---
apiVersion: v1
kind: Pod
metadata: {name: gauge, namespace: e2e, labels: {app: gauge}}
spec:
  nodeSelector: {kubernetes.io/hostname: %s}
  tolerations: [{operator: Exists}]
  terminationGracePeriodSeconds: 1
  containers:
  - {name: gauge, image: %q, imagePullPolicy: IfNotPresent, args: [gauge, ":8080"]}
---
apiVersion: v1
kind: Service
metadata: {name: gauge, namespace: e2e}
spec:
  selector: {app: gauge}
  ports: [{port: 80, targetPort: 8080}]
`

// startGauge runs the server of the tests' metrics.
func startGauge() error {
	if _, err := tryKubectl(fmt.Sprintf(gauge, nodes[0], toolsImage), "apply", "-f", "-"); err != nil {
		return err
	}
	if _, err := tryKubectl("", "wait", "-n", "e2e", "pod/gauge", "--for=condition=Ready", "--timeout=120s"); err != nil {
		return err
	}
	// Without a readiness probe, a pod is Ready before it listens.
	for begun := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		if _, err := queryGauge("/metrics", "", ""); err == nil {
			break
		} else if time.Since(begun) > 30*time.Second {
			return err
		}
	}
	service, err := kube.CoreV1().Services("e2e").Get(background, "gauge", metav1.GetOptions{})
	if err != nil {
		return err
	}
	gaugeAddress = service.Spec.ClusterIP
	return nil
}

// queryGauge sends a request to the gauge through the API server.
func queryGauge(path, key, value string) ([]byte, error) {
	return queryGaugeOf("e2e", "gauge:8080", path, key, value)
}

// queryGaugeOf sends it to another pod that runs podtool's gauge, given as NAME:PORT.
func queryGaugeOf(namespace, pod, path, key, value string) ([]byte, error) {
	proxy := "/api/v1/namespaces/" + namespace + "/pods/" + pod + "/proxy"
	request := kube.CoreV1().RESTClient().Get().AbsPath(proxy + path).Timeout(0) // the gauge would take a timeout for a metric
	if key != "" {
		request = request.Param(key, value)
	}
	return request.DoRaw(background)
}

// noteURL is the URL at which a pod reports that it is alive.
func noteURL(who string) string {
	return "http://" + gaugeAddress + "/note?who=" + url.QueryEscape(who)
}
