//go:build e2e

package consumers

import (
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"plimsoll.dev/suite/plane"
)

const (
	targetLoadPacking          = "TargetLoadPacking"
	loadVariationRiskBalancing = "LoadVariationRiskBalancing"
	lowRiskOverCommitment      = "LowRiskOverCommitment"
	// refresh is the interval at which Trimaran's plugins read the page, plus a margin.
	refresh = 35 * time.Second
)

var trimaran = []string{targetLoadPacking, loadVariationRiskBalancing, lowRiskOverCommitment}

// scores are the scores of all nodes for one pod.
type scores map[string]int

// A trimaranScene has one scheduler with a profile for each plugin, in which no other plugin scores.
type trimaranScene struct {
	*scene
	scheduler *plane.Process
	nodes     []string
	pods      int
}

// TestTrimaran follows Trimaran's three plugins from their start, before any agent has reported, to a restart of the controller.
func TestTrimaran(t *testing.T) {
	nodes := []string{"hot", "cool", "steady", "erratic", "unknown"}
	s := &trimaranScene{scene: open(t, nodes...), nodes: nodes}
	for _, node := range nodes {
		// LowRiskOverCommitment compares usage with what the pods of a node request.
		filler := newPod("filler-"+node, "2")
		filler.Spec.NodeName = node
		filler.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: quantities("2", "4Gi"), Limits: quantities("4", "4Gi")}
		s.create(filler)
	}
	s.untilAnswer(http.StatusServiceUnavailable)
	s.startScheduler()
	s.startsWithoutData()
	s.agents.set(map[string]load{
		"hot":     {line: 100, cpu: 85, cpuDeviation: 4, memory: 20, memoryDeviation: 1},
		"cool":    {line: 25, cpu: 20, cpuDeviation: 2, memory: 20, memoryDeviation: 1},
		"steady":  {line: 56, cpu: 45, cpuDeviation: 1, memory: 20, memoryDeviation: 1},
		"erratic": {line: 56, cpu: 45, cpuDeviation: 15, memory: 20, memoryDeviation: 1},
	})
	s.untilAnswer(http.StatusOK)
	s.untilScored("with data", "cool", "hot")
	s.ranksNodes()
	s.countsNewcomersOnce()
	s.survivesRestart()
}

// startScheduler starts kube-scheduler with Trimaran's plugins.
func (s *trimaranScene) startScheduler() {
	s.T.Helper()
	var profiles strings.Builder
	for _, plugin := range trimaran {
		fmt.Fprintf(&profiles, `
- schedulerName: %s
  plugins: {score: {disabled: [{name: "*"}], enabled: [{name: %[2]s}]}}
  pluginConfig: [{name: %[2]s, args: {watcherAddress: %[3]q}}]`, strings.ToLower(plugin), plugin, plane.Local("http", s.pages))
	}
	config := s.Write("trimaran.yaml", fmt.Sprintf(`apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
clientConnection: {kubeconfig: %q}
profiles:%s
`, s.Kubeconfig, profiles.String()))
	// At level 10 the scheduler logs each plugin's score of each node.
	s.scheduler = s.Run("trimaran-scheduler", "--config="+config, "--vmodule=schedule_one=10", "--bind-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", plane.FreePort(s.T)), "--authentication-kubeconfig="+s.Kubeconfig, "--authorization-kubeconfig="+s.Kubeconfig)
}

// score has the scheduler place a pod with one of the plugins, and returns all scores and the pod's node. The pod is deleted at once, so
// that the plugins don't count it.
func (s *trimaranScene) score(plugin string) (scores, string) {
	s.T.Helper()
	pod := s.place(plugin, "100m", nil)
	found := scores{}
	line := regexp.MustCompile(`"Plugin scored node for pod" pod="default/` + pod.Name + `" plugin="` + plugin + `" node="([^"]+)" score=(\d+)`)
	s.Eventually(waitTimeout, "the scores are logged", func() error {
		for _, match := range line.FindAllStringSubmatch(s.scheduler.Log(), -1) {
			found[match[1]], _ = strconv.Atoi(match[2])
		}
		if len(found) < len(s.nodes) {
			return fmt.Errorf("%s: %v", plugin, found)
		}
		return nil
	})
	s.delete(pod.Name)
	return found, pod.Spec.NodeName
}

