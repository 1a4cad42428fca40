package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestAnchorsMatchGitHub(t *testing.T) {
	found := anchors("# A page\n## `run --output json`: one line\n## Part\n```sh\n# no heading\n```\n## Part\n## [A link](x.md), too\n<a id=\"own\"></a>\n")
	for _, wanted := range []string{"a-page", "run---output-json-one-line", "part", "part-1", "a-link-too", "own"} {
		if !found[wanted] {
			t.Errorf("%q is missing in %v", wanted, found)
		}
	}
	if len(found) != 6 {
		t.Errorf("%v", found)
	}
}

func TestBrokenLinksAreFound(t *testing.T) {
	root := t.TempDir()
	os.WriteFile(filepath.Join(root, "other.md"), []byte("# Other\n## Here\n"), 0o600)
	page := "# Page\n"
	for link, wanted := range map[string]string{
		"other.md": "", "other.md#here": "", "#page": "", "https://example.com/x": "",
		"gone.md": "no such file", "other.md#there": "the page has no such heading", "#other": "the page has no such heading",
	} {
		if why := checkLink(root, "page.md", page, link); why != wanted {
			t.Errorf("%s: %q instead of %q", link, why, wanted)
		}
	}
}

func TestLinksThatLeaveTheDocsPointToTheRepository(t *testing.T) {
	book := `[{"config": {"output": {"html": {"git-repository-url": "https://host/repo"}}}},
		{"items": [{"Chapter": {"number": [1], "source_path": "decisions/one.md", "sub_items": [],
		"content": "[a](../../README.md#limits) [b](../install.md) [c](#here) [d](https://x/y)\n` + "```\\n[e](../../x)\\n```" + `"}}]}]`
	var out bytes.Buffer
	if err := preprocess(strings.NewReader(book), &out); err != nil {
		t.Fatal(err)
	}
	wanted := "[a](https://host/repo/blob/main/README.md#limits) [b](../install.md) [c](#here) [d](https://x/y)\n```\n[e](../../x)\n```"
	var changed map[string]any
	if err := json.Unmarshal(out.Bytes(), &changed); err != nil {
		t.Fatal(err)
	}
	chapter := changed["items"].([]any)[0].(map[string]any)["Chapter"].(map[string]any)
	if content := chapter["content"]; content != wanted {
		t.Errorf("%q", content)
	}
}
