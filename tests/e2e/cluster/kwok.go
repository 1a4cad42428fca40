package main

import "path/filepath"

// buildKwok builds kwok, which simulates thousands of nodes and pods, in its own module: it needs other versions of
// Kubernetes's libraries.
func buildKwok(here layout) error {
	return goBuild(filepath.Join(source, "kwok"), "-s -w", here.bin("kwok"), "sigs.k8s.io/kwok/cmd/kwok")
}
