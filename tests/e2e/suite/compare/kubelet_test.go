//go:build e2e

package compare

import "plimsoll.dev/suite/stamp"

type object = map[string]any

// kubelet is the Metric object from which kwok serves a kubelet's /metrics/resource, with the series of kwok's own example. The memory of
// a node encodes the time of the request. That favours the scraper: a real kubelet returns what cAdvisor
// measured up to about 10 s earlier.
func kubelet() string {
	label := func(name, value string) object { return object{"name": name, "value": value} }
	pod := []object{label("namespace", "pod.metadata.namespace"), label("pod", "pod.metadata.name")}
	container := append([]object{label("container", "container.name")}, pod...)
	series := func(dimension string, labels []object, name, kind, value string) object {
		return object{"dimension": dimension, "labels": labels, "name": name, "kind": kind, "value": value, "help": "[STABLE] As of a kubelet"}
	}
	return marshal(object{
		"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "Metric", "metadata": object{"name": "metrics-resource"},
		"spec": object{"path": "/metrics/nodes/{nodeName}/metrics/resource", "metrics": []object{
			series("node", nil, "scrape_error", "gauge", "0"),
			series("node", nil, "node_cpu_usage_seconds_total", "counter", "node.SinceSecond() * 4.0"),
			series("node", nil, "node_memory_working_set_bytes", "gauge", stamp.Expression),
			series("pod", pod, "pod_cpu_usage_seconds_total", "counter", "pod.SinceSecond() * 0.25"),
			series("pod", pod, "pod_memory_working_set_bytes", "gauge", "1073741824"),
			series("container", container, "container_start_time_seconds", "gauge", "UnixSecond(pod.metadata.creationTimestamp)"),
			series("container", container, "container_cpu_usage_seconds_total", "counter", "pod.SinceSecond() * 0.25"),
			series("container", container, "container_memory_working_set_bytes", "gauge", "1073741824"),
		}},
	})
}