// place creates a pod and waits until it is bound.
func (s *trimaranScene) place(plugin, cpu string, selector map[string]string) *corev1.Pod {
	s.T.Helper()
	s.pods++
	pod := newPod(fmt.Sprintf("pod-%d", s.pods), cpu)
	pod.Spec.SchedulerName, pod.Spec.NodeSelector = strings.ToLower(plugin), selector
	s.create(pod)
	s.Eventually(waitTimeout, "the pod is bound", func() error {
		var err error
		if pod, err = s.Kube.CoreV1().Pods("default").Get(background, pod.Name, metav1.GetOptions{}); err == nil && pod.Spec.NodeName == "" {
			err = fmt.Errorf("%s: %v", plugin, pod.Status.Conditions)
		}
		return err
	})
	return pod
}

// startsWithoutData checks that pods are placed although no plugin has data.
func (s *trimaranScene) startsWithoutData() {
	s.T.Helper()
	for _, plugin := range trimaran {
		found, _ := s.score(plugin)
		for node, score := range found {
			if score != 0 {
				s.T.Errorf("%s gives %s %d without data", plugin, node, score)
			}
		}
	}
	if times := strings.Count(s.scheduler.Log(), "Unable to populate metrics initially"); times != len(trimaran) {
		s.T.Errorf("%d plugins report that they have no data", times)
	}
}

// untilScored waits until each plugin prefers one node to another.
func (s *trimaranScene) untilScored(when, better, worse string) {
	s.T.Helper()
	for _, plugin := range trimaran {
		s.Eventually(refresh, when+" "+plugin+" prefers "+better, func() error {
			if found, _ := s.score(plugin); found[better] <= found[worse] {
				return fmt.Errorf("the scores are %v", found)
			}
			return nil
		})
	}
}

// ranksNodes checks that the hot node is the worst and the cool one the best (for LowRiskOverCommitment the steady one is as good), that the
// unknown node is in between, and that the deviation counts.
func (s *trimaranScene) ranksNodes() {
	s.T.Helper()
	for _, plugin := range trimaran {
		found, node := s.score(plugin)
		s.T.Logf("%s: %v", plugin, found)
		if found[node] != found["cool"] {
			s.T.Errorf("%s places the pod on %s", plugin, node)
		}
		if found["hot"] >= found["unknown"] || found["unknown"] >= found["cool"] {
			s.T.Errorf("%s: the unknown node is not between the others: %v", plugin, found)
		}
		if deviates := found["steady"] > found["erratic"]; deviates != (plugin != targetLoadPacking) {
			s.T.Errorf("%s: the deviation has an unexpected effect: %v", plugin, found)
		}
	}
	// With equal averages, by half the difference of the deviations of 1 and 15.
	if found, _ := s.score(loadVariationRiskBalancing); found["steady"]-found["erratic"] != 7 {
		s.T.Errorf("the deviations do not count as they should: %v", found)
	}
}

// untilRead waits until all plugins have read the page again.
func (s *trimaranScene) untilRead() {
	s.T.Helper()
	const series = `plimsoll_controller_scheduler_answers_total{page="load_watcher",code="200"}`
	before, err := plane.Metric(s.metrics, series)
	s.Eventually(refresh, "all plugins read the page", func() error {
		var now float64
		if now, err = plane.Metric(s.metrics, series); err == nil && now < before+float64(len(trimaran)) {
			err = fmt.Errorf("%.0f of %d plugins did", now-before, len(trimaran))
		}
		return err
	})
}

