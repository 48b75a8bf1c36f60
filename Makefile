# heinfer. `make` lists the targets. Packages come from pip, at the versions of constraints.txt, into .venv.
#
#   make demo PYTHON=/usr/bin/python3.12     another Python
#   make test TORCH=cpu                      PyTorch without CUDA, from PyTorch's own index
#   make test ARGS="-m 'not slow and not long' -x"    arguments for pytest
#   make fuzz MINUTES=60                     longer than ten minutes a target

PYTHON ?= python3
TORCH ?= default
ARGS ?=
MINUTES ?= 10

VENV := .venv
BIN := $(VENV)/bin
# Twice quiet: errors only.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --constraint constraints.txt

# Wheels of constraints.txt on Linux x86-64 with Python 3.11.
DEMO_SIZE := about 150 MB
ifeq ($(TORCH),cpu)
DEV_SIZE := about 470 MB
PIP_INDEX := --extra-index-url https://download.pytorch.org/whl/cpu
else
DEV_SIZE := up to 3 GB, most of it PyTorch with CUDA (TORCH=cpu: about 470 MB)
PIP_INDEX :=
endif

# Several processes share the machine: none may spin while it waits (see heinfer/processes.py).
OMP_WAIT_POLICY ?= PASSIVE
OPENBLAS_NUM_THREADS ?= 1
export OMP_WAIT_POLICY OPENBLAS_NUM_THREADS

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup setup-dev demo test test-fast test-long fuzz check lint types format bench bench-more docs page-picture stubs clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(VENV)/.installed ## make .venv with what running heinfer needs
setup-dev: $(VENV)/.installed-dev ## the same with training and development tools

demo: setup ## classify MNIST digits under encryption: untrusted server and trusted node on loopback
	@$(BIN)/heinfer demo

test: check ## lint, types, import contracts, then the test suite
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

test-fast: setup-dev ## those of its tests that take less than ten seconds each
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal -m "not slow and not long" $(ARGS)

test-long: setup-dev ## the tests that take minutes each: large architectures at full size
	@$(BIN)/python -m pytest -m long $(ARGS)

fuzz: setup-dev ## random examples for codec, bundles and importer, MINUTES (10) each
	@HEINFER_FUZZ_S=$$(( 60 * $(MINUTES) )) $(BIN)/python -m pytest -m fuzz -o timeout=0 -s $(ARGS) tests/fuzz

check: lint types ## everything of `make test` but the tests

lint: setup-dev ## ruff and the import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-logo

types: setup-dev ## mypy --strict
	@$(BIN)/mypy

format: setup-dev ## format and mend what ruff can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup-dev ## heinfer beside its peers, by cores and by size: half an hour, and the peers' environments once (ARGS=--docs)
	@$(BIN)/python benchmarks/peers/environments.py --torch $(TORCH) || echo "Going on without those left out"
	@for script in side_by_side scaling growth; do \
	    echo "== $$script"; $(BIN)/python benchmarks/$$script.py $(ARGS) || exit 1; done

bench-more: setup-dev ## the other measurements of docs/performance.md, hours
	@for script in prepared_queries profile_query server_operators large_models gpu serving_load transport placements \
	    forecasts encrypted_models busy_neighbour; do \
	    echo "== $$script"; $(BIN)/python benchmarks/$$script.py || exit 1; done

docs: setup ## generate docs/operators.md from the partitioner's rules
	@$(BIN)/python -m partitioner.catalogue > docs/operators.md

page-picture: setup-dev ## take docs/node-page.png: the node's page in Chromium, with a released model
	@HEINFER_REQUIRE_BROWSER=1 HEINFER_PAGE_PICTURE=docs/node-page.png \
	    $(BIN)/python -m pytest -q tests/interfaces/test_page_browser.py -k picture

stubs: setup-dev ## generate what comes of heinfer/wire/proto/heinfer.proto and trusted_node/serving/proto/inference.proto
	@$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. heinfer/wire/proto/heinfer.proto
	@cd trusted_node/serving/proto && $(abspath $(BIN))/python -m grpc_tools.protoc -I . \
	    --descriptor_set_out=inference.pb --pyi_out=. inference.proto

clean: ## remove .venv, peers, caches and build outputs
	rm -rf $(VENV) .bench build dist .demo .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What the user can mend is said in one line, with the remedy.
define refuse
{ printf '%s\n' "$(1): make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
endef

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || \
	    $(call refuse,'$(PYTHON)' was not found. Install Python 3.11 or newer or name one)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	    $(call refuse,heinfer needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1 | head -n 1). Name another)
	@$(PYTHON) -c 'import ensurepip; import venv' 2>/dev/null || \
	    $(call refuse,'$(PYTHON)' has no venv module. Install it (Debian and Ubuntu: apt-get install python3-venv) or name another)
	@echo "Making $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing heinfer into $(VENV), once. To download: $(DEMO_SIZE)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing heinfer with its training and development tools into $(VENV), once. To download: $(DEV_SIZE)"
	@$(PIP) $(PIP_INDEX) --editable '.[serve,traces,train,dev]'
	@touch $(VENV)/.installed $@
