package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// podImages are the images that every node has: the sandbox image, and one with busybox and podtool for the tests.
var podImages = []string{"pause", "tools"}

// imageName is the reference of a local image; pods name it with `imagePullPolicy: Never`.
func imageName(tag string) string { return "plimsoll.dev/e2e/" + tag + ":latest" }

// image is an image FROM scratch with one layer of static binaries, all in /bin.
type image struct {
	binaries   []string
	links      map[string]string // a further name in /bin and the binary that it names
	entrypoint []string
}

// write makes a docker archive.
func (i image) write(tag, archive string) error {
	layer, err := i.layer()
	if err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": "amd64", "os": "linux",
		"config": map[string]any{"Entrypoint": i.entrypoint, "Env": []string{"PATH=/bin"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]map[string]any{
		{"Config": "config.json", "RepoTags": []string{imageName(tag)}, "Layers": []string{"layer.tar"}},
	})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(archive), 0o755); err != nil {
		return err
	}
	var out bytes.Buffer
	files := tar.NewWriter(&out)
	for _, file := range []struct {
		name    string
		content []byte
	}{{"layer.tar", layer}, {"config.json", config}, {"manifest.json", manifest}} {
		if err := addFile(files, file.name, 0o644, file.content); err != nil {
			return err
		}
	}
	if err := files.Close(); err != nil {
		return err
	}
	return os.WriteFile(archive, out.Bytes(), 0o644)
}

func (i image) layer() ([]byte, error) {
	var out bytes.Buffer
	files := tar.NewWriter(&out)
	for _, directory := range []string{"bin/", "tmp/"} {
		if err := files.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: directory, Mode: 0o777}); err != nil {
			return nil, err
		}
	}
	for _, path := range i.binaries {
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		if err := addFile(files, "bin/"+filepath.Base(path), 0o755, content); err != nil {
			return nil, err
		}
	}
	for name, target := range i.links {
		if err := files.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + name, Linkname: target, Mode: 0o777}); err != nil {
			return nil, err
		}
	}
	err := files.Close()
	return out.Bytes(), err
}

func addFile(files *tar.Writer, name string, mode int64, content []byte) error {
	if err := files.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(content))}); err != nil {
		return err
	}
	_, err := io.Copy(files, bytes.NewReader(content))
	return err
}

// buildPodImages packs podImages.
func buildPodImages(here layout) error {
	podtool := image{binaries: []string{here.bin("podtool")}, entrypoint: []string{"/bin/podtool", "pause"}}
	if err := podtool.write("pause", here.image("pause")); err != nil {
		return err
	}
	tools := image{
		binaries:   []string{here.bin("podtool"), "/bin/busybox"},
		entrypoint: []string{"/bin/podtool"},
		links:      map[string]string{},
	}
	for _, name := range strings.Fields("sh cat ls sleep echo id env true false head tail grep dd kill ps nproc mkdir rm") {
		tools.links[name] = "busybox"
	}
	return tools.write("tools", here.image("tools"))
}

// packImage is `cluster image TAG BINARY...`.
func packImage(here layout, args []string) error {
	if len(args) < 2 {
		return errors.New("image TAG BINARY...")
	}
	packed := image{binaries: args[1:], entrypoint: []string{"/bin/" + filepath.Base(args[1])}}
	if err := packed.write(args[0], here.image(args[0])); err != nil {
		return err
	}
	fmt.Println(here.image(args[0]))
	return nil
}

// loadImages is `cluster load ARCHIVE...`: it imports archives into every node that runs.
func loadImages(here layout, archives []string) error {
	nodes, err := runningNodes(here)
	if err != nil {
		return err
	}
	for _, node := range nodes {
		for _, archive := range archives {
			command, err := nodeCommand(here, node, []string{"ctr", "--namespace", "k8s.io", "images", "import", "-"})
			if err != nil {
				return err
			}
			content, err := os.Open(archive)
			if err != nil {
				return err
			}
			process := exec.Command(command[0], command[1:]...)
			process.Stdin = content
			out, err := process.CombinedOutput()
			content.Close()
			if err != nil {
				return fmt.Errorf("failed to import %s into %s: %w\n%s", archive, node, err, out)
			}
		}
	}
	return nil
}

// importImage imports an archive into the containerd whose socket is in a directory.
func importImage(state, archive string) error {
	return runQuietly("ctr", "--address", state+"/containerd.sock", "--namespace", "k8s.io", "images", "import", archive)
}

func containerdConfig(root, cni string, systemd bool) map[string]any {
	return map[string]any{"Root": root, "State": "/run/containerd", "Pause": imageName("pause"), "CNI": cni, "Systemd": systemd}
}
