//go:build e2e

// Package consumers tests the pages that the controller serves with --scheduler-listen with the programs that read them, each built
// unchanged from its own Go module: a scheduler with Trimaran's plugins (scheduler-plugins), and the descheduler. API server and controller
// are real; the nodes are only objects, and the tests simulate their agents.
package consumers

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"plimsoll.dev/suite/plane"
)

const waitTimeout = time.Minute

var background = context.Background()

// A scene is a control plane with a controller, nodes of 4 CPUs and 8 GiB, and agents of some of them.
type scene struct {
	*plane.Plane
	controller *plane.Process
	// metrics is the port of the controller's own metrics, pages the port of the pages for schedulers.
	metrics, pages int
	agents         *agents
}

// open starts a control plane with these nodes, and a controller that receives no reports yet.
func open(t *testing.T, nodes ...string) *scene {
	t.Helper()
	s := &scene{Plane: plane.Start(t, nil), metrics: plane.FreePort(t), pages: plane.FreePort(t)}
	for _, name := range nodes {
		s.createNode(name)
	}
	reports := plane.FreePort(t)
	s.controller = s.Controller("admin", "--pod-ip", "127.0.0.1", "--listen", address(s.metrics), "--metrics-api-listen", address(plane.FreePort(t)),
		"--report-listen", address(reports), "--report-service", plane.ReportService, "--scheduler-listen", address(s.pages))
	s.agents = newAgents(s.Plane, address(reports))
	return s
}

func address(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }

func (s *scene) createNode(name string) {
	s.T.Helper()
	capacity := quantities("4", "8Gi")
	capacity[corev1.ResourcePods] = resource.MustParse("110")
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name}},
		Status: corev1.NodeStatus{
			Capacity: capacity, Allocatable: capacity, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}
	if _, err := s.Kube.CoreV1().Nodes().Create(background, node, metav1.CreateOptions{}); err != nil {
		s.T.Fatal(err)
	}
}

func quantities(cpu, memory string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}
}

// newPod is a pod with a request for CPU.
func newPod(name, cpu string) *corev1.Pod {
	container := corev1.Container{Name: "it", Image: "it.example/it:1"}
	container.Resources.Requests = quantities(cpu, "128Mi")
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{Containers: []corev1.Container{container}}}
}

func (s *scene) create(pod *corev1.Pod) {
	s.T.Helper()
	if _, err := s.Kube.CoreV1().Pods("default").Create(background, pod, metav1.CreateOptions{}); err != nil {
		s.T.Fatal(err)
	}
}

func (s *scene) delete(name string) {
	s.T.Helper()
	now := int64(0)
	if err := s.Kube.CoreV1().Pods("default").Delete(background, name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		s.T.Fatal(err)
	}
}

// get requests one of the pages.
func (s *scene) get(path string) (code int, body string, err error) {
	client := http.Client{Timeout: 5 * time.Second}
	response, err := client.Get(plane.Local("http", s.pages) + path)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, strings.TrimSpace(string(text)), err
}

// untilAnswer waits until load-watcher's page has this status.
func (s *scene) untilAnswer(code int) {
	s.T.Helper()
	s.Eventually(waitTimeout, fmt.Sprintf("the page answers %d", code), func() error {
		found, body, err := s.get("/watcher")
		if err == nil && found != code {
			err = fmt.Errorf("it answers %d: %s", found, body)
		}
		return err
	})
}
