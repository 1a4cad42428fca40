// Package suite shows on a real cluster, on its two nodes, what Plimsoll promises: see README.md.
package suite