// countsNewcomersOnce checks that TargetLoadPacking adds a new pod to the page's usage, until the page includes the pod.
func (s *trimaranScene) countsNewcomersOnce() {
	s.T.Helper()
	s.untilRead()
	bound := time.Now()
	s.place(targetLoadPacking, "500m", map[string]string{corev1.LabelHostname: "cool"})
	// 1.5 times its request is 750 of 4000 millicores.
	s.agents.change("cool", func(load *load) { load.cpu += 18.75 })
	// 20 %, 18.75 %, and 3.75 % for the next pod are 42.5 %, for which TargetLoadPacking with its target of 40 % gives this score.
	const once = 38
	check := func(when string) {
		s.T.Helper()
		found, _ := s.score(targetLoadPacking)
		s.T.Logf("%s, %s after it was bound: %v", when, time.Since(bound).Round(time.Second), found)
		if found["cool"] != once {
			s.T.Errorf("%s the score is %d instead of %d", when, found["cool"], once)
		}
		if time.Since(bound) > time.Minute {
			s.T.Error("too late: TargetLoadPacking no longer adds the pod in any case")
		}
	}
	check("before the page includes the pod")
	s.untilRead()
	// The plugins have sent their requests, but may not have used the responses yet.
	time.Sleep(time.Second)
	check("once the page includes the pod")
}

// survivesRestart checks that the plugins use their last data while the controller is down, and while it has no reports yet, and new data
// after that.
func (s *trimaranScene) survivesRestart() {
	s.T.Helper()
	before := map[string]scores{}
	for _, plugin := range trimaran {
		before[plugin], _ = s.score(plugin)
	}
	unchanged := func(when string) {
		s.T.Helper()
		for _, plugin := range trimaran {
			if found, _ := s.score(plugin); !maps.Equal(found, before[plugin]) {
				s.T.Errorf("%s %s gives %v instead of %v", when, plugin, found, before[plugin])
			}
		}
	}
	s.agents.set(nil)
	s.controller.Kill()
	s.untilFailed("connection refused")
	unchanged("without the controller")
	tooEarly := s.watchAnswers()
	s.controller.Start()
	s.untilFailed("received status code 503 from watcher")
	unchanged("with a controller without reports")
	if answers := tooEarly(); answers > 0 {
		s.T.Errorf("the restarted controller answered %d times before it had reports", answers)
	}
	s.agents.set(map[string]load{
		"hot":     {line: 25, cpu: 20, cpuDeviation: 2, memory: 20, memoryDeviation: 1},
		"cool":    {line: 100, cpu: 85, cpuDeviation: 4, memory: 20, memoryDeviation: 1},
		"steady":  {line: 56, cpu: 45, cpuDeviation: 1, memory: 20, memoryDeviation: 1},
		"erratic": {line: 56, cpu: 45, cpuDeviation: 15, memory: 20, memoryDeviation: 1},
	})
	s.untilScored("after the restart", "hot", "cool")
}

// untilFailed waits until each plugin has once more failed to read the page, for this reason.
func (s *trimaranScene) untilFailed(reason string) {
	s.T.Helper()
	line := regexp.MustCompile(`"Unable to update metrics" err=.*` + reason)
	count := func() int { return len(line.FindAllString(s.scheduler.Log(), -1)) }
	before := count()
	s.Eventually(refresh, "the plugins fail to read the page: "+reason, func() error {
		if times := count() - before; times < len(trimaran) {
			return fmt.Errorf("%d of them did", times)
		}
		return nil
	})
}

// watchAnswers requests the page continuously until the returned function is called, which returns how often the page had data: that
// would replace the plugins' last data.
func (s *trimaranScene) watchAnswers() (ended func() int64) {
	var answers, end atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for end.Load() == 0 {
			if code, body, err := s.get("/watcher"); err == nil && code == http.StatusOK {
				if answers.Add(1) == 1 {
					s.T.Log("too early:", body)
				}
			}
			time.Sleep(2 * time.Millisecond)
		}
	}()
	return func() int64 {
		end.Store(1)
		<-done
		return answers.Load()
	}
}
