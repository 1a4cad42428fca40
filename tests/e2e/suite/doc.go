// Package suite has the end-to-end tests, which run on a real cluster with two nodes: see README.md.
package suite
