//go:build e2e

package clients

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"plimsoll.dev/suite/plane"
)

// TestClientsStayCorrectWhileFrontProxyCARotates: as an administrator does it on an API server that runs. First both are
// believed, then the API server gets a certificate of the new one, and in the end the old one is believed no more.
func TestClientsStayCorrectWhileFrontProxyCARotates(t *testing.T) {
	s := open(t)
	all := s.all()
	s.allKnow(soon, all)
	next := plane.NewAuthority(t, "front-proxy-ca-2")
	believed := func() string {
		trusted, err := s.Kube.CoreV1().ConfigMaps("kube-system").Get(background, "extension-apiserver-authentication", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		return trusted.Data["requestheader-client-ca-file"]
	}
	s.secret("ca.crt", s.authority.PEM+next.PEM)
	s.Eventually(soon, "both authorities are believed", func() error { return contains(believed(), next.PEM) })
	s.allKnow(soon, all)

	certificate, key := next.Client(plane.FrontProxy)
	s.secret("proxy.key", key)
	s.secret("proxy.crt", certificate)
	s.allKnow(soon, all)
	// What is connected stays; the next connections show the new certificate.
	again := append(all, s.informer("an informer that comes later", true))
	s.allKnow(soon, again)

	s.secret("ca.crt", next.PEM)
	// The API server adds what it believes itself, and takes nothing away.
	s.Eventually(soon, "the old authority is believed no more", func() error {
		if !strings.Contains(believed(), s.authority.PEM) {
			return nil
		}
		patch, _ := json.Marshal(map[string]any{"data": map[string]string{"requestheader-client-ca-file": next.PEM}})
		_, err := s.Kube.CoreV1().ConfigMaps("kube-system").Patch(background, "extension-apiserver-authentication", types.MergePatchType, patch, metav1.PatchOptions{})
		return fmt.Errorf("it was until now: %v", err)
	})
	for _, r := range s.replicas {
		// No connection is older than the rotation.
		r.Kill()
		s.again(r)
	}
	last := append(again, s.informer("an informer that comes last", false))
	s.knowSoon("of the new authority alone: all clients", last)
	if err := contains(believed(), s.authority.PEM); err == nil {
		t.Error("the old authority is believed again")
	}
}

func contains(text, part string) error {
	if !strings.Contains(text, part) {
		return fmt.Errorf("%q is not in %q", part, text)
	}
	return nil
}
