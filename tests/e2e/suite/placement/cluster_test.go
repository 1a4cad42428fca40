//go:build e2e

// Package placement tests how real kube-schedulers place pods by the label plimsoll.dev/load and the taint plimsoll.dev/busy, with what the
// chart installs for them. Nodes are only objects: pods are bound, and never run. The tests write label and taint instead of agents.
package placement

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"plimsoll.dev/suite/plane"
)

const (
	namespace   = "plimsoll"
	chart       = "charts/plimsoll"
	waitTimeout = time.Minute
)

var background = context.Background()

// A cluster is an API server with an untouched kube-scheduler, and the chart's release with its second scheduler and its admission policy.
type cluster struct {
	*plane.Plane
	second *plane.Process
	// secondPort serves the second scheduler's probes.
	secondPort int
	// reportTo is the controller to which agents report the loads of scenes; nil without the extender.
	reportTo *controller
}

// open starts an API server with a namespace for the chart.
func open(t *testing.T) *cluster {
	directory := t.TempDir()
	// For the ConfigMap extension-apiserver-authentication, which every cluster has.
	flags := plane.AggregationFlags(t, directory, plane.NewAuthority(t, "front-proxy-ca"))
	flags = append(flags, "--client-ca-file="+plane.WriteFile(t, filepath.Join(directory, "client-ca.crt"), plane.NewAuthority(t, "client-ca").PEM))
	c := &cluster{Plane: plane.Start(t, append(flags, mutatingPolicies(t)...)), secondPort: plane.FreePort(t)}
	c.Apply("{apiVersion: v1, kind: Namespace, metadata: {name: " + namespace + ", labels: {pod-security.kubernetes.io/enforce: privileged}}}")
	return c
}

// start installs the chart, and starts the schedulers.
func start(t *testing.T) *cluster {
	c := open(t)
	c.scheduler(c.Kubeconfig, plane.FreePort(t), "--kubeconfig="+c.Kubeconfig, "--leader-elect=false")
	for _, each := range ways {
		c.Apply(fmt.Sprintf("{apiVersion: v1, kind: Namespace, metadata: {name: %s}}", each.namespace))
	}
	c.Kubectl("label", "namespace", byPolicy.namespace, "plimsoll.dev/placement=by-load")
	notes := c.install("placement.admissionPolicy.enabled=true", "placement.scheduler.enabled=true")
	for _, note := range []string{"kubectl label namespace NAMESPACE plimsoll.dev/placement=by-load", "schedulerName: plimsoll", "kubectl get nodes -L plimsoll.dev/load"} {
		if !strings.Contains(notes, note) {
			t.Errorf("the notes do not contain %q: %s", note, notes)
		}
	}
	c.startSecond()
	c.untilPolicyIsInForce(byPolicy)
	return c
}

// scheduler runs a kube-scheduler.
func (c *cluster) scheduler(kubeconfig string, port int, args ...string) *plane.Process {
	return c.Run("kube-scheduler", append(args, "--secure-port="+fmt.Sprint(port), "--bind-address=127.0.0.1",
		"--authentication-kubeconfig="+kubeconfig, "--authorization-kubeconfig="+kubeconfig)...)
}

// mutatingPolicies are the API server's flags that turn on MutatingAdmissionPolicies, which is the default since Kubernetes 1.36.
func mutatingPolicies(t *testing.T) []string {
	version, err := run(t, "kube-apiserver", "--version")
	if err != nil {
		t.Fatal(err)
	}
	for _, before := range []string{" v1.34.", " v1.35."} {
		if strings.Contains(version, before) {
			return []string{"--feature-gates=MutatingAdmissionPolicy=true", "--runtime-config=admissionregistration.k8s.io/v1beta1=true"}
		}
	}
	return nil
}

// run runs one of the test cluster's programs and returns its output, and stderr as part of the error.
func run(t *testing.T, name string, args ...string) (string, error) {
	t.Helper()
	var out, stderr bytes.Buffer
	command := exec.Command(plane.Tool(t, name), args...)
	command.Env = append(os.Environ(), "HOME="+t.TempDir())
	command.Stdout, command.Stderr = &out, &stderr
	if err := command.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, stderr.String())
	}
	return out.String(), nil
}

// install installs the chart with these values, and returns its notes. It omits the hooks, because nothing runs their Jobs here.
func (c *cluster) install(values ...string) string {
	c.T.Helper()
	notes, err := run(c.T, plane.Helm(), "--kubeconfig", c.Kubeconfig, "install", "plimsoll", plane.Absolute(c.T, chart), "--namespace", namespace,
		"--take-ownership", "--no-hooks", "--set", strings.Join(append(values, "waitForAgents.enabled=false"), ","))
	if err != nil {
		c.T.Fatal(err)
	}
	return notes
}

// startSecond runs the release's second scheduler as its Deployment does: with its configuration and a token of its account.
func (c *cluster) startSecond() {
	c.T.Helper()
	var config map[string]any
	if err := yaml.Unmarshal([]byte(c.config()), &config); err != nil {
		c.T.Fatal(err)
	}
	// In a pod the scheduler needs no kubeconfig.
	kubeconfig := c.KubeconfigForToken("second", c.Kubectl("create", "token", "plimsoll-scheduler", "--namespace", namespace))
	config["clientConnection"] = map[string]any{"kubeconfig": kubeconfig}
	text, err := yaml.Marshal(config)
	if err != nil {
		c.T.Fatal(err)
	}
	c.second = c.scheduler(kubeconfig, c.secondPort, "--config="+c.Write("scheduler.yaml", string(text)))
}

// config is the configuration of the release's second scheduler.
func (c *cluster) config() string {
	c.T.Helper()
	config, err := c.Kube.CoreV1().ConfigMaps(namespace).Get(background, "plimsoll-scheduler", metav1.GetOptions{})
	if err != nil {
		c.T.Fatal(err)
	}
	return config.Data["scheduler.yaml"]
}

// untilPolicyIsInForce waits until the API server applies the MutatingAdmissionPolicy to pods in the namespace.
func (c *cluster) untilPolicyIsInForce(as way) {
	c.T.Helper()
	pod := newPod(as, "probe", nil)
	c.Eventually(waitTimeout, "the admission policy is in force", func() error {
		created, err := c.Kube.CoreV1().Pods(as.namespace).Create(background, pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil && created.Spec.Affinity == nil {
			err = fmt.Errorf("pods get no preferences")
		}
		return err
	})
}

// addedAffinity are the terms of the plugin NodeAffinity in a scheduler's configuration.
func addedAffinity(t *testing.T, config string) []corev1.PreferredSchedulingTerm {
	t.Helper()
	var parsed struct {
		Profiles []struct {
			PluginConfig []struct {
				Name string
				Args struct{ AddedAffinity corev1.NodeAffinity }
			}
		}
	}
	if err := yaml.Unmarshal([]byte(config), &parsed); err != nil {
		t.Fatal(err)
	}
	if len(parsed.Profiles) != 1 || len(parsed.Profiles[0].PluginConfig) != 1 || parsed.Profiles[0].PluginConfig[0].Name != "NodeAffinity" {
		t.Fatalf("unexpected configuration: %s", config)
	}
	return parsed.Profiles[0].PluginConfig[0].Args.AddedAffinity.PreferredDuringSchedulingIgnoredDuringExecution
}
