# make demo       a first LoRA RL run on this machine's CPU
# make demo-llm   a real chat model of 135 M parameters learns to add on it (the first time downloads 93 MB)
# make test       what somebody who changed something runs; ARGS=--changed for what the change reaches
# make check      linters, types, import contracts
# make help-all   every other target, in groups
#:
#: Before a merge
#: make test-system       kills, faults, whole worlds, tmux, a browser, the docs typed
#: make test-engines      against the real SGLang and vLLM on the CPU (the first time installs them: 7 GB outside the tree)
#: make test-backends     every trainer with every engine, and the real Megatron (the first time installs all: 9 GB)
#: make test-cluster      pools over a real Ray cluster, on hosts that are namespaces of this machine (root; installs Ray: 0.4 GB)
#: make test-verifiers    environments of verifiers 0.3 and 0.4 from their packages (the first time installs both: 0.6 GB)
#: make tinker            the official tinker client, 0.25 to the newest, against a daemon and its door (installs it: 1.5 GB)
#: make tinker-backends   the same client on FSDP, Megatron, SGLang and vLLM; the table of docs/tinker.md
#: make tinker-cookbook   recipes of tinker-cookbook, unmodified and offline, learn through the door (installs it: 1.6 GB)
#: make tinker-art        OpenPipe ART's backend for Tinker, unmodified and offline, learns through the door (installs it)
#: make test-fresh        README's two commands in empty roots of Debian, with Python 3.11, 3.13, 3.14 and no compiler (root)
#: make test-newest       make test with the newest versions of everything, without constraints: once a week
#:
#: After a change
#: make format            what ruff can mend by itself
#: make docs              the parts of docs/ that are made from the code: keys of spec and config.yaml, commands
#: make snapshots         pictures of screens and tables that tests compare with, taken again: look at them
#: make pictures          those in README and docs, by the TUI on real runs of this home, which are made where it lacks them
#: make clean             removes .venv and caches
#:
#: Faults
#: make kill9             kill -9 of everything under running jobs, N times
#: make kill9-nodes       the same at random of what a run over two nodes consists of; it ends as if nobody had
#: make headline          8 runs in one pool, kill -9 of it mid-step: no batch lost or repeated, every token attributed
#: make upgrade           restart the daemon under running jobs as one with another schema, and go back
#: make powercut          the power goes at any byte; ARGS='--steps 60'
#: make enospc            the disk fills up under a run (root); ARGS='--rounds 2'
#: make slowloris         connections that ask slowly, never, or never read, beside one that lists; ARGS='--seconds 14'
#: make siege             the largest and strangest bodies on every route, as a user of a shared daemon (root)
#: make fuzz              hostile requests on every route, and random lives of runs; ARGS='--seconds 15 --seed 1'
#: make authz             every request by its owner, others, admins and root, as processes of those users
#: make tinker-crash      kill -9 of door, lane, pool and daemon under a client; ARGS='STEPS KILLS SHARE_OF_LOST_ANSWERS'
#: make cluster-demo      a Ray cluster here, without root: a run over two nodes, one of them killed; resumed, bit for bit
#: make cluster-faults    the table of what each fault on a cluster leaves, and for how long, measured again
#:
#: A GPU, and real models
#: make gpu-day           ten minutes on one GPU: parity, a run that is killed, speeds, memory; offline .ci/gpu-day
#: make test-gpu-day      the same at its smallest size on this CPU, in the environment that it had on a GPU (installs 1.6 GB)
#: make prove-llm         every trainer, engine and kind of algorithm on a chat model, by transformers and PEFT (two hours)
#: make bases             which path trains which family: runs that equal transformers with PEFT, or refusals
#:
#: Measurements
#: make bench             lorad against TRL and transformers
#: make bench-llm         GRPO of a real chat model beside TRL: seconds, memory, held-out score; ARGS='--steps 20'
#: make bench-algorithms  each algorithm beside TRL's
#: make bench-seeds       the first steps' reward over seeds; ARGS='--seeds 20'
#: make bench-episodes    episodes with a tool, beside TRL's environment_factory; ARGS='--steps 30'
#: make bench-presets     learning curves of all algorithms, with a picture
#: make bench-rates       learning rates times ranks of GRPO, with a picture
#: make bench-curves      lorad's learning curves against plain GRPO
#: make bench-scaling     how cost grows
#: make bench-arrivals    continuous batching
#: make bench-split       steps of a run whose real servers have devices of their own, beside one device; ARGS='--kind sglang'
#: make bench-prompts     memory and speed of samples that share a long prompt, against a copy for each
#: make bench-moe         mixtures of experts: trainers and engines against merged models, and what adapters on experts cost
#: make bench-memory      the most memory of a pass over 1 k to 16 k tokens on FSDP and Megatron
#: make bench-pool-memory what the preflight says that a pool takes, beside what real pools take
#: make bench-swaps       swaps under traffic with the real servers
#: make bench-publish     publishing adapters against merging, with the real servers
#: make bench-attestation clean publishes, injected faults, and what attesting costs
#: make bench-gateway     500 swaps of an alias under 32 streaming clients
#: make bench-many        runs in one pool, one after another, and each in a pool of its own
#: make bench-placing     passes of the queue over a cluster of 1,000 devices with 50 queued runs
#: make bench-nodes       what 100 and 400 nodes cost a pool, and a version given to 16 of them
#: make bench-rewards     128 samples with graders of 50 ms and 1 s: sync, async and batch
#: make bench-data        time and memory of checks and of a first step on 10,000 to 1,000,000 chats
#: make bench-load        200 clients beside 8 running jobs, and a daemon that has nothing to do
#: make bench-history     commands in a home with 1,000 ended runs and a million steps against an empty one
#: make bench-tui         the dashboard in a pseudo-terminal with 200 runs: first paint, keys, CPU; ARGS='--minutes 60'
#: make bench-tinker      a step of the tinker client's loop beside a step of `lorad run` of the same work
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

