# The commands of this repository. Needs make, gcc and Python 3.11 or newer; the rest is installed
# into .venv.
#
# PYTHON=...  interpreter for .venv (default: the first of the list below that works)
# ARGS="..."  further arguments for `make run`, `make test` and `make bench`

VENV ?= .venv
# The compilers of `make aot` live apart: beside them jax looks for TPUs and GPUs.
AOT_VENV ?= .venv-aot
ARGS ?=

# A name on PATH may be a launcher for a version that is not installed, or lack the venv module:
# a candidate counts only when it runs.
WORKS := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for candidate in python3.12 python3.11 python3.13 python3 python; do \
	$$candidate -c '$(WORKS)' >/dev/null 2>&1 && { echo $$candidate; break; }; done)

# Stamps: packages are installed again only when pyproject.toml changes.
CORE := $(VENV)/.installed-core
DEV := $(VENV)/.installed-dev
AOT := $(AOT_VENV)/.installed-aot

.DEFAULT_GOAL := help
.PHONY: help run test slow aot aot-install bench lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

run: $(CORE) ## train the tiny model on this machine's Python library and write runs/tiny
	$(VENV)/bin/k3jax train tiny $(ARGS)

test: $(DEV) ## run the test suite on two processes
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile $(ARGS)

slow: $(DEV) ## run the tests that take minutes
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile -m "slow and not aot and not gpu and not tpu" $(ARGS)

aot: $(AOT) ## compile the kernels for TPUs and GPUs that are not here, and check what it says
	$(AOT_VENV)/bin/python -m pytest -m aot $(ARGS)

aot-install: $(AOT)

bench: $(CORE) ## time the kernels on this machine's device
	$(VENV)/bin/python -m experiments.bench_kernels $(ARGS)

lint: $(DEV) ## check style and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(DEV) ## mend style and formatting where that is automatic
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) $(AOT_VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment whose pip does not run (moved folder, interrupted creation) is made anew.
# $(1): the environment.
define create_venv
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer with venv and ensurepip was found;" \
		"install one (Debian: python3-venv) or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
endef

$(CORE): pyproject.toml
	$(call create_venv,$(VENV))
	@echo "Installing k3jax into $(VENV); the first time this takes some minutes."
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(DEV): pyproject.toml
	$(call create_venv,$(VENV))
	@echo "Installing k3jax and its test tools into $(VENV); the first time this takes some minutes."
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(CORE)

$(AOT): pyproject.toml
	$(call create_venv,$(AOT_VENV))
	@echo "Installing compilers for TPU and GPU into $(AOT_VENV); the first time this takes minutes."
	$(AOT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,aot]'
	@touch $@
