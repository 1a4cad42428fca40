package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// authority signs the certificates of one run.
type authority struct {
	directory string
	name      string
	cert      *x509.Certificate
	key       *ecdsa.PrivateKey
}

// newAuthority makes a CA and writes NAME.crt and NAME.key into the directory.
func newAuthority(directory, name string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	ca := &authority{directory: directory, name: name, key: key}
	template := certificate(name, nil)
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	ca.cert = template
	return ca, ca.sign(template, key, name)
}

// issue writes NAME.crt and NAME.key for a subject; hosts are DNS names and addresses that it serves.
func (ca *authority) issue(name, user string, groups []string, hosts ...string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := certificate(user, groups)
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
	for _, host := range hosts {
		if address := net.ParseIP(host); address != nil {
			template.IPAddresses = append(template.IPAddresses, address)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	return ca.sign(template, key, name)
}

func certificate(user string, groups []string) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: user, Organization: groups},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().AddDate(1, 0, 0),
	}
}

func (ca *authority) sign(template *x509.Certificate, key *ecdsa.PrivateKey, name string) error {
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, &key.PublicKey, ca.key)
	if err != nil {
		return err
	}
	if template.IsCA {
		if ca.cert, err = x509.ParseCertificate(der); err != nil {
			return err
		}
	}
	if err := writePem(filepath.Join(ca.directory, name+".crt"), "CERTIFICATE", der); err != nil {
		return err
	}
	return writeKey(filepath.Join(ca.directory, name+".key"), key)
}

func writeKey(path string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	return writePem(path, "EC PRIVATE KEY", der)
}

func writePem(path, kind string, der []byte) error {
	var out bytes.Buffer
	if err := pem.Encode(&out, &pem.Block{Type: kind, Bytes: der}); err != nil {
		return err
	}
	return os.WriteFile(path, out.Bytes(), 0o600)
}

// writeKubeconfig writes a kubeconfig with the certificates of a user.
func (ca *authority) writeKubeconfig(path, server, user string) error {
	values := map[string]any{"Server": server}
	for key, name := range map[string]string{"CA": ca.name + ".crt", "Cert": user + ".crt", "Key": user + ".key"} {
		data, err := os.ReadFile(filepath.Join(ca.directory, name))
		if err != nil {
			return err
		}
		values[key] = data
	}
	text, err := render("kubeconfig.yaml", values)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}

// users are the clients of the API server, with the groups that its RBAC knows.
var users = []struct {
	name, user string
	groups     []string
}{
	{"admin", "admin", []string{"system:masters"}},
	{"controller-manager", "system:kube-controller-manager", nil},
	{"scheduler", "system:kube-scheduler", nil},
	{"proxy", "system:kube-proxy", nil},
	{"kubelet-client", "kube-apiserver-kubelet-client", []string{"system:masters"}},
}

// makePki writes all keys, certificates and kubeconfigs of a run into run/pki. port is where the host reaches the API server.
func makePki(here layout, nodes []string, network network, port int) error {
	directory := here.run("pki")
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return err
	}
	ca, err := newAuthority(directory, "ca")
	if err != nil {
		return err
	}
	front, err := newAuthority(directory, "front-proxy-ca")
	if err != nil {
		return err
	}
	if err := front.issue("front-proxy", "front-proxy-client", nil); err != nil {
		return err
	}
	names := []string{"127.0.0.1", "localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}
	for _, family := range network {
		names = append(names, family.controlPlane, family.serviceIP)
	}
	if err := ca.issue("apiserver", "kube-apiserver", nil, names...); err != nil {
		return err
	}
	if err := ca.issue("service-account", "service-account", nil); err != nil {
		return err
	}
	inside := "https://" + network.controlPlane()
	for _, u := range users {
		if err := ca.issue(u.name, u.user, u.groups); err != nil {
			return err
		}
		if err := ca.writeKubeconfig(filepath.Join(directory, u.name+".kubeconfig"), inside, u.name); err != nil {
			return err
		}
	}
	for _, node := range nodes {
		if err := ca.issue(node, "system:node:"+node, []string{"system:nodes"}, append(network.nodeAddresses(node), node)...); err != nil {
			return err
		}
		if err := ca.writeKubeconfig(filepath.Join(directory, node+".kubeconfig"), inside, node); err != nil {
			return err
		}
	}
	return ca.writeKubeconfig(here.kubeconfig(), fmt.Sprintf("https://127.0.0.1:%d", port), "admin")
}
