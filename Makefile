# The commands for developers. `make help` lists them.
TARGET := x86_64-unknown-linux-musl
comma := ,
CARGO_TEST := cargo test --target $(TARGET)
BINARY := target/$(TARGET)/release/plimsoll
# The debug build, which tests run, also on the cluster: it builds quickly.
TEST_BINARY := target/$(TARGET)/debug/plimsoll
PHASE := scripts/phase
CLUSTER := target/e2e/bin/cluster
CHART := charts/plimsoll
# All but those of busybox (tests/guest/init).
SCRIPTS = $(shell grep -lE '^\#!/(usr/bin/env bash|bin/sh)' scripts/* deploy/packages/* tests/guest/run.sh)
# The node for quick cluster tests: v1 uses this machine's kernel, without emulation. Without cgroup v1 here, it is the guest.
NODE := $(if $(wildcard /sys/fs/cgroup/cpu/cpu.shares),v1,v2)
# A machine with only cgroup v2 can't be node v1.
BOTH := $(if $(wildcard /sys/fs/cgroup/cgroup.controllers),v2,v1$(comma)v2)
# The tests of tests/e2e/suite that CI runs.
QUICK := AgentsReport|ThrottleStepsDown|RemovedTaint|DisruptionBudget|PreviewCommand|InvalidManifests|ExamplesAreAccepted|Operator|InstalledAgent|AgentUpgrade|StandbyTakesOver$$|KubeletGoesOn
# Runs tests of a name on a node: NODE, NAMES, LOG.
QUICK_SUITE = NODES=$(1) PLIMSOLL_E2E_BINARY=$(CURDIR)/$(TEST_BINARY) go test -C tests/e2e/suite -tags e2e -count=1 -parallel 3 -timeout 40m -v . -run '$(2)' >target/e2e/$(3).log 2>&1 || { cat target/e2e/$(3).log; exit 1; }; grep -E '^ *--- ' target/e2e/$(3).log
# Tests that depend on IP addresses: reports, probes, evictions, direct requests to replicas and kubelets.
ADDRESSES := AgentsReport|AskedDirectly|Disruption|EvictedThroughTheAPIServer|TestNodeExporter|TestPreviewCommand|TestStandbyTakesOver$$|Operator
# Unit tests that depend on speed: nothing runs beside them, and they are skipped under emulation.
TIMED := bad_endpoints_delay_no_others_and_nothing_grows fifty_slow_readers_of_5000_nodes
# Other versions of Kubernetes, and the tests that depend on the API server's behaviour.
VERSIONS := $(notdir $(wildcard tests/e2e/versions/*))
# All supported kubelets: those of other versions, and that of the test cluster.
KUBELETS := $(VERSIONS) 1.37
ON_VERSIONS := $(addsuffix ::,certificates controller definitions doctor evict permissions stolen_token stop taint)
# Where crane-scheduler is cloned from, and its last commit; not every Go module proxy serves it.
CRANE_SCHEDULER := https://github.com/gocrane/crane-scheduler
CRANE_SCHEDULER_COMMIT := c2c05338a5d75c0a6d92bd16a1cf257b48b30ef8
# For `make fleet`: the number of agents, the length of a phase and the interval of reports.
AGENTS := 5000
FOR := 10m
EVERY := 10s
SCALE = PLIMSOLL_E2E_BINARY=$(CURDIR)/$(BINARY) go test -C tests/e2e/suite -tags e2e -count=1 -v -timeout 90m ./scale

# Additional programs that cluster-build builds.
export EXTRAS

.PHONY: help demo demo-picture top-picture test watch bench protect protect-v2 simulate fuzz fuzz-keep generate build previous image image-check arm64 release release-check release-publish release-tools tools fmt clippy deny compile unit guest test-binary
.PHONY: pure timed api mixes book versions kubelets kubelet-newest schedulers consumers ip-families chart lint lint-files kustomize try e2e e2e-quick e2e-long scale fleet clients compare dashboard dashboard-picture prometheus cert-manager helm4 cluster cluster-build cluster-up cluster-down cluster-smoke crane-score

help: ## Lists these targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

demo: tools-demo ## Enforces demo policies on this machine for a minute, then restores everything (needs root)
	@echo "building the demo: about 3 minutes the first time"
	@cargo build --profile demo
	@target/demo/plimsoll demo

demo-picture: tools-demo ## Runs the demo and draws docs/demo.svg from it (needs root and a quiet machine; installs termtosvg)
	@cargo build --profile demo
	@scripts/demo-picture target/demo/plimsoll docs/demo.svg

top-picture: build ## Draws docs/top.svg: what plimsoll top prints for made-up nodes (installs python3-rich)
	@scripts/top-picture $(BINARY) docs/top.svg

test: tools ## Runs all checks, as CI does (needs root; installs missing tools)
	@rm -f target/phases
	@$(PHASE) fmt cargo fmt --check
	@$(PHASE) build $(MAKE) -s -j2 cluster-build compile NODES=$(NODE) EXTRAS=checkers
	@$(PHASE) deny $(MAKE) -s deny
	@$(PHASE) kernel $(CARGO_TEST) --test kernel --test steady
	@$(PHASE) timed $(MAKE) -s timed
	@# The tests of the command line wait a part of their time for the program's next pass.
	@$(PHASE) cli $(CARGO_TEST) --test cli -- --test-threads=6
	@# The tests of the API server wait a part of their time.
	@$(PHASE) pure+api $(MAKE) -s -j2 -O pure api
	@$(PHASE) kernel-v2 $(MAKE) -s guest
	@# The tests on the cluster wait most of their time.
	@$(PHASE) cluster $(MAKE) -s -j2 chart e2e-quick NODES=$(NODE)
	@echo "make test does not run: make e2e (all scenes on a cluster of two nodes, takes an hour); make e2e-long (also the slow scenes, and the release image); make dashboard (dashboard and alerts in Prometheus); make helm4 (the chart with Helm 4); make cluster-smoke (the test cluster itself, and make try); make fuzz (each parser under a fuzzer); make scale (thousands of nodes); make ip-families (IPv6 only, and dual-stack); make compare (comparison with metrics-server); make clients (other clients of the API); make kubelet-newest (kubelet 1.37 on cgroup v2); make versions (other versions of Kubernetes); make schedulers (placement by real kube-schedulers); make consumers (Trimaran's plugins and the descheduler); make bench (the figures in docs/internals/benchmarks.md); make protect, make protect-v2 and make mixes (whether important pods stay fast); make simulate (schedulers compared); make image-check (builds the image twice and compares); make arm64 (the pure tests on arm64); make release-check (a release, from a registry)"
	@echo; echo "phase  seconds  CPUs busy"; cat target/phases

watch: tools-build ## Runs tests again when a source file changes: make watch TEST="--test pure engine::throttle"
	@command -v entr >/dev/null || apt-get install -y -qq entr
	@find src tests -name '*.rs' | entr -c $(CARGO_TEST) $(TEST)

bench: tools-build ## Runs the benchmarks of docs/internals/benchmarks.md with their baselines, and fails if one exceeds its limit (needs root and an idle machine)
	cargo bench --no-fail-fast --target $(TARGET) --bench '[!p]*' -- --assert

protect: tools-protect ## Measures how far important pods are protected, each way beside the others, and renews docs/protection.md; fails if a bar is missed (needs root and an idle machine; installs redis; 40 minutes)
	cargo bench --target $(TARGET) --bench protect -- --write --assert

protect-v2: tools ## The same on cgroup v2, in a qemu guest: emulated, so that only ratios count (half an hour)
	cargo bench --target $(TARGET) --bench protect --no-run
	GUEST_TIMEOUT=7200 GUEST_ARGS="--rounds 2 --length-factor 3 --only burst,wake-ups,chain --program /bin/plimsoll" \
		tests/guest/run.sh "$$(ls -t target/$(TARGET)/release/deps/protect-* | grep -v '\.d$$' | head -1)" $(BINARY)

# Without the release's link-time optimisation, which would take longer than the simulation; the result is the same.
simulate: tools-build ## Compares schedulers by simulation and renews docs/internals/scheduling-comparison.md (some minutes)
	cargo bench --target $(TARGET) --profile dev --config 'profile.dev.package.plimsoll.opt-level=3' --bench placement -- --write

fuzz: FOR := 10s
fuzz: tools ## Fuzzes the parsers of external input: each target FOR=10s; ONLY="token report" selects targets; AGAIN=FILE runs one input
	@scripts/fuzz $(if $(AGAIN),--again $(AGAIN),$(FOR) $(ONLY))

fuzz-keep: tools ## Adds inputs that reach new code to fuzz/corpus
	@scripts/fuzz --keep

generate: ## Updates the generated files: crds/*.yaml and the chart's copies, docs/metrics.md, docs/permissions.md, the chart's schema and table of values, the kustomize base
	cargo run -q --target $(TARGET) -- crds --output-dir crds
	@cargo run -q --target $(TARGET) -- metrics >docs/metrics.md
	@cp crds/*.yaml $(CHART)/files/crds/
	@cargo run -q --target $(TARGET) -- crds --kubernetes 1.33 --output-dir target/crds-before-1.34
	@cp target/crds-before-1.34/ensurance.crane.io_nodeqoss.yaml $(CHART)/files/crds-before-1.34/
	@go run -C tests/chart .
	@[ ! -x target/e2e/bin/helm ] || scripts/kustomize-base
	@PLIMSOLL_GENERATE=1 $(CARGO_TEST) -q --test pure docs::the_permissions_page

chart lint: EXTRAS = checkers
chart: cluster-build lint-files ## Checks the Helm chart: what lint checks, rejected values, installation, upgrades, alert rules, Argo CD's health scripts, kustomize
	@target/e2e/bin/promtool test rules tests/chart/alerts.test.yaml
	@go test -C tests/e2e/suite -tags e2e -count=1 -short -timeout 10m ./chart ./dashboard ./gitops ./pages ./plugin ./stamp

lint: cluster-build lint-files ## Lints without a cluster, in half a minute: the chart with each of its values files (helm lint --strict, kubeconform, kube-score), alert rules, generated files, scripts, workflows, links and lengths of the documentation, and types of the commands for macOS
	@go test -C tests/e2e/suite -tags e2e -count=1 -timeout 10m -run 'EveryCombination' ./chart
	@# Not part of `make test`: the crates are checked once more for that system, which takes minutes the first time.
	@scripts/check-macos

lint-files: tools
	@diff -r crds $(CHART)/files/crds || { echo "the chart's CustomResourceDefinitions differ from crds/: run make generate" >&2; false; }
	@go run -C tests/chart . -check
	@scripts/kustomize-base --check
	@go test -C tests/book .
	@go run -C tests/book . check
	@target/e2e/bin/promtool check rules --lint=all $(CHART)/files/alerts.yaml
	@shellcheck --severity=warning $(SCRIPTS)
	@target/e2e/bin/actionlint
	@badly=$$(gofmt -l tests) && [ -z "$$badly" ] || { echo "not formatted, or not Go: $$badly" >&2; false; }

book: ## Builds the site of docs/ with mdBook, and checks every link: target/book (installs mdBook once, which takes minutes)
	@scripts/book

kustomize: cluster-build ## Renders the chart as a kustomize base: deploy/kustomize/base
	@scripts/kustomize-base

helm4: EXTRAS = kwok,checkers
helm4: cluster-build ## Runs the checks of the chart, and install to uninstall of a release, with Helm 4 (ten minutes)
	@CGO_ENABLED=0 nice -n 15 go build -C tests/e2e/cluster/helm4 -mod=readonly -trimpath -ldflags "-s -w" -o $(CURDIR)/target/e2e/bin/helm4 helm.sh/helm/v4/cmd/helm
	@PLIMSOLL_E2E_HELM=helm4 go test -C tests/e2e/suite -tags e2e -count=1 -timeout 20m -v ./chart

build: tools-build ## Builds the release binary and checks that it is static and small
	cargo build --release --target $(TARGET)
	scripts/check-binary $(BINARY)

previous: tools-build ## Builds the previous release, from which cluster tests upgrade: target/previous (once)
	@scripts/previous

image: tools-image ## Builds a reproducible image with an SBOM: target/image (needs root; installs buildah; ARCHITECTURES="amd64 arm64" for both)
	@scripts/image target/image $(ARCHITECTURES)

image-check: tools-image ## Builds the image twice, in different directories, and compares the results (needs root; two full builds; ARCHITECTURES="amd64 arm64" for both)
	@scripts/image-check $(ARCHITECTURES)

# Emulated, tests of speed miss their deadlines, and tests can't run the program (make release-check does).
SKIP_ON_ARM64 := preview:: crd::definitions crd::examples a_timeout_shorter_than_the_agents
arm64: tools-image ## Runs the pure tests on arm64, emulated by qemu (half an hour)
	cargo test --target aarch64-unknown-linux-musl --lib -- $(addprefix --skip ,$(TIMED))
	cargo test --target aarch64-unknown-linux-musl --test pure -- $(addprefix --skip ,$(SKIP_ON_ARM64))

release: ## Builds all that a release publishes: target/release-VERSION (needs root; make release VERSION=1.2.3; two full builds)
	@scripts/release $(VERSION)

release-check: export NODES = v1
release-check: ## Publishes target/release-VERSION to a registry on this machine, verifies, and installs it on a cluster (needs root and cgroup v1; VERSION=1.2.3)
	@[ -f target/release-$(VERSION)/SHA256SUMS ] || { echo "target/release-$(VERSION) is no release: make release VERSION=x.y.z" >&2; false; }
	@$(MAKE) -s release-tools cluster-build
	@$(CLUSTER) up
	@$(CLUSTER) on v1 $(CURDIR)/scripts/release-check $(CURDIR)/target/release-$(VERSION); status=$$?; $(CLUSTER) down; exit $$status

release-publish: release-tools ## Publishes and signs target/release-VERSION (VERSION=1.2.3; COSIGN_KEY=FILE, or keyless)
	@scripts/publish target/release-$(VERSION)

# From Go modules: cosign, crane, nfpm, krew's validator, and Helm unless the test cluster's is there.
release-tools:
	@mkdir -p target/e2e/bin
	@CGO_ENABLED=0 nice -n 15 go build -C tests/e2e/cluster/release -mod=readonly -trimpath -ldflags "-s -w" -o $(CURDIR)/target/e2e/bin/ \
		github.com/sigstore/cosign/v3/cmd/cosign github.com/google/go-containerregistry/cmd/crane github.com/goreleaser/nfpm/v2/cmd/nfpm
	@CGO_ENABLED=0 nice -n 15 go build -C tests/e2e/cluster/krew -mod=readonly -trimpath -ldflags "-s -w" -o $(CURDIR)/target/e2e/bin/ sigs.k8s.io/krew/cmd/validate-krew-manifest
	@[ -x target/e2e/bin/helm ] || CGO_ENABLED=0 nice -n 15 go build -C tests/e2e/cluster/helm -mod=readonly -trimpath -ldflags "-s -w" -o $(CURDIR)/target/e2e/bin/ helm.sh/helm/v3/cmd/helm

tools: tools-test ## Installs the tools that a new Debian machine needs

tools-%:
	@scripts/tools $*

clippy: ## Lints with warnings as errors
	cargo clippy -q --all-targets --target $(TARGET) -- -D warnings

deny: ## Checks licences, sources, duplicates and (if online) security advisories of the dependencies
	cargo deny --log-level error check bans licenses sources
	@scripts/advisories

compile: clippy ## Lints, then builds the tests and the program that they run
	$(CARGO_TEST) --no-run

unit: ## Runs the tests on this machine's kernel
	$(CARGO_TEST) --lib --test pure --test kernel --test steady --test cli
	@$(MAKE) -s api

pure:
	$(CARGO_TEST) --lib --test pure -- $(addprefix --skip ,$(TIMED))

timed:
	$(CARGO_TEST) --lib -- --test-threads=1 $(TIMED)

api:
	$(CARGO_TEST) --test api -- --test-threads=8

guest: ## Runs the kernel tests on a cgroup v2 kernel in a qemu guest
	tests/guest/run.sh

mixes: tools ## Throttles random mixes of pods on a simulated node, on this machine's kernel and on cgroup v2, and follows the expected load for ten minutes (1.5 hours)
	PROPTEST_CASES=1000 $(CARGO_TEST) --test pure -- throttles_follow_the_demand
	$(CARGO_TEST) --test kernel -- --ignored --nocapture --test-threads=1 random_mixes ten_minutes
	GUEST_TIMEOUT=7200 GUEST_ARGS="--ignored --exact closed_loop::throttles_follow_random_mixes --nocapture" tests/guest/run.sh

try: tools-cluster ## Runs Plimsoll on a real Kubernetes cluster on this machine until Ctrl-C, then removes everything (needs root)
	@$(MAKE) -s -j2 cluster-build test-binary NODES=$(BOTH)
	@NODES=$(BOTH) scripts/try $(TEST_BINARY)

# As `cargo test` builds it, with the features of the tests' crates, so that neither is built twice.
test-binary:
	@$(CARGO_TEST) -q --no-run --test cli

e2e-quick: test-binary ## Runs the cluster tests that need only one node, as CI does: with kubelet 1.34 where this machine has cgroup v1 (some minutes)
	@$(MAKE) -s cluster-build NODES=$(NODE)
	@$(call QUICK_SUITE,$(NODE),$(QUICK),quick)

kubelet-newest: test-binary ## Runs the cluster tests of kubelets on v2, with kubelet 1.37 (ten minutes; the node is emulated)
	@$(MAKE) -s cluster-build NODES=v2
	@export PLIMSOLL_E2E_PATIENCE=4; $(call QUICK_SUITE,v2,KubeletGoesOn,newest)

scale fleet compare: EXTRAS = kwok
scale: tools-cluster build ## Tests with simulated nodes: the cap, a bad edit that stops, 1000 nodes with 50 policies, 5000 polled endpoints, 5000 and 15 000 reporting agents (no root; 1.5 hours)
	@$(MAKE) -s cluster-build NODES=$(NODE)
	@$(CARGO_TEST) --lib -- --ignored --exact polling::tests::five_thousand_endpoints_in_fifteen_seconds --nocapture
	@$(SCALE) -skip Fleet
	@$(MAKE) -s fleet
	@$(MAKE) -s fleet AGENTS=15000 FOR=2m EVERY=20s

ip-families: tools-cluster build ## Runs cluster tests on IPv6-only and dual-stack clusters (needs root and cgroup v1; twelve minutes)
	@$(MAKE) -s cluster-build NODES=v1
	@for family in ipv6 dual; do \
		IP_FAMILY=$$family NODES=v1 go test -C tests/e2e/suite -tags e2e -count=1 -parallel 3 -timeout 20m -v . -run '$(ADDRESSES)' || exit; done

fleet: tools-cluster build ## Runs the part of scale with AGENTS=5000 agents that report EVERY=10s, FOR=10m in each phase
	@$(MAKE) -s cluster-build NODES=$(NODE)
	@PLIMSOLL_SCALE_AGENTS=$(AGENTS) PLIMSOLL_SCALE_FOR=$(FOR) PLIMSOLL_SCALE_INTERVAL=$(EVERY) $(SCALE) -run Fleet

clients: tools-cluster build cert-manager ## Tests NodeMetrics with client-go, controller-runtime and kubectl during failovers (root for one test only; twenty minutes)
	@$(MAKE) -s cluster-build NODES=$(NODE)
	@PLIMSOLL_E2E_BINARY=$(CURDIR)/$(BINARY) go test -C tests/e2e/suite -tags e2e -count=1 -v -timeout 35m ./clients

versions: tools-cluster ## Runs the tests of the API server on the other supported versions of Kubernetes, and the scene of kubelets on each (needs root; builds each)
	@$(MAKE) -s cluster-build NODES=$(NODE)
	@$(CARGO_TEST) --test api -- --ignored --exact definitions::an_api_server_1_33_validates_with_its_definitions
	@for version in $(VERSIONS); do \
		echo "== Kubernetes $$version"; bin=$$(scripts/api-server $$version) || exit; \
		PLIMSOLL_E2E_BIN=$$bin $(CARGO_TEST) --test api -- --test-threads=8 $(ON_VERSIONS) || exit; \
		PLIMSOLL_E2E_BIN=$$bin go test -C tests/e2e/suite -tags e2e -count=1 -timeout 10m -run 'OnAnAPIServer' ./chart || exit; \
	done
	@$(MAKE) -s kubelets

kubelets: tools-cluster build cluster ## Tests throttled pods in the idle class with kubelets 1.33 to 1.37 and both cgroup drivers, on node v2 (needs root; builds each)
	@for version in $(KUBELETS); do for driver in systemd cgroupfs; do \
		echo "== kubelet $$version, $$driver driver"; export KUBELET=$$version CGROUP_DRIVER=$$driver NODES=v2 PLIMSOLL_E2E_PATIENCE=4; $(CLUSTER) build || exit; \
		PLIMSOLL_E2E_BINARY=$(CURDIR)/$(BINARY) go test -C tests/e2e/suite -tags e2e -count=1 -timeout 40m -v . -run 'KubeletGoesOn' || exit; \
	done; done

schedulers: tools-cluster build crane-score ## Places pods by the load of nodes, with kube-schedulers 1.34 and 1.36, crane-scheduler, and Karpenter's simulation (builds them first; then half an hour)
	@$(MAKE) -s cluster-build NODES=$(NODE)
	@go test -C tests/e2e/suite/karpenter -count=1 -timeout 10m .
	@$(CARGO_TEST) --test api -- --ignored crane::crane_scheduler
	@for version in 1.34 1.36; do bin=$$(scripts/api-server $$version kube-scheduler) || exit; \
		PLIMSOLL_E2E_BIN=$$bin PLIMSOLL_E2E_BINARY=$(CURDIR)/$(BINARY) go test -C tests/e2e/suite -tags e2e -count=1 -timeout 15m -v ./placement || exit; \
	done

consumers: tools-cluster test-binary ## Tests the pages for schedulers with Trimaran's plugins and the descheduler (no root; builds both first, then four minutes)
	@$(MAKE) -s cluster-build NODES=$(NODE)
	@CGO_ENABLED=0 nice -n 15 go build -C tests/e2e/suite/trimaran -mod=readonly -trimpath -ldflags "-s -w" \
		-o $(CURDIR)/target/e2e/bin/trimaran-scheduler sigs.k8s.io/scheduler-plugins/cmd/scheduler
	@CGO_ENABLED=0 nice -n 15 go build -C tests/e2e/suite/descheduler -mod=readonly -trimpath -ldflags "-s -w" \
		-o $(CURDIR)/target/e2e/bin/descheduler sigs.k8s.io/descheduler/cmd/descheduler
	@PLIMSOLL_E2E_BINARY=$(CURDIR)/$(TEST_BINARY) go test -C tests/e2e/suite -tags e2e -count=1 -v -timeout 20m ./consumers

compare: tools-cluster build ## Compares cost and data age of NodeMetrics and metrics-server at 200 simulated nodes (no root; five minutes)
	@$(MAKE) -s cluster-build NODES=$(NODE)
	@CGO_ENABLED=0 nice -n 15 go build -C tests/e2e/suite/compare/metrics-server -mod=readonly -trimpath -ldflags "-s -w" \
		-o $(CURDIR)/target/e2e/bin/metrics-server sigs.k8s.io/metrics-server/cmd/metrics-server
	@PLIMSOLL_E2E_BINARY=$(CURDIR)/$(BINARY) go test -C tests/e2e/suite -tags e2e -count=1 -v -timeout 20m ./compare

dashboard: tools-cluster build prometheus ## Tests the queries of dashboard and alerts with a Prometheus on a real cluster (needs root; builds Prometheus first)
	@NODES=v1,v2 $(MAKE) -s cluster-build
	@NODES=v1,v2 go test -C tests/e2e/suite -tags e2e,prometheus -count=1 -v -timeout 20m -run Prometheus .

dashboard-picture: tools-cluster prometheus ## Draws docs/dashboard.svg from made-up data (no root; builds Prometheus and the test cluster first)
	@$(MAKE) -s cluster-build NODES=$(NODE)
	@go test -C tests/e2e/suite -tags prometheus -count=1 -run IsDrawn ./dashboard

prometheus: # Builds Prometheus from its Go module, with Kubernetes discovery only.
	@mkdir -p target/e2e/bin
	@CGO_ENABLED=0 nice -n 15 go build -C tests/e2e/suite/prometheus -mod=readonly -trimpath -ldflags "-s -w" -tags remove_all_sd,enable_kubernetes_sd \
		-o $(CURDIR)/target/e2e/bin/prometheus github.com/prometheus/prometheus/cmd/prometheus

# With the release build: the debug build is too slow for the emulated node.
e2e: tools-cluster build previous cluster-build ## Runs all cluster tests on a real Kubernetes with both nodes (needs root; an hour on 2 cores)
	@PLIMSOLL_E2E_BINARY=$(CURDIR)/$(BINARY) go test -C tests/e2e/suite -tags e2e -count=1 -parallel 3 -timeout 90m -v .

crane-score: # Builds crane-scheduler's own plugin, with the Kubernetes 1.23 libraries that it was written for, as a command.
	@[ -d target/crane-scheduler ] || git clone -q $(CRANE_SCHEDULER) target/crane-scheduler
	@git -C target/crane-scheduler checkout -q $(CRANE_SCHEDULER_COMMIT)
	@cp tests/e2e/suite/crane-scheduler/upstream.mod target/crane-scheduler/go.mod
	@mkdir -p target/e2e/bin
	@CGO_ENABLED=0 nice -n 15 go build -C tests/e2e/suite/crane-scheduler -mod=readonly -trimpath -ldflags "-s -w" -o $(CURDIR)/target/e2e/bin/crane-score .

cert-manager: # Builds cert-manager's controllers, which some tests use, from its Go module.
	@mkdir -p target/e2e/bin
	@CGO_ENABLED=0 nice -n 15 go build -C tests/e2e/suite/cert-manager -mod=readonly -trimpath -ldflags "-s -w" -o $(CURDIR)/target/e2e/bin/cert-manager .

e2e-long: EXTRAS = kwok,checkers
e2e-long: tools-cluster build image previous cluster-build cert-manager ## As e2e, with the release image and slow tests: 50 kills, API server outage, reboot, certificate rotation, release lifecycle on kwok nodes, unused permissions
	@go test -C tests/e2e/suite -tags e2e -count=1 -timeout 20m -v ./chart ./stamp
	@PLIMSOLL_E2E_ARCHIVE=$(CURDIR)/target/image/plimsoll.tar go test -C tests/e2e/suite -tags e2e -count=1 -parallel 4 -timeout 125m -v . -args -long -permissions

cluster: ## Builds the command that runs the test cluster: target/e2e/bin/cluster (see tests/e2e/cluster/README.md)
	@mkdir -p target/e2e/bin
	@go build -C tests/e2e/cluster -buildvcs=false -ldflags "-X main.source=$(CURDIR)/tests/e2e/cluster" -o $(CURDIR)/$(CLUSTER) .

cluster-build: cluster ## Builds the parts of the test cluster: Kubernetes, pod images, the guest (needs root; NODES=v1,v2)
	@$(CLUSTER) build

cluster-up: cluster ## Starts a real Kubernetes on this machine (needs root; NODES=v1 starts faster)
	@$(CLUSTER) up

cluster-down: cluster ## Stops the test cluster and removes its remains, also after a crash
	@$(CLUSTER) down

cluster-smoke: cluster ## Tests the test cluster itself: that it works and removes everything (needs root; NODES=v1,v2)
	@go test -C tests/e2e/cluster -tags smoke -count=1 -v -timeout 15m .
