// Package karpenter tests how Karpenter treats nodes with our taints or our label, with its own simulation of scheduling. By that simulation
// Karpenter decides whether pods need new nodes, and whether the pods of a node fit on others.
package karpenter

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	fakeclient "sigs.k8s.io/controller-runtime/pkg/client/fake"

	v1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/cloudprovider/fake"
	"sigs.k8s.io/karpenter/pkg/controllers/provisioning/scheduling"
	"sigs.k8s.io/karpenter/pkg/controllers/state"
	"sigs.k8s.io/karpenter/pkg/events"
	"sigs.k8s.io/karpenter/pkg/operator/options"
	"sigs.k8s.io/yaml"
)

var (
	busy      = corev1.Taint{Key: "plimsoll.dev/busy", Effect: corev1.TaintEffectPreferNoSchedule}
	closed    = corev1.Taint{Key: "interference.crane.io", Effect: corev1.TaintEffectNoSchedule}
	preferNot = corev1.Taint{Key: "interference.crane.io", Effect: corev1.TaintEffectPreferNoSchedule}
	others    = corev1.Taint{Key: "example.com/spot", Effect: corev1.TaintEffectPreferNoSchedule}
)

// A situation is a pod, a node on which it fits, and NodePools, each of them with one taint or none.
type situation struct {
	taints      []corev1.Taint
	load        string
	tolerations []corev1.Toleration
	preferred   []corev1.PreferredSchedulingTerm
	pools       []corev1.Taint
	options     []scheduling.Options
}

// addsNode reports whether Karpenter would add a node for the pod, although it fits on the existing one.
func (s situation) addsNode(t *testing.T) bool {
	t.Helper()
	ctx := options.ToContext(context.Background(), &options.Options{PreferencePolicy: options.PreferencePolicyRespect})
	node := func(pod client.Object) []string { return []string{pod.(*corev1.Pod).Spec.NodeName} }
	client, provider := fakeclient.NewClientBuilder().WithIndex(&corev1.Pod{}, "spec.nodeName", node).Build(), fake.NewCloudProvider()
	cluster := state.NewCluster(clock.RealClock{}, client, provider)
	if err := cluster.UpdateNode(ctx, s.node()); err != nil {
		t.Fatal(err)
	}
	nodes := cluster.DeepCopyNodes()
	types := map[string][]*cloudprovider.InstanceType{}
	var pools []*v1.NodePool
	for i, taint := range append(s.pools, corev1.Taint{})[:max(1, len(s.pools))] {
		pool := &v1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: string(rune('a' + i))}}
		pool.Spec.Template.Spec.NodeClassRef = &v1.NodeClassReference{Group: "karpenter.test.sh", Kind: "TestNodeClass", Name: "default"}
		if taint.Key != "" {
			pool.Spec.Template.Spec.Taints = []corev1.Taint{taint}
		}
		pools = append(pools, pool)
		types[pool.Name] = fake.InstanceTypes(5)
	}
	pods := []*corev1.Pod{s.pod()}
	topology, err := scheduling.NewTopology(ctx, client, cluster, nodes, pools, types, pods, s.options...)
	if err != nil {
		t.Fatal(err)
	}
	scheduler := scheduling.NewScheduler(ctx, client, pools, cluster, nodes, topology, types, nil, events.NewRecorder(&record.FakeRecorder{}),
		clock.RealClock{}, nil, s.options...)
	results, err := scheduler.Solve(ctx, pods)
	if err != nil || len(results.PodErrors) > 0 {
		t.Fatal(err, results.PodErrors)
	}
	existing := 0
	for _, node := range results.ExistingNodes {
		existing += len(node.Pods)
	}
	if existing+len(results.NewNodeClaims) != 1 {
		t.Fatalf("the pod goes to %d existing and %d new nodes", existing, len(results.NewNodeClaims))
	}
	return existing == 0
}

func (s situation) node() *corev1.Node {
	capacity := corev1.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("8Gi"), "pods": resource.MustParse("110")}
	labels := map[string]string{corev1.LabelHostname: "it"}
	if s.load != "" {
		labels["plimsoll.dev/load"] = s.load
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "it", Labels: labels},
		Spec:       corev1.NodeSpec{ProviderID: "fake://it", Taints: s.taints},
		Status:     corev1.NodeStatus{Capacity: capacity, Allocatable: capacity},
	}
}

