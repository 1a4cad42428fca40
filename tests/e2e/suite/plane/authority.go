//go:build e2e

package plane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"testing"
	"time"
)

// An Authority is a CA for the API server's proxy client certificates.
type Authority struct {
	// PEM is the CA certificate.
	PEM         string
	t           *testing.T
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// NewAuthority creates a CA with this name.
func NewAuthority(t *testing.T, name string) *Authority {
	a := &Authority{t: t}
	var text string
	text, a.key = a.sign(x509.Certificate{
		Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	})
	block, _ := pem.Decode([]byte(text))
	certificate, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	a.certificate, a.PEM = certificate, text
	return a
}

// sign creates a key and a certificate for it, which is self-signed if there is no CA certificate yet.
func (a *Authority) sign(template x509.Certificate) (string, *ecdsa.PrivateKey) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	template.SerialNumber = big.NewInt(time.Now().UnixNano())
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(24*time.Hour)
	parent, signer := a.certificate, a.key
	if parent == nil {
		parent, signer = &template, key
	}
	signed, err := x509.CreateCertificate(rand.Reader, &template, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signed})), key
}

// Client creates a client certificate with this name, and its key.
func (a *Authority) Client(name string) (string, string) {
	certificate, key := a.sign(x509.Certificate{
		Subject: pkix.Name{CommonName: name}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		KeyUsage: x509.KeyUsageDigitalSignature,
	})
	bytes, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	return certificate, string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: bytes}))
}
