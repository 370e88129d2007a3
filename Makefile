# Headrace: what a developer or a first user runs. `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.headrace
DEV := $(VENV)/.headrace-dev
NATIVE := engine/native/libheadrace.so
PROTOS_VENV := .venv-protos
PROTOS_STAMP := $(PROTOS_VENV)/.headrace
PROTOS := $(sort $(wildcard protos/headrace/v1/*.proto))
CONTRACT := protos/contract.binpb
LISTEN ?= 127.0.0.1:50051
WORKERS ?= auto
MODEL ?= models/demo
ARGS ?=
# Also where the environment says no: without their bytecode, each process compiles torch and transformers again, for six seconds.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help
help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- set-up ----------------------------------------------------------------------------------------------------------

# What serving needs, and with $(DEV) what the checks and tests need too.
$(STAMP) $(DEV): pyproject.toml clients/python/pyproject.toml constraints.txt
	@echo "==> setting up $(VENV) (the first time this fetches torch, 5 GB on the disk: a minute or more)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=python3.12")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }
	$(BIN)/python scripts/install.py $(if $(filter $(DEV),$@),--dev)
	@touch $(if $(filter $(DEV),$@),$(STAMP)) $@

# The installation has built them, unless their sources have changed since. Without a C++ compiler this goes on, and the engine
# runs without the kernels.
$(NATIVE): engine/native/build.py $(wildcard engine/native/src/*) | $(STAMP)
	$(BIN)/python -m engine.native.build --optional

.PHONY: setup
setup: $(DEV) $(NATIVE) ## Make the virtual environment with pinned packages (others do it when needed).

# ---- run -------------------------------------------------------------------------------------------------------------

.PHONY: run
run: $(STAMP) $(NATIVE) ## Serve the demo model on 127.0.0.1:50051 (MODEL=path|hub id|smollm2 LISTEN=address ARGS='more flags').
ifeq ($(MODEL),smollm2)
	@model=$$($(BIN)/python scripts/real_model.py) && exec $(BIN)/headrace-server serve --model "$$model" --listen $(LISTEN) $(ARGS)
else
	@exec $(BIN)/headrace-server serve --model $(MODEL) --listen $(LISTEN) $(ARGS)
endif

# ---- checks ----------------------------------------------------------------------------------------------------------

# A file's tests run in one process, which shares the servers that it starts; in the order in which they are collected, as
# the last files are short ones.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: test
test: $(DEV) $(NATIVE) ## Run the Python test suite (in processes for the cores and the memory there are; WORKERS=0: in one).
	$(PYTEST) -m 'not slow' $(ARGS)

.PHONY: test-slow
test-slow: $(DEV) $(NATIVE) ## Run the long sweeps: every model family in every mode, every planted bug.
	$(PYTEST) -m slow $(ARGS)

.PHONY: test-versions
test-versions: $(DEV) $(NATIVE) ## Run the tests of models at the lowest and newest torch and transformers, in environments of their own: some minutes, some gigabytes (ARGS='--only newest').
	$(BIN)/python scripts/test_versions.py --workers $(WORKERS) $(ARGS)

.PHONY: test-telemetry
test-telemetry: $(DEV) $(NATIVE) ## Run tests of sessions, faults, ends and shutdown again, with spans and metrics on.
	$(PYTEST) -m 'not slow' --with-telemetry $(addprefix tests/service/,servicers/test_sessions.py test_faults.py delivery/test_ends.py test_shutdown.py) $(ARGS)

.PHONY: test-clients
test-clients: $(DEV) ## Run the conformance suite of the client libraries (ARGS='--language go --vector resume'; REQUIRE=1: all).
	GRPC_VERBOSITY=NONE $(BIN)/python -m tests.conformance $(if $(REQUIRE),--require) $(ARGS)

.PHONY: lint
lint: $(DEV) ## Check style, import arrows and the contract's form.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --exit-code --diff

.PHONY: types
types: $(DEV) ## Check types (mypy strict on engine, service and the Python client).
	$(BIN)/mypy

.PHONY: check
check: lint types protos-check test test-slow test-telemetry ## Everything that CI checks.

.PHONY: format
format: $(DEV) ## Bring the sources into their form.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write

# ---- generated code --------------------------------------------------------------------------------------------------

$(PROTOS_STAMP): protos/requirements.txt
	$(PYTHON) -m venv $(PROTOS_VENV)
	$(PROTOS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -r protos/requirements.txt
	@touch $@

.PHONY: protos
protos: $(PROTOS_STAMP) $(DEV) ## Generate the Python, Go, TypeScript and Rust code from protos/; refuses a breaking change.
	set -o pipefail; $(BIN)/buf build -o - | $(BIN)/buf breaking - --against $(CONTRACT)
	$(BIN)/buf build --exclude-source-info -o $(CONTRACT)
	scripts/generate-python.sh $(PROTOS_VENV)
	BUF=$(BIN)/buf scripts/generate-go.sh
	BUF=$(BIN)/buf scripts/generate-typescript.sh
	BUF=$(BIN)/buf scripts/generate-rust.sh

.PHONY: protos-check
protos-check: $(PROTOS_STAMP) $(DEV) ## Check that protos/ breaks nothing and the committed stubs are its own (Go, TypeScript, Rust: where installed).
	set -o pipefail; $(BIN)/buf build -o - | $(BIN)/buf breaking - --against $(CONTRACT)
	@$(BIN)/buf build --exclude-source-info -o - | cmp -s - $(CONTRACT) || { echo "$(CONTRACT) is not that of protos/: run make protos"; exit 1; }
	scripts/generate-python.sh $(PROTOS_VENV) --check
	@if command -v go >/dev/null; then BUF=$(BIN)/buf scripts/generate-go.sh --check; else echo "Go stubs not checked: go is not installed"; fi
	@if command -v npm >/dev/null; then BUF=$(BIN)/buf scripts/generate-typescript.sh --check; else echo "TypeScript stubs not checked: npm is not installed"; fi
	@if command -v cargo >/dev/null; then BUF=$(BIN)/buf scripts/generate-rust.sh --check; else echo "Rust code not checked: cargo is not installed"; fi

.PHONY: packages
packages: $(DEV) ## Make the packages of the server (its kernels: minutes) and of the client libraries, and the bundle of protos in dist/packages (Go, TypeScript, Rust, Java: where installed).
	scripts/packages-python.sh $(BIN)/python
	scripts/packages-protos.sh $(BIN)/buf
	@if command -v go >/dev/null; then scripts/packages-go.sh; else echo "no Go module: go is not installed"; fi
	@if command -v npm >/dev/null; then scripts/packages-typescript.sh; else echo "no npm tarball: npm is not installed"; fi
	@if command -v cargo >/dev/null; then scripts/packages-rust.sh; else echo "no Rust crate: cargo is not installed"; fi
	@if command -v mvn >/dev/null; then scripts/packages-java.sh; else echo "no Maven artefact: mvn is not installed"; fi

.PHONY: lock
lock: $(DEV) ## Write deploy/requirements.lock: the image's packages with their hashes, in the versions of constraints.txt.
	set -o pipefail; $(BIN)/python deploy/dependencies.py names pyproject.toml clients/python/pyproject.toml | \
	  $(BIN)/python -m uv pip compile --quiet --system-certs --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --no-header --constraint constraints.txt --output-file deploy/requirements.lock -

.PHONY: image
image: ## Build the server's image by buildah, try it and record it (as root; ARGS='--torch cpu --base debian').
	$(PYTHON) scripts/image.py $(ARGS)

.PHONY: model-table
model-table: $(DEV) ## Write the tables of docs/models.md from tests/model_recipes.py.
	$(BIN)/python tests/model_table.py

.PHONY: launch-table
launch-table: $(DEV) ## Write what a step of each family launches on CUDA, traced without a device: two minutes.
	$(BIN)/python tests/launch_table.py

.PHONY: kernels
kernels: $(DEV) ## Compile every Triton kernel for an H100 (that of experts for 8.0 and 8.9 too), without one, in all sizes, block sizes and types: some minutes (ARGS='more flags').
	$(BIN)/python tests/compile_kernels.py $(ARGS)

.PHONY: top-picture
top-picture: $(DEV) $(NATIVE) ## Draw docs/top.svg, the picture of `headrace top` in README.md, from a real run.
	$(BIN)/python tests/draw_top.py

# ---- figures ---------------------------------------------------------------------------------------------------------

OURS := headrace,headrace-session,headrace-streams,headrace-in-process
LIBRARY := generate,generate-batch

.PHONY: bench
bench: $(DEV) $(NATIVE) ## Measure the demo model beside transformers' own generation: some minutes (ARGS='more flags').
	$(BIN)/python -m benchmarks run --workload W1,W2,W3,W4 --systems $(OURS),$(LIBRARY) --turns 4 $(ARGS)

.PHONY: bench-load
bench-load: $(DEV) $(NATIVE) ## The same under closed loops of 1 to 64 requests and open loops: some minutes.
	$(BIN)/python -m benchmarks run --workload W2 --load closed:1,closed:8,closed:16,closed:32,closed:64,poisson:5,poisson:15 \
	  --systems headrace,headrace-session,headrace-streams,generate-batch --turns 2 $(ARGS)

.PHONY: bench-cpu
bench-cpu: $(DEV) $(NATIVE) ## Measure random weights of Qwen3-0.6B's shape, all workloads: an hour.
	$(BIN)/python -m benchmarks run --model qwen3-0.6b --workload W1,W2,W3,W4,W5 --systems headrace,headrace-session,$(LIBRARY) $(ARGS)

# A host with a GPU may be bare and offline: this takes PYTHON's own packages and makes no environment. WHEELS is a folder
# with wheels of what PYTHON lacks (gRPC's, say); they are unpacked in BENCH_SITE, nothing is downloaded.
BENCH_SITE ?= $(HOME)/.cache/headrace-bench/site
WHEELS ?=

.PHONY: bench-gpu
bench-gpu: ## Check, then measure on a CUDA device, with PYTHON's own packages (WHEELS=folder ARGS='--part decode-8b').
	@test -z "$(WHEELS)" || $(PYTHON) -m pip install --disable-pip-version-check --quiet --no-index --no-deps --no-compile \
	  --upgrade --target $(BENCH_SITE) $(WHEELS)/*.whl
	PYTHONPATH=$(CURDIR):$(CURDIR)/clients/python/src:$(if $(WHEELS),$(BENCH_SITE):)$$PYTHONPATH $(PYTHON) -m benchmarks gpu $(ARGS)

# What the service needs and such a host seldom has; its own torch, transformers and numpy are what is measured.
GPU_WHEELS := googleapis-common-protos|grpcio(-health-checking|-reflection|-status)?|llguidance|msgspec|opentelemetry-.*|prometheus_client|protobuf|wrapt
GPU_PYTHON ?= 3.12

.PHONY: gpu-wheels
gpu-wheels: $(DEV) ## Fetch the wheels that the part grpc of bench-gpu needs on an offline host (WHEELS=folder GPU_PYTHON=3.12).
	@test -n "$(WHEELS)" || { echo "make gpu-wheels: WHEELS=folder says where to"; exit 1; }
	$(BIN)/pip download --disable-pip-version-check --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
	  $(foreach glibc,_2_34 _2_31 _2_28 _2_27 _2_17 2014 1,--platform manylinux$(glibc)_x86_64) --dest $(WHEELS) --requirement <(grep -E '^($(GPU_WHEELS))==' constraints.txt)
	@du -sh $(WHEELS)

.PHONY: bench-report
bench-report: $(DEV) ## Write the tables of the documents from the records in benchmarks/results/.
	$(BIN)/python -m benchmarks report

.PHONY: bench-first-try
bench-first-try: $(DEV) ## Measure `make run` in fresh clones, without caches, part by part: about four minutes.
	$(BIN)/python -m benchmarks first_try $(ARGS)

.PHONY: bench-step-time
bench-step-time: $(DEV) $(NATIVE) ## Measure what a target step time gives and costs, on the 0.6B shape: a quarter of an hour (ARGS=--resume).
	$(BIN)/python -m benchmarks step_time $(ARGS)

.PHONY: bench-fairness
bench-fairness: $(DEV) $(NATIVE) ## Measure what a caller gets beside another's backlog: about ten minutes.
	$(BIN)/python -m benchmarks fairness $(ARGS)

.PHONY: bench-front-end
bench-front-end: $(DEV) ## Measure what the front end costs: CPU time of its process for each token.
	$(BIN)/python -m benchmarks front_end_cost $(ARGS)

.PHONY: bench-telemetry
bench-telemetry: $(DEV) $(NATIVE) ## Measure throughput and CPU time with all telemetry on, beside off: about eight minutes.
	$(BIN)/python -m benchmarks telemetry $(ARGS)

.PHONY: bench-plan
bench-plan: $(DEV) $(NATIVE) ## Compare headrace-server plan with what servers then take: about six minutes (ARGS='--shape demo').
	$(BIN)/python -m benchmarks plan $(ARGS)

.PHONY: bench-wire-size
bench-wire-size: $(DEV) $(NATIVE) ## Count what a session takes on the wire: bytes of its answers for each token (ARGS='--output FILE').
	$(BIN)/python -m benchmarks wire_size $(ARGS)

.PHONY: bench-clients
bench-clients: $(DEV) $(NATIVE) ## Measure the client libraries beside each other, and write docs/clients.md's tables: five minutes.
	GRPC_VERBOSITY=ERROR $(BIN)/python -m benchmarks languages $(ARGS)
	$(BIN)/python -m benchmarks report

# ---- trust -----------------------------------------------------------------------------------------------------------

SEED ?= 1
PART ?=
TRUST := GRPC_VERBOSITY=ERROR $(BIN)/python -m pytest tests/campaign/test_campaign.py -m campaign -qs -p no:cacheprovider \
  --campaign-seed $(SEED) $(addprefix --campaign-part ,$(PART))

.PHONY: trust
trust: $(DEV) $(NATIVE) ## Attack what is promised, and write records: up to three hours (PART=ends SEED=7; it resumes).
	$(TRUST) $(ARGS)

.PHONY: trust-cut
trust-cut: $(DEV) $(NATIVE) ## The few minutes of it that CI runs.
	$(TRUST) --campaign-cut $(ARGS)

.PHONY: trust-report
trust-report: $(DEV) ## Write docs/trust.md from the records.
	$(BIN)/python -m tests.campaign.document

.PHONY: proxies
proxies: $(DEV) $(NATIVE) ## Try every call through nginx, HAProxy and Envoy, and write docs/proxies.md's tables: five minutes (ARGS=--long).
	GRPC_VERBOSITY=ERROR $(BIN)/python -m benchmarks proxies $(ARGS)
	$(BIN)/python -m benchmarks report

.PHONY: audit
audit: $(DEV) ## Ask PyPI what is known of the pinned packages (ARGS='grpcio protobuf': of these alone).
	@$(BIN)/python scripts/audit.py $(ARGS)

.PHONY: clean
clean: ## Remove what was built; the virtual environments stay.
	rm -rf build dist *.egg-info clients/python/build clients/python/src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
	rm -rf .hypothesis .import_linter_cache .tools clients/typescript/node_modules clients/typescript/dist clients/typescript/build clients/java/target
	find . -name __pycache__ -type d -prune -not -path './.venv*' -exec rm -rf {} +