VENV ?= .venv
export VENV
BIN := $(VENV)/bin
## Hundreds of programs are started here: each would compile lorad again where the environment forbids to keep that.
export PYTHONDONTWRITEBYTECODE :=
SETUP := .ci/setup .ci/find-python .ci/constraints.txt pyproject.toml
N ?= 200
JOBS ?= 2
WORKERS ?= 6
SPEC ?= examples/demo.yaml

.PHONY: help help-all setup demo demo-llm test test-system test-fresh test-newest test-engines test-backends test-verifiers test-cluster cluster-faults tinker tinker-crash tinker-backends tinker-cookbook tinker-art cluster-demo check lint types contracts format bench bench-rewards bench-scaling bench-curves bench-arrivals bench-prompts bench-split \
	bench-algorithms bench-seeds bench-episodes bench-presets bench-rates bench-llm prove-llm bases \
	bench-memory bench-pool-memory bench-moe bench-swaps bench-publish bench-load bench-many bench-placing bench-gateway bench-attestation kill9 upgrade slowloris siege fuzz powercut enospc bench-history bench-data bench-tui bench-nodes bench-tinker gpu-day test-gpu-day authz headline kill9-nodes clean snapshots pictures docs

help:
	@sed -n 's/^# //p' Makefile

help-all:
	@sed -n -e 's/^#:\? //p' -e 's/^#:$$//p' Makefile

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
	@BIN=$(BIN) SPEC=$(SPEC) ASK=S:5172= WANTED="ask it to sort" .ci/next-steps

LLM := examples/smollm2-addition.yaml
demo-llm: $(VENV)/.ready
	@$(BIN)/lorad models get smollm2
	@echo "==> lorad run $(LLM) $(ARGS) --wait"
	@$(BIN)/lorad run $(LLM) $(ARGS) --wait
	@$(BIN)/python .ci/curve
	@BIN=$(BIN) SPEC=$(LLM) ASK="What is 23 + 45?" WANTED="ask it to add" .ci/next-steps

