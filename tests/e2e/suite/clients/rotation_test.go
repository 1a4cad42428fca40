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

// TestClientsStayCorrectWhileFrontProxyCARotates: as an administrator does it on a running API server. First both CAs are
// trusted, then the API server gets a certificate of the new one, and finally the old one is removed.
func TestClientsStayCorrectWhileFrontProxyCARotates(t *testing.T) {
	s := open(t)
	all := s.all()
	s.waitUpToDate(waitTimeout, all)
	next := plane.NewAuthority(t, "front-proxy-ca-2")
	trusted := func() string {
		trusted, err := s.Kube.CoreV1().ConfigMaps("kube-system").Get(background, "extension-apiserver-authentication", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		return trusted.Data["requestheader-client-ca-file"]
	}
	s.secret("ca.crt", s.authority.PEM+next.PEM)
	s.Eventually(waitTimeout, "both CAs are trusted", func() error { return contains(trusted(), next.PEM) })
	s.waitUpToDate(waitTimeout, all)

	certificate, key := next.Client(plane.FrontProxy)
	s.secret("proxy.key", key)
	s.secret("proxy.crt", certificate)
	s.waitUpToDate(waitTimeout, all)
	// Open connections stay; new ones use the new certificate.
	again := append(all, s.informer("an informer that comes later", true))
	s.waitUpToDate(waitTimeout, again)

	s.secret("ca.crt", next.PEM)
	// The API server adds its own CAs, and removes nothing.
	s.Eventually(waitTimeout, "the old CA is not trusted any more", func() error {
		if !strings.Contains(trusted(), s.authority.PEM) {
			return nil
		}
		patch, _ := json.Marshal(map[string]any{"data": map[string]string{"requestheader-client-ca-file": next.PEM}})
		_, err := s.Kube.CoreV1().ConfigMaps("kube-system").Patch(background, "extension-apiserver-authentication", types.MergePatchType, patch, metav1.PatchOptions{})
		return fmt.Errorf("the old CA was still trusted: %v", err)
	})
	for _, r := range s.replicas {
		// A restart closes the connections that are older than the rotation.
		r.Kill()
		s.restart(r)
	}
	last := append(again, s.informer("an informer that comes last", false))
	s.logUpToDate("with only the new CA: all clients", last)
	if err := contains(trusted(), s.authority.PEM); err == nil {
		t.Error("the old CA is trusted again")
	}
}

func contains(text, part string) error {
	if !strings.Contains(text, part) {
		return fmt.Errorf("%q is not in %q", part, text)
	}
	return nil
}
