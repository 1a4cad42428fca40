package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// get reads an object of the API server as the administrator.
func (s *supervisor) get(path string, object any) error {
	pki := func(name string) string { return filepath.Join(s.here.run("pki"), name) }
	identity, err := tls.LoadX509KeyPair(pki("admin.crt"), pki("admin.key"))
	if err != nil {
		return err
	}
	ca, err := os.ReadFile(pki("ca.crt"))
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{identity}}}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: 5 * time.Second}
	response, err := client.Get("https://" + s.network.controlPlane() + path)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", path, response.Status)
	}
	if object == nil {
		return nil
	}
	return json.Unmarshal(body, object)
}
