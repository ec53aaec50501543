# make demo    a first LoRA RL run on this machine's CPU        make test    every test
# make check   linters, types, import contracts                make bench   lorad against TRL
# make kill9   kill everything mid-step, N times               make clean   removes .venv and caches
# make test-engines     against the real SGLang and vLLM on the CPU (the first time installs them: 7 GB outside the tree)
# make test-backends    every trainer with every engine, and the real Megatron (the first time installs all three: 9 GB)
# make bench-scaling, bench-curves, bench-arrivals             how cost grows; lorad against plain GRPO; continuous batching
# make bench-swaps, bench-publish                              with the real servers: swaps under traffic; adapters against merging
# make bench-many          runs in one pool, one after another, and each in a pool of its own
# make bench-gateway       500 swaps of an alias under 32 streaming clients
# make bench-attestation   clean publishes, injected faults, and what attesting costs
# make headline            8 runs in one pool, kill -9 of it mid-step, all resume: no batch lost or repeated, every token attributed
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

VENV ?= .venv
export VENV
BIN := $(VENV)/bin
SETUP := .ci/setup .ci/find-python .ci/constraints.txt pyproject.toml
N ?= 100
JOBS ?= 2
SPEC ?= examples/demo.yaml

.PHONY: help setup demo test test-engines test-backends check lint types contracts format bench bench-scaling bench-curves bench-arrivals \
	bench-swaps bench-publish bench-many bench-gateway bench-attestation kill9 headline clean

help:
	@sed -n 's/^# //p' Makefile

setup: $(VENV)/.ready

## Each stamp says: this much is installed, from the pyproject.toml and the constraints of that time.
$(VENV)/.ready: $(SETUP)
	@.ci/setup
	@touch $@

$(VENV)/.ready-dev: $(SETUP)
	@.ci/setup dev
	@touch $(VENV)/.ready $@

$(VENV)/.ready-bench: $(SETUP)
	@.ci/setup bench
	@touch $(VENV)/.ready $@

demo: $(VENV)/.ready
	@echo "==> lorad run $(SPEC) --wait"
	@$(BIN)/lorad run $(SPEC) --wait
	@BIN=$(BIN) .ci/next-steps

test: $(VENV)/.ready-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not long" --ignore=tests/engines --ignore=tests/trainers $(ARGS)

test-engines: $(VENV)/.ready-dev
	@pythons=$$(.ci/setup-engines); mapfile -t pythons <<<"$$pythons"; \
	env OMP_NUM_THREADS=1 "$${pythons[@]}" $(BIN)/python -m pytest tests/engines $(ARGS)

## ARGS='-m "not long"' is two of the nine pairs, as CI has it; ARGS='-k megatron-vllm' one of them.
test-backends: $(VENV)/.ready-dev
	@pythons=$$(.ci/setup-engines sglang vllm megatron); mapfile -t pythons <<<"$$pythons"; \
	env OMP_NUM_THREADS=1 "$${pythons[@]}" $(BIN)/python -m pytest tests/trainers $(ARGS)

check: $(VENV)/.ready-dev
	@$(MAKE) --keep-going lint types contracts

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet

types: $(VENV)/.ready-dev
	$(BIN)/mypy lorad tests

contracts: $(VENV)/.ready-dev
	$(BIN)/lint-imports

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.ready-bench
	@$(BIN)/python -m tests.benchmarks.bench $(ARGS)

## One thread, and malloc that keeps its pages, as `make bench` has it: decided before Python starts.
QUIET := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
	MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824

bench-scaling bench-curves bench-arrivals: $(VENV)/.ready-bench
	@$(QUIET) $(BIN)/python -m tests.benchmarks.$(@:bench-%=%) $(ARGS)

## Runs decide about threads themselves, as they do for users.
bench-many: MODULE := many
bench-gateway: MODULE := gateway_swaps
bench-many bench-gateway: $(VENV)/.ready-dev
	@$(BIN)/python -m tests.benchmarks.$(MODULE) $(ARGS)

bench-attestation: $(VENV)/.ready-dev
	@$(QUIET) $(BIN)/python -m tests.benchmarks.attestation $(ARGS)

bench-publish: MODULE := publish_row
bench-swaps: MODULE := swaps
bench-swaps bench-publish: $(VENV)/.ready-dev
	@pythons=$$(.ci/setup-engines); mapfile -t pythons <<<"$$pythons"; \
	env $(QUIET) "$${pythons[@]}" $(BIN)/python -m tests.benchmarks.$(MODULE) $(ARGS)

kill9: $(VENV)/.ready-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.kill9 --rounds $(N) $(ARGS)

headline: $(VENV)/.ready-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.kill9_many $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
