// Command crane-score reads Nodes as JSON and prints what crane-scheduler decides for each: whether its Dynamic plugin lets a pod pass, and
// its score. It is the plugin's own code, with the Kubernetes libraries that it was written for; TZ has to be that of the scheduler.
//
//	kubectl get nodes -o json | crane-score policy.yaml
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/gocrane/crane-scheduler/pkg/plugins/apis/config"
	"github.com/gocrane/crane-scheduler/pkg/plugins/dynamic"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/scheduler/framework"
)

// nodes is the only part of a scheduler that the plugin uses.
type nodes struct {
	framework.Handle
	framework.NodeInfoLister
	byName map[string]*framework.NodeInfo
}

func (n nodes) SnapshotSharedLister() framework.SharedLister { return n }
func (n nodes) NodeInfos() framework.NodeInfoLister          { return n }

func (n nodes) Get(name string) (*framework.NodeInfo, error) {
	if node, found := n.byName[name]; found {
		return node, nil
	}
	return nil, fmt.Errorf("no such node: %s", name)
}

// A verdict of crane-scheduler on a node.
type verdict struct {
	Node string `json:"node"`
	// Why the node is filtered out; empty if it passes.
	Filtered string `json:"filtered"`
	Score    int64  `json:"score"`
}

func run(policy string, in io.Reader, out io.Writer) error {
	var list corev1.NodeList
	if err := json.NewDecoder(in).Decode(&list); err != nil {
		return err
	}
	known := nodes{byName: map[string]*framework.NodeInfo{}}
	for i := range list.Items {
		info := framework.NewNodeInfo()
		info.SetNode(&list.Items[i])
		known.byName[list.Items[i].Name] = info
	}
	plugin, err := dynamic.NewDynamicScheduler(&config.DynamicArgs{PolicyConfigPath: policy}, known)
	if err != nil {
		return err
	}
	crane, pod := plugin.(*dynamic.DynamicScheduler), &corev1.Pod{}
	verdicts := []verdict{}
	for _, node := range list.Items {
		filter := crane.Filter(context.Background(), nil, pod, known.byName[node.Name])
		score, status := crane.Score(context.Background(), nil, pod, node.Name)
		if !status.IsSuccess() {
			return status.AsError()
		}
		verdicts = append(verdicts, verdict{node.Name, filter.Message(), score})
	}
	return json.NewEncoder(out).Encode(verdicts)
}

func main() {
	klog.InitFlags(nil)
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: crane-score POLICY.yaml <NODES.json")
		os.Exit(2)
	}
	if err := run(flag.Arg(0), os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
