//go:build e2e

package plane

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
)

// ModuleDirectory is where the sources of a Go module are, at the version that the go.mod in a directory pins. It downloads them if they
// are not in the module cache: `go list -m` would print nothing.
func ModuleDirectory(from, module string) (string, error) {
	out, err := exec.Command("go", "mod", "download", "-C", from, "-json", module).Output()
	var downloaded struct{ Dir, Error string }
	if json.Unmarshal(out, &downloaded) == nil && downloaded.Error != "" {
		err = errors.New(downloaded.Error)
	}
	if err == nil && downloaded.Dir == "" {
		err = errors.New("go mod download names no directory")
	}
	if err != nil {
		return "", fmt.Errorf("failed to download module %s: %w", module, err)
	}
	return downloaded.Dir, nil
}