func (s situation) pod() *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "it", Namespace: "default", UID: "it"}}
	pod.Spec.Containers = []corev1.Container{{Name: "it", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"cpu": resource.MustParse("1")}}}}
	pod.Spec.Tolerations = s.tolerations
	if s.preferred != nil {
		pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: s.preferred}}
	}
	return pod
}

// TestSoftTaintClosesNodesToKarpenter, but not to schedulers. Therefore the chart rejects it where karpenter.sh is served.
func TestSoftTaintClosesNodesToKarpenter(t *testing.T) {
	for name, each := range map[string]struct {
		situation
		adds bool
	}{
		"no taint": {situation{}, false},
		"busy":     {situation{taints: []corev1.Taint{busy}}, true},
		// Even with all preferences ignored: a node's taint is not a preference of the pod.
		"busy, preferences ignored":                    {situation{taints: []corev1.Taint{busy}, options: []scheduling.Options{scheduling.IgnorePreferences}}, true},
		"busy, a pod that tolerates it":                {situation{taints: []corev1.Taint{busy}, tolerations: []corev1.Toleration{{Key: busy.Key, Operator: corev1.TolerationOpExists}}}, false},
		"busy, a NodePool with such a taint":           {situation{taints: []corev1.Taint{busy}, pools: []corev1.Taint{others}}, false},
		"busy, one of 2 NodePools with such a taint":   {situation{taints: []corev1.Taint{busy}, pools: []corev1.Taint{others, {}}}, true},
		"closed by a rule":                             {situation{taints: []corev1.Taint{closed}}, true},
		"closed, one of 2 NodePools with a soft taint": {situation{taints: []corev1.Taint{closed}, pools: []corev1.Taint{others, {}}}, true},
		"closed, PreferNoSchedule by the cap":          {situation{taints: []corev1.Taint{preferNot}}, true},
	} {
		if adds := each.addsNode(t); adds != each.adds {
			t.Errorf("%s: Karpenter adds a node: %t", name, adds)
		}
	}
}

// TestPreferencesForLoadKeepPodsOffHotNodesOnly: Karpenter treats the preference with the highest weight as required at first, then drops it
// and tries the next.
func TestPreferencesForLoadKeepPodsOffHotNodesOnly(t *testing.T) {
	terms := addedTerms(t)
	for load, adds := range map[string]bool{"0": false, "60": false, "65": false, "80": false, "": false, "abc": false, "85": true, "100": true} {
		if found := (situation{load: load, preferred: terms}).addsNode(t); found != adds {
			t.Errorf("load %q: Karpenter adds a node: %t", load, found)
		}
		if (situation{load: load, preferred: terms, options: []scheduling.Options{scheduling.IgnorePreferences}}).addsNode(t) {
			t.Errorf("load %q: Karpenter adds a node with PREFERENCE_POLICY=Ignore", load)
		}
	}
}

// addedTerms are the terms of the chart's second scheduler; its admission policy adds the same to pods.
func addedTerms(t *testing.T) []corev1.PreferredSchedulingTerm {
	t.Helper()
	bin := os.Getenv("PLIMSOLL_E2E_BIN")
	if bin == "" {
		bin = "../../../../target/e2e/bin"
	}
	helm := exec.Command(filepath.Join(bin, "helm"), "template", "plimsoll", "../../../../charts/plimsoll", "--set", "placement.scheduler.enabled=true",
		"--show-only", "templates/scheduler-config.yaml")
	rendered, err := helm.Output()
	if err != nil {
		t.Fatalf("%v: `make cluster-build` builds Helm", err)
	}
	var object struct{ Data map[string]string }
	if err := yaml.Unmarshal(rendered, &object); err != nil {
		t.Fatal(err)
	}
	text, err := yaml.YAMLToJSON([]byte(object.Data["scheduler.yaml"]))
	if err != nil {
		t.Fatal(err)
	}
	var config struct {
		Profiles []struct {
			PluginConfig []struct {
				Args struct{ AddedAffinity corev1.NodeAffinity }
			}
		}
	}
	if err := json.Unmarshal(text, &config); err != nil {
		t.Fatal(err)
	}
	return config.Profiles[0].PluginConfig[0].Args.AddedAffinity.PreferredDuringSchedulingIgnoredDuringExecution
}
