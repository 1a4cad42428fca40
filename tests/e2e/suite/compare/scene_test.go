//go:build e2e

package compare

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"plimsoll.dev/suite/plane"
)

const (
	waitTimeout = 2 * time.Minute
	// Pods per node: as many as Plimsoll reports individually.
	podsEach = 10
	// The value in metrics-server's manifests and chart; the program's default is a minute.
	resolution = 15 * time.Second
	// The agents' name among the API server's users.
	agents = "agents"
)

var background = context.Background()

// A scene has kwok nodes, served by metrics-server and by two replicas of the controller.
type scene struct {
	*plane.Plane
	nodes         int
	audit         string
	metricsServer *server
	replicas      []*server
}

// A server is a measured process, with its name among the API server's users.
type server struct {
	*plane.Process
	user    string
	metrics int
}

func open(t *testing.T, nodes int) *scene {
	directory := t.TempDir()
	authority := plane.NewAuthority(t, "front-proxy-ca")
	flags := append(plane.AggregationFlags(t, directory, authority), "--max-requests-inflight=800", "--max-mutating-requests-inflight=400",
		// metrics-server requires a client CA, as every cluster has one.
		"--client-ca-file="+plane.WriteFile(t, filepath.Join(directory, "client-ca.crt"), plane.NewAuthority(t, "client-ca").PEM))
	log, audited := audit(t, directory)
	s := &scene{nodes: nodes, audit: log}
	s.Plane = plane.Start(t, append(flags, audited...), users...)
	s.kwok(authority)
	s.populate()
	s.controllers()
	s.report()
	s.serveMetrics(directory)
	for _, v := range s.views() {
		s.Eventually(2*waitTimeout, v.path+" lists all objects", func() error { return s.poll(v) })
	}
	return s
}

// kwok simulates the kubelets. Each has its own address, like real ones, so that a scraper has a connection to each.
func (s *scene) kwok(authority *plane.Authority) {
	certificate, key := authority.Client("kubelet")
	s.Run("kwok", "--kubeconfig="+s.Kubeconfig, "--config="+s.Write("kwok.json", kubelet()), "--manage-all-nodes=true",
		"--node-lease-duration-seconds=200", "--cidr=10.128.0.1/12", "--node-port="+strconv.Itoa(plane.FreePort(s.T)),
		"--tls-cert-file="+s.Write("kubelet.crt", certificate), "--tls-private-key-file="+s.Write("kubelet.key", key))
}

// populate creates the nodes and their pods, and waits until kwok runs them.
func (s *scene) populate() {
	if _, err := s.Kube.CoreV1().Namespaces().Create(background, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, metav1.CreateOptions{}); err != nil {
		s.T.Fatal(err)
	}
	s.each(s.nodes, func(index int) error {
		_, err := s.Kube.CoreV1().Nodes().Create(background, node(index), metav1.CreateOptions{})
		return err
	})
	s.each(s.nodes*podsEach, func(index int) error {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("checkout-%d", index)}, Spec: corev1.PodSpec{
			NodeName: name(index / podsEach), Containers: []corev1.Container{{Name: "it", Image: "none"}},
		}}
		_, err := s.Kube.CoreV1().Pods("shop").Create(background, pod, metav1.CreateOptions{})
		return err
	})
	s.Eventually(2*waitTimeout, "kwok runs the pods", func() error {
		waiting, err := s.Kube.CoreV1().Pods("shop").List(background, metav1.ListOptions{FieldSelector: "status.phase!=Running"})
		if err == nil && len(waiting.Items) > 0 {
			err = fmt.Errorf("%d pods do not run", len(waiting.Items))
		}
		return err
	})
}

// each runs a function this many times, some in parallel.
func (s *scene) each(count int, do func(index int) error) {
	s.T.Helper()
	var all sync.WaitGroup
	slots := make(chan struct{}, 20)
	for index := range count {
		slots <- struct{}{}
		all.Go(func() {
			if err := do(index); err != nil {
				s.T.Error(err)
			}
			<-slots
		})
	}
	all.Wait()
	if s.T.Failed() {
		s.T.FailNow()
	}
}