## Tests wait for processes as much as they compute: more workers than cores. AGAIN=yes: see .ci/again.
PYTEST = OMP_NUM_THREADS=1 .ci/in-memory $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore=tests/engines/real --ignore=tests/envs/real --ignore=tests/trainers/real --ignore=tests/tinker/real --ignore=tests/cluster
AGAIN_ALONE = { code=$$?; [ "$$code-$(AGAIN)" = 1-yes ] || exit $$code; .ci/again $(BIN)/python; }
test: $(VENV)/.ready-dev
	@$(PYTEST) -m "not long and not system" $(ARGS) || $(AGAIN_ALONE)

test-system: $(VENV)/.ready-dev
	@$(PYTEST) -m "system and not long" $(ARGS) || $(AGAIN_ALONE)

## RELEASES=sid is one of them; ARGS goes to `make test` there.
RELEASES ?= sid trixie bookworm
test-fresh:
	@for release in $(RELEASES); do .ci/fresh $$release "make demo; make test WORKERS=$(WORKERS) ARGS='$(ARGS)'"; done

test-newest:
	@VENV=.venv-newest CONSTRAINTS=/dev/null $(MAKE) test

test-engines: $(VENV)/.ready-dev
	@pythons=$$(.ci/setup-engines); mapfile -t pythons <<<"$$pythons"; \
	env OMP_NUM_THREADS=1 "$${pythons[@]}" $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup tests/engines/real $(ARGS)

## Environments for the package verifiers, 0.3 and 0.4, unmodified, through the door. ARGS='-k tool'.
test-verifiers: $(VENV)/.ready-dev
	@pythons=$$(.ci/setup-verifiers); mapfile -t pythons <<<"$$pythons"; \
	env OMP_NUM_THREADS=1 "$${pythons[@]}" $(BIN)/python -m pytest tests/envs/real $(ARGS)

## In the order of its conftest.py: whole runs, which are one long test each, begin. ARGS='-m "not long"' is what CI has, one of the nine pairs; ARGS='-k megatron-vllm' one of them.
test-backends: $(VENV)/.ready-dev
	@pythons=$$(.ci/setup-engines sglang vllm megatron); mapfile -t pythons <<<"$$pythons"; \
	export OMP_NUM_THREADS=1 "$${pythons[@]}"; \
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder tests/trainers/real $(ARGS) || $(AGAIN_ALONE)

## kill -9 of door, lane, pool and daemon while a model trains; all that is told, weights and moments are equal.
tinker-crash: $(VENV)/.ready-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.tinker.crash $(ARGS)

## The unmodified tinker client against a daemon, its door and a builtin pool; older ones after it. ARGS='-k older'.
tinker: $(VENV)/.ready-dev
	@clients=$$(.ci/setup-tinker); mapfile -t clients <<<"$$clients"; \
	env OMP_NUM_THREADS=1 "$${clients[@]}" .ci/in-memory $(BIN)/python -m pytest -m "not long" tests/tinker/real $(ARGS)

## The newest client on each trainer and each engine: some minutes a pair. ARGS='-k vllm' is the pairs with it.
tinker-backends: $(VENV)/.ready-dev
	@pythons=$$(.ci/setup-tinker && .ci/setup-engines sglang vllm megatron); mapfile -t pythons <<<"$$pythons"; \
	env OMP_NUM_THREADS=1 LORAD_TINKER_PAGE=docs/tinker.md "$${pythons[@]}" .ci/in-memory $(BIN)/python -m pytest -m long tests/tinker/real/test_backends.py $(ARGS)

