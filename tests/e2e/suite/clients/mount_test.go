//go:build e2e

package clients

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A mount simulates a kubelet's Secret volume. Each version is a directory, and a symlink points to the current one.
type mount struct {
	*testing.T
	directory string
	versions  int
}

func (m *mount) file(name string) string { return filepath.Join(m.directory, name) }

// publish replaces the content atomically.
func (m *mount) publish(data map[string][]byte) {
	m.Helper()
	version := fmt.Sprintf("..%d", m.versions)
	m.versions++
	m.must(os.Mkdir(m.file(version), 0o700))
	for name, content := range data {
		m.must(os.WriteFile(filepath.Join(m.file(version), name), content, 0o600))
		if _, err := os.Lstat(m.file(name)); err != nil {
			m.must(os.Symlink(filepath.Join("..data", name), m.file(name)))
		}
	}
	m.must(os.Symlink(version, m.file("..data_tmp")))
	m.must(os.Rename(m.file("..data_tmp"), m.file("..data")))
}

func (m *mount) must(err error) {
	m.Helper()
	if err != nil {
		m.Error(err)
	}
}

// mountSecret mounts a Secret as soon as it exists, and later versions after this delay, as kubelets do.
func (s *scene) mountSecret(secret string, lag time.Duration) *mount {
	s.T.Helper()
	m := &mount{T: s.T, directory: s.T.TempDir()}
	var seen map[string][]byte
	sync := func() error {
		found, err := s.Kube.CoreV1().Secrets("default").Get(background, secret, metav1.GetOptions{})
		if err == nil && !maps.EqualFunc(found.Data, seen, bytes.Equal) {
			if seen != nil {
				time.Sleep(lag)
			}
			seen = found.Data
			m.publish(seen)
		}
		return err
	}
	s.Eventually(waitTimeout, "Secret "+secret+" exists", sync)
	running, ended := s.running(), make(chan struct{})
	go func() {
		defer close(ended)
		for running.Err() == nil {
			sync()
			time.Sleep(500 * time.Millisecond)
		}
	}()
	return m
}