func name(node int) string { return fmt.Sprintf("node%04d", node) }

func node(index int) *corev1.Node {
	size := corev1.ResourceList{"cpu": resource.MustParse("8"), "memory": resource.MustParse("32Gi"), "pods": resource.MustParse("110")}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name(index), Annotations: map[string]string{
			"metrics.k8s.io/resource-metrics-path": "/metrics/nodes/" + name(index) + "/metrics/resource",
		}},
		Status: corev1.NodeStatus{Capacity: size, Allocatable: size, Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: fmt.Sprintf("127.1.%d.%d", index/250, 1+index%250)},
		}},
	}
}

// controllers starts the chart's number of replicas, and waits until one leads.
func (s *scene) controllers() {
	s.Aggregate("metrics.plimsoll.dev", "v1alpha1", "plimsoll-metrics")
	reportAddresses := []string{}
	for _, user := range []string{"plimsoll-0", "plimsoll-1"} {
		r := &server{user: user, metrics: plane.FreePort(s.T)}
		api, reports := plane.FreePort(s.T), fmt.Sprintf("127.0.0.1:%d", plane.FreePort(s.T))
		r.Process = s.Controller(user, "--listen", fmt.Sprintf("127.0.0.1:%d", r.metrics), "--pod-ip", "127.0.0.1",
			"--metrics-api-listen", fmt.Sprintf("0.0.0.0:%d", api), "--report-listen", reports, "--report-service", plane.ReportService)
		s.Endpoint("plimsoll-metrics", user, api)
		s.replicas = append(s.replicas, r)
		reportAddresses = append(reportAddresses, reports)
	}
	s.Eventually(waitTimeout, "a replica leads", func() error {
		leads := s.replicas[0].leads()
		if leads == s.replicas[1].leads() {
			return fmt.Errorf("no replica leads, or both do")
		}
		if !leads {
			s.replicas[0], s.replicas[1] = s.replicas[1], s.replicas[0]
		}
		return nil
	})
	s.PublishEndpoints(reportAddresses...)
}

func (r *server) leads() bool {
	leads, err := plane.Metric(r.metrics, "plimsoll_controller_leader")
	return err == nil && leads > 0
}

// report starts the simulated agents: a report every 10 s to every replica, and a Lease renewal every minute.
func (s *scene) report() {
	program := s.BuildLoad()
	load := exec.Command(program, append(s.LoadFlags(), "--nodes", strconv.Itoa(s.nodes), "--kubeconfig", s.KubeconfigFor(agents))...)
	load.Stderr = os.Stderr
	if err := load.Start(); err != nil {
		s.T.Fatal(err)
	}
	s.T.Cleanup(func() {
		load.Process.Kill()
		load.Wait()
	})
}

// serveMetrics starts metrics-server as its manifests do, except that it runs on this machine and does not verify kubelet certificates.
func (s *scene) serveMetrics(directory string) {
	const service = "metrics-server"
	s.Aggregate("metrics.k8s.io", "v1beta1", service)
	s.Kubectl("patch", "apiservice", "v1beta1.metrics.k8s.io", "--type=merge", "-p", `{"spec":{"insecureSkipTLSVerify":true}}`)
	port, kubeconfig := plane.FreePort(s.T), s.KubeconfigFor(service)
	s.metricsServer = &server{user: service, Process: s.Run(service, "--cert-dir="+directory, "--secure-port="+strconv.Itoa(port),
		"--kubeconfig="+kubeconfig, "--authentication-kubeconfig="+kubeconfig, "--authorization-kubeconfig="+kubeconfig,
		"--kubelet-preferred-address-types=InternalIP,ExternalIP,Hostname", "--kubelet-use-node-status-port",
		"--metric-resolution="+resolution.String(), "--kubelet-insecure-tls")}
	s.Endpoint(service, "only", port)
}

// servers are the measured processes: metrics-server, the leader and the standby.
func (s *scene) servers() []*server { return append([]*server{s.metricsServer}, s.replicas...) }

// marshal panics for values that cannot be marshalled: all here can.
func marshal(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	return string(text)
}