## sl_loop, rl_loop, math_rl and dpo as docs/tinker.md has them. ARGS='-k dpo', and -s for what they logged.
tinker-cookbook: $(VENV)/.ready-dev
	@python=$$(.ci/setup-tinker cookbook); \
	env OMP_NUM_THREADS=1 "$$python" .ci/in-memory $(BIN)/python -m pytest tests/tinker/real/test_cookbook.py $(ARGS)

tinker-art: $(VENV)/.ready-dev
	@python=$$(.ci/setup-tinker art); \
	env OMP_NUM_THREADS=1 "$$python" .ci/in-memory $(BIN)/python -m pytest tests/tinker/real/test_art.py $(ARGS)

test-cluster: $(VENV)/.ready-dev
	@python=$$(.ci/setup-ray); env OMP_NUM_THREADS=1 "$$python" $(BIN)/python -m pytest tests/cluster $(ARGS)

cluster-demo: $(VENV)/.ready-dev
	@python=$$(.ci/setup-ray); env "$$python" $(BIN)/python -m tests.cluster.demo $(ARGS)

## The table of docs/lab/cluster-faults.md, each fault twice: an hour. ARGS='-k partition' measures those rows again and leaves the others.
cluster-faults: $(VENV)/.ready-dev
	@python=$$(.ci/setup-ray); env OMP_NUM_THREADS=1 "$$python" LORAD_FAULTS_PAGE=docs/lab/cluster-faults.md $(BIN)/python -m pytest tests/cluster/test_ray_{faults,outlasted,home,restarted}.py $(ARGS)

check: $(VENV)/.ready-dev
	@$(MAKE) --keep-going lint types contracts

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet

types: $(VENV)/.ready-dev
	$(BIN)/mypy lorad tests benchmarks faults

contracts: $(VENV)/.ready-dev
	$(BIN)/lint-imports

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.ready-bench
	@$(BIN)/python -m benchmarks.bench $(ARGS)

## One thread, and malloc that keeps its pages, as `make bench` has it: decided before Python starts.
QUIET := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
	MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824

bench-rewards: MODULE := rollout.rewards
bench-scaling: MODULE := rollout.scaling
bench-arrivals: MODULE := rollout.arrivals
bench-curves: MODULE := training.curves
bench-algorithms: MODULE := training.algorithms
bench-seeds: MODULE := training.seeds
bench-episodes: MODULE := training.episodes
bench-presets: MODULE := training.presets
bench-rates: MODULE := training.rates
bench-rewards bench-scaling bench-curves bench-arrivals bench-algorithms bench-seeds bench-episodes bench-presets bench-rates: $(VENV)/.ready-bench
	@$(QUIET) $(BIN)/python -m benchmarks.$(MODULE) $(ARGS)

## Both sides decide about threads and malloc themselves, as they do for users.
bench-llm: $(VENV)/.ready-bench
	@base=$$($(BIN)/lorad models get smollm2) && LORAD_SMOLLM2=$$base $(BIN)/python -m tests.llm.bench $(ARGS)

## The first time installs the engines, Megatron and the Tinker client: 10 GB. ARGS='--only parity', or '--only pairs --of fsdp-vllm'.
prove-llm: $(VENV)/.ready-dev
	@base=$$($(BIN)/lorad models get smollm2) && pythons=$$(.ci/setup-tinker && .ci/setup-engines sglang vllm megatron); mapfile -t pythons <<<"$$pythons"; \
	env OMP_WAIT_POLICY=passive "$${pythons[@]}" LORAD_SMOLLM2=$$base $(BIN)/python -m tests.llm.prove $(ARGS)

## Runs decide about threads themselves, as they do for users.
bench-many: MODULE := load.many
bench-placing: MODULE := load.placing
bench-load: MODULE := load.load
bench-gateway: MODULE := serving.gateway_swaps
bench-many bench-placing bench-load bench-gateway: $(VENV)/.ready-dev
	@$(BIN)/python -m benchmarks.$(MODULE) $(ARGS)

## A machine without a network takes .ci/gpu-day, which is this without make.
gpu-day: $(VENV)/.ready-dev
	@$(BIN)/python -m benchmarks.gpu_day.day $(ARGS)

