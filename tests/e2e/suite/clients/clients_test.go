//go:build e2e

package clients

import (
	"context"
	"fmt"
	"net/http"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	runtimecache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// handler records an informer's events in the ledger.
func (l *ledger) handler() cache.ResourceEventHandlerFuncs {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { l.observe(object.(*unstructured.Unstructured)) },
		UpdateFunc: func(_, object any) { l.observe(object.(*unstructured.Unstructured)) },
		DeleteFunc: func(object any) {
			if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
				l.gone(unknown.Key)
				return
			}
			l.gone(object.(*unstructured.Unstructured).GetName())
		},
	}
}

// running is a context that ends with the test.
func (s *scene) running() context.Context {
	running, end := context.WithCancel(background)
	s.T.Cleanup(end)
	return running
}

// lists makes client-go list and then watch, as it did before watch lists.
type lists struct{ dynamic.Interface }

func (lists) IsWatchListSemanticsUnSupported() bool { return true }

// informer is a client-go informer with its own connection.
func (s *scene) informer(name string, streams bool) *ledger {
	l := s.ledger(name)
	var objects dynamic.Interface = dynamic.NewForConfigOrDie(s.fastConfig())
	if !streams {
		objects = lists{objects}
	}
	informer := dynamicinformer.NewFilteredDynamicInformer(objects, nodemetrics, "", 0, cache.Indexers{}, nil).Informer()
	if _, err := informer.AddEventHandler(l.handler()); err != nil {
		s.T.Fatal(err)
	}
	go informer.RunWithContext(s.running())
	go s.followVersion(l, informer.LastSyncResourceVersion)
	return l
}

// followVersion records an inconsistency if an informer's resource version goes backwards.
func (s *scene) followVersion(l *ledger, version func() string) {
	running, last := s.running(), uint64(0)
	for running.Err() == nil {
		var now uint64
		if text := version(); text != "" {
			if _, err := fmt.Sscan(text, &now); err != nil || now < last {
				l.lock.Lock()
				l.addInconsistency("the list's version is %q after %d", text, last)
				l.lock.Unlock()
			}
			last = max(now, last)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (s *scene) fastConfig() *rest.Config {
	config := s.Config()
	config.QPS, config.Burst = 500, 1000
	return config
}

// runtimeCache is controller-runtime's cache, used as a controller would: through its events, and by listing its content.
func (s *scene) runtimeCache() *ledger {
	l := s.ledger("controller-runtime's cache")
	store, err := runtimecache.New(s.fastConfig(), runtimecache.Options{})
	if err != nil {
		s.T.Fatal(err)
	}
	running := s.running()
	go store.Start(running)
	kind := schema.GroupVersionKind{Group: nodemetrics.Group, Version: nodemetrics.Version, Kind: "NodeMetric"}
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(kind)
	informer, err := store.GetInformer(running, object)
	if err != nil {
		s.T.Fatal(err)
	}
	if _, err := informer.AddEventHandler(l.handler()); err != nil {
		s.T.Fatal(err)
	}
	if !store.WaitForCacheSync(running) {
		s.T.Fatal("controller-runtime's cache does not fill")
	}
	read := s.ledger("a reader of controller-runtime's cache")
	go func() {
		for running.Err() == nil {
			list := &unstructured.UnstructuredList{}
			list.SetGroupVersionKind(kind)
			if err := store.List(running, list, client.MatchingLabels{"pool": "a"}); err == nil {
				read.listed(list.Items)
			}
			time.Sleep(100 * time.Millisecond)
		}
	}()
	return l
}

// uncheckedLedger is a ledger that checkLedgers ignores.
func (s *scene) uncheckedLedger(name string) *ledger {
	return &ledger{name: name, agents: s.agents, versions: map[string]uint64{}, beats: map[string]int64{}}
}

// list lists once, in pages of this size (0: no paging), with a timeout of three seconds.
func (s *scene) list(page int64) ([]unstructured.Unstructured, error) {
	var items []unstructured.Unstructured
	options := metav1.ListOptions{Limit: page}
	for {
		within, end := context.WithTimeout(background, 3*time.Second)
		list, err := s.Objects.Resource(nodemetrics).List(within, options)
		end()
		if err != nil {
			return nil, err
		}
		items = append(items, list.Items...)
		if options.Continue = list.GetContinue(); options.Continue == "" {
			return items, nil
		}
	}
}

// poller lists continuously, in pages of this size (0: no paging). Failed requests are retried; every response must be correct.
func (s *scene) poller(name string, page int64) *ledger {
	l := s.ledger(name)
	running := s.running()
	go func() {
		for running.Err() == nil {
			if list, err := s.list(page); err == nil {
				l.listed(list)
			} else {
				l.refused(err)
			}
			time.Sleep(100 * time.Millisecond)
		}
	}()
	return l
}

// once sends one request without retries.
func (s *scene) once(limit time.Duration, path string) ([]byte, error) {
	within, end := context.WithTimeout(background, limit)
	defer end()
	return s.Kube.Discovery().RESTClient().Get().AbsPath(path).MaxRetries(0).DoRaw(within)
}

// apiPath is the path of the API's version on the API server.
const apiPath = "/apis/metrics.plimsoll.dev/v1alpha1"

// rawClient lists continuously without a library's retries, 0.1 s after each response.
func (s *scene) rawClient(name string) *ledger {
	l := s.ledger(name)
	s.listContinuously(l, 3*time.Second, l.refused)
	return l
}

// strictClient lists without retries too, also runs discovery, and none of its requests may fail.
func (s *scene) strictClient() *ledger {
	l := s.ledger("a client without retries")
	s.listContinuously(l, 15*time.Second, l.unexpected)
	running := s.running()
	go func() {
		for running.Err() == nil {
			if _, err := s.once(15*time.Second, apiPath); err != nil && running.Err() == nil {
				l.unexpected(err)
			}
			time.Sleep(100 * time.Millisecond)
		}
	}()
	return l
}

// listContinuously lists 0.1 s after each response, and passes errors to failed.
func (s *scene) listContinuously(l *ledger, limit time.Duration, failed func(error)) {
	running := s.running()
	go func() {
		for running.Err() == nil {
			list := &unstructured.UnstructuredList{}
			raw, err := s.once(limit, apiPath+"/nodemetrics")
			if err == nil {
				err = list.UnmarshalJSON(raw)
			}
			switch {
			case err == nil:
				l.listed(list.Items)
			case running.Err() == nil:
				failed(err)
			}
			time.Sleep(100 * time.Millisecond)
		}
	}()
}

// get requests a URL and expects status 200.
func get(url string) error {
	client := http.Client{Timeout: 5 * time.Second}
	response, err := client.Get(url)
	if err != nil {
		return err
	}
	response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s", response.Status)
	}
	return nil
}
