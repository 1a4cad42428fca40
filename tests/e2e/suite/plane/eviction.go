//go:build e2e

package plane

import (
	"context"
	"encoding/json"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"plimsoll.dev/suite/report"
)

// AsAgent is a client config that impersonates the agent of a node.
func AsAgent(config *rest.Config, namespace, node string) *rest.Config {
	as := rest.CopyConfig(config)
	as.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + namespace + ":plimsoll-agent",
		Extra:    map[string][]string{"authentication.kubernetes.io/node-name": {node}},
	}
	return as
}

// Evict requests the eviction of a pod through the API server, as the agent of this node does.
func Evict(running context.Context, as kubernetes.Interface, node string, eviction report.Eviction) (verdict report.Verdict, err error) {
	body, err := json.Marshal(eviction)
	if err != nil {
		return verdict, err
	}
	request := as.Discovery().RESTClient().Post().AbsPath(report.EvictionPath(node)).SetHeader("Content-Type", "application/json").Body(body)
	result := request.Do(running)
	// Error decodes the Status of a refusal; Raw does not.
	if err := result.Error(); err != nil {
		return verdict, err
	}
	content, err := result.Raw()
	if err != nil {
		return verdict, err
	}
	return verdict, json.Unmarshal(content, &verdict)
}
