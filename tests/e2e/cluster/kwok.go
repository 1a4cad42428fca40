package main

import "path/filepath"

// buildKwok builds what simulates nodes and their pods by the thousand, a module of its own: it wants other versions of
// Kubernetes's libraries.
func buildKwok(here layout) error {
	return goBuild(filepath.Join(source, "kwok"), "-s -w", here.bin("kwok"), "sigs.k8s.io/kwok/cmd/kwok")
}
