//go:build e2e

package placement

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"plimsoll.dev/suite/plane"
)

// secondSchedulerWorks checks that with only the chart's roles it is elected, and serves the probes of its Deployment.
func (c *cluster) secondSchedulerWorks(t *testing.T) {
	c.Eventually(waitTimeout, "the second scheduler leads", func() error {
		lease, err := c.Kube.CoordinationV1().Leases(namespace).Get(background, "plimsoll-scheduler", metav1.GetOptions{})
		if err == nil && (lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity == "") {
			err = fmt.Errorf("no replica holds the Lease")
		}
		return err
	})
	insecure := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	for _, path := range []string{"/livez", "/readyz"} {
		c.Eventually(waitTimeout, path, func() error {
			answer, err := insecure.Get(plane.Local("https", c.secondPort) + path)
			if err != nil {
				return err
			}
			defer answer.Body.Close()
			if text, _ := io.ReadAll(answer.Body); answer.StatusCode != http.StatusOK {
				err = fmt.Errorf("%s: %s", answer.Status, text)
			}
			return err
		})
	}
}

// secondSchedulerLacksNothing checks after all scenes that no request was forbidden.
func (c *cluster) secondSchedulerLacksNothing(t *testing.T) {
	t.Logf("the second scheduler has %s kB of memory", c.second.Resident())
	for line := range strings.Lines(c.second.Log()) {
		if strings.Contains(line, "forbidden") {
			t.Errorf("the second scheduler lacks a permission: %s", line)
		}
	}
}

// policyAddsTheSameTerms checks that the admission policy adds the terms of the second scheduler to pods of every shape, and changes nothing else.
func (c *cluster) policyAddsTheSameTerms(t *testing.T) {
	terms := addedAffinity(t, c.config())
	own := corev1.PreferredSchedulingTerm{Weight: 7, Preference: corev1.NodeSelectorTerm{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "disk", Operator: corev1.NodeSelectorOpExists}}}}
	fields := corev1.PreferredSchedulingTerm{Weight: 7, Preference: corev1.NodeSelectorTerm{
		MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{"a"}}}}}
	load := corev1.PreferredSchedulingTerm{Weight: 7, Preference: corev1.NodeSelectorTerm{
		MatchExpressions: []corev1.NodeSelectorRequirement{{Key: loadLabel, Operator: corev1.NodeSelectorOpExists}}}}
	required := &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{own.Preference}}
	apart := &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
		TopologyKey: "kubernetes.io/hostname", LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}}}}
	nodeAffinity := func(required *corev1.NodeSelector, preferred ...corev1.PreferredSchedulingTerm) *corev1.Affinity {
		return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: required, PreferredDuringSchedulingIgnoredDuringExecution: preferred}}
	}
	owner := func(kind string) shape {
		return func(pod *corev1.Pod) {
			pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: kind, Name: "it", UID: "u"}}
		}
	}
	affine := func(affinity *corev1.Affinity) shape { return func(pod *corev1.Pod) { pod.Spec.Affinity = affinity } }
	unchanged := func(pod *corev1.Pod) {}
	for name, each := range map[string]struct {
		as    way
		shape shape
		adds  bool
	}{
		"no affinity":                          {byPolicy, unchanged, true},
		"empty affinity":                       {byPolicy, affine(&corev1.Affinity{}), true},
		"empty nodeAffinity":                   {byPolicy, affine(nodeAffinity(nil)), true},
		"own preference":                       {byPolicy, affine(nodeAffinity(nil, own)), true},
		"own preference by field":              {byPolicy, affine(nodeAffinity(nil, fields)), true},
		"own requirement":                      {byPolicy, affine(nodeAffinity(required)), true},
		"own requirement and preference":       {byPolicy, affine(nodeAffinity(required, own)), true},
		"own anti-affinity":                    {byPolicy, affine(&corev1.Affinity{PodAntiAffinity: apart}), true},
		"pod of a ReplicaSet":                  {byPolicy, owner("ReplicaSet"), true},
		"own preference for a load":            {byPolicy, affine(nodeAffinity(nil, own, load)), false},
		"pod of a DaemonSet":                   {byPolicy, owner("DaemonSet"), false},
		"bound pod":                            {byPolicy, func(pod *corev1.Pod) { pod.Spec.NodeName = "a" }, false},
		"pod of a namespace without the label": {bare, unchanged, false},
	} {
		pod := newPod(each.as, "it", nil)
		each.shape(pod)
		wanted := pod.DeepCopy()
		if each.adds {
			if wanted.Spec.Affinity == nil {
				wanted.Spec.Affinity = &corev1.Affinity{}
			}
			if wanted.Spec.Affinity.NodeAffinity == nil {
				wanted.Spec.Affinity.NodeAffinity = &corev1.NodeAffinity{}
			}
			preferred := &wanted.Spec.Affinity.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution
			*preferred = append(*preferred, terms...)
		}
		created, err := c.Kube.CoreV1().Pods(each.as.namespace).Create(background, pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if !equality.Semantic.DeepEqual(created.Spec.Affinity, wanted.Spec.Affinity) {
			text, _ := json.Marshal(created.Spec.Affinity)
			t.Errorf("%s: unexpected affinity %s", name, text)
		}
	}
}
