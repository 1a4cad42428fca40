//go:build e2e

package clients

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"plimsoll.dev/suite/plane"
)

// container is the chart's controller container, with its probes and its preStop hook.
func (s *scene) container() corev1.Container {
	command := exec.Command(s.Tool("helm"), "template", "plimsoll", plane.Absolute(s.T, "charts/plimsoll"), "--namespace", "plimsoll")
	manifests, err := command.Output()
	if err != nil {
		s.T.Fatalf("helm template: %v", err)
	}
	objects, err := plane.Objects(string(manifests))
	if err != nil {
		s.T.Fatal(err)
	}
	for _, object := range objects {
		if object.GetKind() != "Deployment" {
			continue
		}
		deployment := &appsv1.Deployment{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, deployment); err != nil {
			s.T.Fatal(err)
		}
		return deployment.Spec.Template.Spec.Containers[0]
	}
	s.T.Fatal("the chart has no Deployment")
	return corev1.Container{}
}

// join updates a replica's endpoint of the Service by its readiness, as the kubelet and the control plane do, until leave.
func (s *scene) join(r *replica) {
	s.T.Helper()
	running, end := context.WithCancel(background)
	ended := make(chan struct{})
	r.leave = func() { end(); <-ended }
	s.T.Cleanup(r.leave)
	go func() {
		defer close(ended)
		s.probe(running, r)
	}()
}

// leave removes a replica from the endpoints, as when its pod is deleted.
func (s *scene) leave(r *replica) {
	s.T.Helper()
	r.leave()
	s.Kubectl("delete", "endpointslice", service+"-"+r.name)
}

// end simulates the deletion of a replica's pod: it is removed from the endpoints after a moment, and terminated after the chart's preStop.
func (s *scene) end(r *replica) error {
	s.T.Helper()
	preStop := time.Duration(s.controller.Lifecycle.PreStop.Sleep.Seconds) * time.Second
	time.Sleep(preStop / 2)
	s.leave(r)
	time.Sleep(preStop / 2)
	return r.Terminate()
}

// probe probes a replica as the kubelet does, and updates its endpoint.
func (s *scene) probe(running context.Context, r *replica) {
	probe := s.controller.ReadinessProbe
	ticker := time.NewTicker(time.Duration(probe.PeriodSeconds) * time.Second)
	defer ticker.Stop()
	failures, ready, published := int32(0), false, false
	for known := false; running.Err() == nil; {
		if err := r.ready(probe); err == nil {
			failures, ready = 0, true
		} else if failures++; failures >= probe.FailureThreshold {
			ready = false
		}
		if (!known || ready != published) && s.updateEndpoint(running, r, ready) == nil {
			known, published = true, ready
		}
		select {
		case <-ticker.C:
		case <-running.Done():
		}
	}
}

// ready probes once.
func (r *replica) ready(probe *corev1.Probe) error {
	port := map[string]int{"http": r.metrics, "https": r.api}[probe.HTTPGet.Port.StrVal]
	scheme := map[corev1.URIScheme]string{"": "http", corev1.URISchemeHTTP: "http", corev1.URISchemeHTTPS: "https"}[probe.HTTPGet.Scheme]
	client := http.Client{
		Timeout:   time.Duration(probe.TimeoutSeconds) * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true},
	}
	response, err := client.Get(plane.Local(scheme, port) + probe.HTTPGet.Path)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if body, _ := io.ReadAll(response.Body); response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", response.Status, body)
	}
	return nil
}

// updateEndpoint writes the endpoint of a replica.
func (s *scene) updateEndpoint(running context.Context, r *replica, ready bool) error {
	slices := s.Kube.DiscoveryV1().EndpointSlices("default")
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: service + "-" + r.name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("https"), Port: ptr.To(int32(r.api)), Protocol: ptr.To(corev1.ProtocolTCP)}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{s.host}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
	}
	_, err := slices.Update(running, slice, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = slices.Create(running, slice, metav1.CreateOptions{})
	}
	return err
}

// waitEndpoint waits until a replica is a ready endpoint, or is none.
func (s *scene) waitEndpoint(r *replica, wanted bool) {
	s.T.Helper()
	s.Eventually(waitTimeout, fmt.Sprintf("%s is an endpoint: %t", r.name, wanted), func() error {
		slice, err := s.Kube.DiscoveryV1().EndpointSlices("default").Get(background, service+"-"+r.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if ready := *slice.Endpoints[0].Conditions.Ready; ready != wanted {
			return fmt.Errorf("it is ready: %t", ready)
		}
		return nil
	})
}
