//go:build e2e

package plane

import (
	"fmt"
	"net"
	"path/filepath"
	"testing"
)

// FrontProxy is the common name in the API server's proxy client certificate.
const FrontProxy = "front-proxy-client"

// AggregationFlags are the API server's flags for API aggregation. Its certificates are written into this directory.
func AggregationFlags(t *testing.T, directory string, authority *Authority) []string {
	certificate, key := authority.Client(FrontProxy)
	file := func(name, content string) string { return WriteFile(t, filepath.Join(directory, name), content) }
	return []string{
		"--requestheader-client-ca-file=" + file("ca.crt", authority.PEM),
		"--proxy-client-cert-file=" + file("proxy.crt", certificate),
		"--proxy-client-key-file=" + file("proxy.key", key),
		"--requestheader-allowed-names=" + FrontProxy,
		"--requestheader-username-headers=X-Remote-User",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		// There is no kube-proxy, so the API server connects to endpoints.
		"--enable-aggregator-routing=true",
	}
}

// Aggregate registers this API with a Service as its backend, without a caBundle.
func (p *Plane) Aggregate(group, version, service string) {
	p.T.Helper()
	p.Apply(
		fmt.Sprintf(`{"apiVersion":"v1","kind":"Service","metadata":{"name":%q,"namespace":"default"},"spec":{"ports":[{"name":"https","port":443}]}}`, service),
		fmt.Sprintf(`{"apiVersion":"apiregistration.k8s.io/v1","kind":"APIService","metadata":{"name":"%[2]s.%[1]s"},
			"spec":{"group":%[1]q,"version":%[2]q,"groupPriorityMinimum":100,"versionPriority":100,
			"service":{"name":%[3]q,"namespace":"default","port":443}}}`, group, version, service),
	)
}

// Endpoint makes a port of this machine an endpoint of a Service.
func (p *Plane) Endpoint(service, name string, port int) {
	p.T.Helper()
	p.Apply(fmt.Sprintf(`{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","addressType":"IPv4",
		"metadata":{"name":"%s-%s","namespace":"default","labels":{"kubernetes.io/service-name":%q}},
		"ports":[{"name":"https","port":%d,"protocol":"TCP"}],"endpoints":[{"addresses":[%q],"conditions":{"ready":true}}]}`,
		service, name, service, port, Host(p.T)))
}

// Host is an address of this machine that is allowed in endpoints, which loopback addresses are not. It sends nothing.
func Host(t *testing.T) string {
	t.Helper()
	connection, err := net.Dial("udp", "198.51.100.1:9")
	if err != nil {
		t.Skipf("NOT TESTED: this machine has only loopback addresses, which endpoints must not have: %v", err)
	}
	defer connection.Close()
	return connection.LocalAddr().(*net.UDPAddr).IP.String()
}
