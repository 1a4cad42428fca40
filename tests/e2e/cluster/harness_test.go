//go:build smoke

package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// givenKubeconfig names a cluster to test the manifests against instead of ours.
const givenKubeconfig = "PLIMSOLL_E2E_KUBECONFIG"

// cluster is the command under test, run as a user runs it.
func cluster(t *testing.T, stdin string, args ...string) (string, error) {
	t.Helper()
	here := testLayout(t)
	command := exec.Command(here.bin("cluster"), args...)
	if kubeconfig := os.Getenv(givenKubeconfig); kubeconfig != "" && args[0] == "kubectl" {
		command = exec.Command("kubectl", append([]string{"--kubeconfig", kubeconfig}, args[1:]...)...)
	}
	command.Stdin = strings.NewReader(stdin)
	var stderr bytes.Buffer
	command.Stderr = &stderr
	out, err := command.Output()
	if err != nil {
		err = fmt.Errorf("cluster %s: %w: %s%s", strings.Join(args, " "), err, out, stderr.Bytes())
	}
	return strings.TrimSpace(string(out)), err
}

// must runs the command and fails the test if the command fails.
func must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := cluster(t, "", args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func apply(t *testing.T, manifest string) {
	t.Helper()
	if _, err := cluster(t, manifest, "kubectl", "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
}

// eventually waits for a condition with a deadline.
func eventually(t *testing.T, limit time.Duration, condition func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := condition()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %v", limit, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func testLayout(t *testing.T) layout {
	t.Helper()
	dir, err := filepath.Abs("../../../target/e2e")
	if err != nil {
		t.Fatal(err)
	}
	return layout{dir}
}

// existedBefore are the directories that this machine had before the first cluster came up.
var existedBefore = map[string]bool{}

func TestMain(m *testing.M) {
	for _, directory := range borrowed {
		_, err := os.Stat(directory)
		existedBefore[directory] = err == nil
	}
	if bin, err := filepath.Abs(repository + "/target/e2e/bin"); err == nil {
		os.Setenv("PATH", os.Getenv("PATH")+":"+bin) // provides kubectl
	}
	os.Exit(m.Run())
}
