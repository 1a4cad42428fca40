//go:build e2e

package plane

import (
	"context"
	"encoding/json"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"plimsoll.dev/suite/report"
)

// AsAgent is how the agent of a node reaches the API server: whoever this config is of impersonates it.
func AsAgent(config *rest.Config, namespace, node string) *rest.Config {
	as := rest.CopyConfig(config)
	as.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + namespace + ":plimsoll-agent",
		Extra:    map[string][]string{"authentication.kubernetes.io/node-name": {node}},
	}
	return as
}

// Evict asks for the eviction of a pod through the API server, by the path of this node's agent.
func Evict(running context.Context, as kubernetes.Interface, node string, wish report.Eviction) (said report.Verdict, err error) {
	body, err := json.Marshal(wish)
	if err != nil {
		return said, err
	}
	request := as.Discovery().RESTClient().Post().AbsPath(report.EvictionPath(node)).SetHeader("Content-Type", "application/json").Body(body)
	result := request.Do(running)
	// It reads the Status of a refusal; Raw does not.
	if err := result.Error(); err != nil {
		return said, err
	}
	content, err := result.Raw()
	if err != nil {
		return said, err
	}
	return said, json.Unmarshal(content, &said)
}