## Python 3.12 from an environment's environment, torch for CUDA, the packages of then, the wheels of docs/lab/gpu-day.md.
test-gpu-day: $(VENV)/.ready-dev
	@image=$$(.ci/setup-gpu-image); env OMP_NUM_THREADS=1 "$$image" .ci/in-memory $(BIN)/python -m pytest tests/benchmarks/gpu_day/test_bare_machine.py $(ARGS)

bench-prompts: $(VENV)/.ready-dev
	@$(QUIET) $(BIN)/python -m benchmarks.rollout.prompts $(ARGS)

## Servers and Megatron are among the paths where their interpreters are named, as .ci/setup-engines says. ARGS='--only qwen3_5 glm4'.
bases: $(VENV)/.ready-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m benchmarks.bases.table $(ARGS)

bench-moe: $(VENV)/.ready-dev
	@$(QUIET) $(BIN)/python -m benchmarks.training.moe $(ARGS)

bench-attestation: $(VENV)/.ready-dev
	@$(QUIET) $(BIN)/python -m benchmarks.serving.attestation $(ARGS)

bench-publish: MODULE := serving.publish_row
bench-swaps: MODULE := serving.swaps
bench-split: MODULE := training.split
bench-swaps bench-publish bench-split: $(VENV)/.ready-dev
	@pythons=$$(.ci/setup-engines); mapfile -t pythons <<<"$$pythons"; \
	env $(QUIET) "$${pythons[@]}" $(BIN)/python -m benchmarks.$(MODULE) $(ARGS)

## malloc as it is: what is freed goes back, so that peaks are what was needed.
bench-memory: $(VENV)/.ready-dev
	@pythons=$$(.ci/setup-engines megatron); mapfile -t pythons <<<"$$pythons"; \
	env OMP_NUM_THREADS=1 "$${pythons[@]}" $(BIN)/python -m benchmarks.training.memory $(ARGS)

## Runs decide about threads and malloc themselves, as they do for users.
bench-pool-memory: $(VENV)/.ready-dev
	@pythons=$$(.ci/setup-engines sglang vllm megatron); mapfile -t pythons <<<"$$pythons"; \
	env "$${pythons[@]}" $(BIN)/python -m benchmarks.training.pool_memory $(ARGS)

kill9: $(VENV)/.ready-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m faults.kill9 --kills $(N) $(ARGS)

upgrade: $(VENV)/.ready-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m faults.upgrade $(ARGS)

powercut enospc: $(VENV)/.ready-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m faults.$@ $(ARGS)

bench-tinker: $(VENV)/.ready-dev
	@clients=$$(.ci/setup-tinker); mapfile -t clients <<<"$$clients"; \
	env $(QUIET) "$${clients[@]}" $(BIN)/python -m benchmarks.load.door $(ARGS)

bench-history bench-data bench-tui bench-nodes: $(VENV)/.ready-dev
	@$(BIN)/python -m benchmarks.load.$(@:bench-%=%) $(ARGS)

authz: $(VENV)/.ready-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m faults.authz $(ARGS)

headline: $(VENV)/.ready-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m faults.kill9_many $(ARGS)

kill9-nodes: $(VENV)/.ready-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m faults.kill9_nodes $(ARGS)

slowloris siege fuzz: $(VENV)/.ready-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m faults.$@ $(ARGS)

snapshots: $(VENV)/.ready-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/tui/test_snapshots.py tests/cli/test_tables.py tests/daemon/api/test_answers.py tests/daemon/api/test_schemas.py --snapshot-update $(ARGS)

pictures: $(VENV)/.ready-dev
	@$(BIN)/lorad models get smollm2
	@$(BIN)/python -m tests.kit.frozen.pictures $(ARGS)

docs: $(VENV)/.ready-dev
	@$(BIN)/python -m tests.make_docs

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
