# What a user or developer runs. Each target does its own set-up; `make demo` and `make test` are the two to start with.
# PYTHON picks the interpreter, for example `make test PYTHON=python3.12 VENV=.venv-3.12`.
PYTHON ?= python3
VENV ?= .venv
HELM ?= helm
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' gpu_plugin/__init__.py)
IMAGE ?= gpu-plugin:$(VERSION)
BUILDER ?= $(shell if docker version >/dev/null 2>&1; then echo docker; elif command -v podman >/dev/null; then echo podman; fi)

# Tests start Python hundreds of times: each time all would be compiled again.
unexport PYTHONDONTWRITEBYTECODE

# How pytest spreads tests over the cores; empty: it does not.
SPREAD ?= --numprocesses auto --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install demo test processes-and-units test-all mutants lint format bench e2e real-and-chart chart cluster image manifests proto proto-check lock clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(STAMP) ## make .venv with the command .venv/bin/gpu-plugin, exact versions from requirements/dev.lock

$(STAMP): pyproject.toml requirements/dev.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "gpu-plugin needs Python >= 3.11; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@test ! -L $(VENV) || { echo "$(VENV) is a link: making it again would empty what it leads to; use VENV=ANOTHER"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: install ## the real daemon on a simulated 8-GPU node under a stand-in kubelet: a timeline in under 20 s
	$(BIN)/python -m demo

test: install ## lint, types, and every test that needs no cluster
	@$(MAKE) --no-print-directory --jobs=2 lint processes-and-units

processes-and-units: install # beside lint: these tests wait for half of the time
	@$(BIN)/python -m pytest --collect-only -qq tests/unit tests/node >/dev/null || true # compiles the tests once for all workers
	$(BIN)/python -m pytest $(SPREAD) tests/unit tests/node

test-all: ## the tests on each of Python 3.11 to 3.14 that this machine has
	@.ci/every-python

lint: install ## ruff, mypy, import-linter, vulture (dead code), codespell, plain prose, and generated code as the .proto files give it
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/vulture
	$(BIN)/codespell
	$(BIN)/python -m tests.prose
	@$(MAKE) --no-print-directory proto-check

proto-check: install
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python proto/generate.py --check

format: install ## what lint would have
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

mutants: install ## branch coverage of what decides, and how many small changes of it the tests notice (20 minutes)
	$(BIN)/python -m tests.mutants $(MUTANTS)

bench: install ## speed and size, one table
	$(BIN)/python -m bench

e2e: install ## the daemon under a real kubelet and runtime, and with NVIDIA's libraries, and the chart (root; E2E_INSTALL=1 installs what is missing)
	$(BIN)/python -m tests.tools
	@$(MAKE) --no-print-directory --jobs=2 cluster real-and-chart

cluster: install
	$(BIN)/python -m pytest tests/cluster

real-and-chart: install # beside the cluster, which waits for much of the time; one after the other, since `real` has files of this machine
	$(BIN)/python -m pytest tests/real
	@$(MAKE) --no-print-directory chart

chart: install # with the processor time that the cluster leaves
	nice -n 19 $(BIN)/python -m pytest --timeout 600 $(SPREAD) tests/chart

manifests: install ## generate deploy/*.yaml and the chart's table of values and choices; HELM=PROGRAM
	$(BIN)/python -m deploy.generate --helm $(HELM)

image: ## build the container image: IMAGE=name:tag, BUILDER=docker or podman, BUILD_OPTIONS="--build-arg BASE=..."
	@test -n "$(BUILDER)" || { echo "make image needs docker (with its daemon) or podman"; exit 1; }
	$(BUILDER) build --tag $(IMAGE) --build-arg VERSION=$(VERSION) \
	  --build-arg REVISION="$$(git rev-parse HEAD 2>/dev/null)" --build-arg CREATED="$$(date -u +%Y-%m-%dT%H:%M:%SZ)" $(BUILD_OPTIONS) .

proto: install ## generate gpu_plugin/kubelet/_api from proto/
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python proto/generate.py

lock: install ## resolve requirements/*.lock again from pyproject.toml
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-annotate --no-header --python-version 3.11 pyproject.toml --extra kube --extra uvloop --group dev -o requirements/dev.lock
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-annotate --no-header --python-version 3.11 pyproject.toml --extra kube -o requirements/run.lock
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-annotate --no-header --python-version 3.11 --group image -o requirements/build.lock

clean: ## remove virtual environments and caches
	rm -rf $(VENV) $(VENV)-3.* build dist mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find gpu_plugin demo tests bench -name __pycache__ -prune -exec rm -rf {} +
