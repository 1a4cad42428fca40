package main

import (
	"os"
	"testing"
)

func TestCgroupNameMatchesKubelet(t *testing.T) {
	here := layout{t.TempDir()}
	for _, c := range []struct{ driver, node, class, want string }{
		{"", "v1", "Guaranteed", here.cgroupName() + "/kubepods/poda-b"},
		{"", "v1", "BestEffort", here.cgroupName() + "/kubepods/besteffort/poda-b"},
		{"", "v2", "Guaranteed", "kubepods.slice/kubepods-poda_b.slice"},
		{"systemd", "v2", "Burstable", "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-poda_b.slice"},
		{"cgroupfs", "v2", "Burstable", "kubepods/burstable/poda-b"},
		{"cgroupfs", "v2", "Guaranteed", "kubepods/poda-b"},
	} {
		if c.driver != "" {
			if err := os.MkdirAll(here.run(""), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(here.run("cgroup-driver"), []byte(c.driver), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		var p pod
		p.Metadata.UID, p.Spec.NodeName, p.Status.QosClass = "a-b", c.node, c.class
		if got := p.cgroup(here); got != c.want {
			t.Errorf("%s on %s: %s, not %s", c.class, c.node, got, c.want)
		}
	}
}

func TestQuotedCommandSurvivesShell(t *testing.T) {
	if got := quote([]string{"echo", "it's $HOME"}); got != `'echo' 'it'\''s $HOME'` {
		t.Error(got)
	}
}
