// Command podtool is what the pods of the tests run: commands to wait, burn CPU, serve and request.
package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount/"

const usage = `usage: podtool pause               waits for SIGTERM
       podtool burn [MILLICORES]   keeps every CPU busy until SIGTERM, or uses this many thousandths of one
       podtool serve ADDRESS       responds to HTTP requests with this host's name
       podtool get URL             prints the response; sends the pod's service account token if it has one
       podtool gauge ADDRESS       serves /metrics with the values of /set?name=value, and /notes with the times of /note?who=NAME
       podtool linger NOTE-URL     ignores SIGTERM, and requests this URL repeatedly until it is killed
`

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "podtool:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 1 && args[0] == "pause":
		waitForEnd()
		return nil
	case len(args) == 1 && args[0] == "burn":
		for range runtime.NumCPU() {
			go func() {
				for {
				}
			}()
		}
		waitForEnd()
		return nil
	case len(args) == 2 && args[0] == "burn":
		millicores, err := strconv.Atoi(args[1])
		if err != nil || millicores < 1 || millicores > 1000 {
			return fmt.Errorf("burn %s: a number from 1 to 1000 is needed", args[1])
		}
		go burn(millicores)
		waitForEnd()
		return nil
	case len(args) == 2 && args[0] == "gauge":
		go waitAndExit()
		return http.ListenAndServe(args[1], newGauge())
	case len(args) == 2 && args[0] == "linger":
		waitForEnd()
		linger(args[1])
	case len(args) == 2 && args[0] == "serve":
		go waitAndExit()
		return http.ListenAndServe(args[1], http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			name, _ := os.Hostname()
			fmt.Fprintln(w, name)
		}))
	case len(args) == 2 && args[0] == "get":
		return get(args[1])
	}
	return fmt.Errorf("not a command\n%s", usage)
}

func waitForEnd() {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT)
	<-end
}

func waitAndExit() {
	waitForEnd()
	os.Exit(0)
}

func get(url string) error {
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if ca, err := os.ReadFile(serviceAccount + "ca.crt"); err == nil {
		roots.AppendCertsFromPEM(ca)
	}
	if token, err := os.ReadFile(serviceAccount + "token"); err == nil && strings.HasPrefix(url, "https:") {
		request.Header.Set("Authorization", "Bearer "+string(token))
	}
	client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if _, err := io.Copy(os.Stdout, response.Body); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, response.Status)
	}
	return nil
}
