"""What a run's pool takes at its peak, part by part. `make bench-pool-memory` compares it with real pools.

On a CPU all of it is memory of the machine. On a GPU it is memory of the devices, where only the parts that
are known are counted: what CUDA takes for each process is not, and engines take what is left for keys and
values.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lorad.adapters.adapter import AdapterConfig
from lorad.adapters.targets import HEAD, experts_of, leaf
from lorad.backends.activations import CPU_CACHE, LEAST, MOST, MOST_SQUARED, kept, on_cpu
from lorad.backends.setup import context_length, is_fused, max_rank, served_experts
from lorad.box.machine import NO_LIMIT, read_machine
from lorad.errors import SpecError
from lorad.limits.arguments import OWN_BASE, RANKED
from lorad.models.directory import BYTES
from lorad.models.facts import ModelFacts
from lorad.protocol.pool_setup import MAX_RUNNING, SERVER_SLOTS
from lorad.rl.data import Dataset
from lorad.servers.table import SERVERS
from lorad.spec.model import Spec
from lorad.text import size

_MB = 1 << 20
_PROCESSES = {"builtin": 315, "pool": 190, "fsdp": 335, "megatron": 590, "fused": 440}
"""MiB that a process takes before it holds anything of a model: the pool's with a trainer in it, the same
without, and a rank; `lorad/servers` has those of a server with all its processes. Measured on 26 November
2026 by `make bench-pool-memory` on 2 cores of an AMD EPYC: Python 3.11, torch 2.13 for CPUs, SGLang 0.5.23,
vLLM 0.32.0. The builtin pool was alone there with the pages of torch; the others shared them with processes
of other homes."""
_SHARED = {"megatron": 190}
"""MiB of libraries that ranks after the first share with it; those of FSDP share the pool's."""
_GATHERED = 4
"""Sizes of the base that gathered weights add to the heap of each FSDP rank on a CPU: layers are gathered and
let go between activations, forward and backward, and malloc keeps the gaps. Measured as 3.9 and 4.1 (100 M,
one rank and two, three steps)."""
_GAPS = 2.5
"""Sizes of the base that the heap of a fused pool has between activations on a CPU, beside what is counted.
Measured as 2.5 (100 M, three steps)."""
_SCORES = 1.43
"""Arrays of tokens x tokens that Megatron's attention without Transformer Engine keeps for each head, as on a
CPU; of the micro-batch's whole row."""
_LOOKED_AT = 64  # rows of the data, whose lengths stand for all
_LOGITS = 1 << 22  # numbers in a chunk of logits, see lorad/trainers/head_rows.py
_LOGIT_ROWS = 128  # rows that such a chunk has at least
_CHUNKS = 2  # of logits that live at a time
_FP32 = 4  # bytes; adapters and logits are
_VECTORS = 4  # of an adapter that is trained: weights, gradients, two moments
_SNAPSHOT = 1
_VERSIONS = 3


class Step(NamedTuple):
    """What a step trains on.

    prompts: number of prompts.
    samples: number of samples.
    prompt: mean number of tokens in a prompt.
    tokens: number of tokens in all completions.
    """

    prompts: int
    samples: int
    prompt: float
    tokens: int

    def inputs(self, *, shared: bool) -> int:
        """Return the tokens that are computed. shared: a prompt is computed once for all its samples."""
        return int(self.prompt * (self.prompts if shared else self.samples)) + self.tokens - self.samples


class _Side(NamedTuple):
    """The load of some GPUs: whose it is, bytes by part, and how many GPUs they are."""

    who: str
    parts: dict[str, int]
    gpus: int


class Numbers(NamedTuple):
    """How many parameters the adapter has, the frozen one that KL is measured against, and the critic."""

    adapter: int
    frozen: int = 0
    critic: int = 0


def step_of(spec: Spec, data: Dataset) -> Step:
    """Return a step whose samples are as long as they may be, or as those of the first rows.

    Where a client sends samples, one is trained at a time.
    """
    if spec.algorithm.kind == "tinker":
        return Step(1, 1, 1.0, spec.longest_row)
    prompts = spec.data.prompts_per_step
    examples = data.take(0, min(prompts, _LOOKED_AT))
    prompt = sum(len(example.tokens) for example in examples) / max(1, len(examples))
    if spec.algorithm.kind == "rl":
        samples = prompts * spec.algorithm.group_size
        return Step(prompts, samples, prompt, samples * spec.rollout.max_new_tokens)
    targets = [target.tokens.size for example in examples for target in example.targets]
    times = prompts / max(1, len(examples))
    return Step(prompts, int(times * len(targets)), prompt, int(times * sum(targets)))


def _dtype_of(spec: Spec, model: ModelFacts, device: str) -> str:
    """Return the dtype of the base: `auto` is float32 on a CPU, and elsewhere that of the checkpoint."""
    if spec.model.dtype != "auto":
        return spec.model.dtype
    return "float32" if device == "cpu" else model.dtype


def pool_memory(
    spec: Spec,
    model: ModelFacts,
    adapter: AdapterConfig,
    numbers: Numbers,
    step: Step,
    device: str,
    teacher: ModelFacts | None = None,
    *,
    warm: bool = False,
) -> dict[str, int]:
    """Return bytes by part, over all processes of the pool; with `warm`, what one more run takes of one.

    On GPUs trainers of ranks move their base away while a server is awake, which sleeps while they train:
    there the side that is larger counts.
    """
    dtype = _dtype_of(spec, model, device)
    if warm:
        return _of_adapters(spec, model, adapter, numbers, dtype, warm=True)
    trained = _training(spec, model, step, device, dtype)
    sampled = _sampling(spec, model, step, device, dtype)
    sampled["expert buffers"] = _expert_buffers(spec, model, adapter.modules, dtype)
    sides = [trained, sampled]
    if _takes_turns(spec, device):
        sides = [max(sides, key=lambda side: sum(side.values()))]
    processes = 0  # MiB, before they hold anything of the model
    if device == "cpu":
        trainer = spec.trainer
        processes = _PROCESSES["fused" if trainer.backend in RANKED else "builtin"]
        if _has_ranks(spec):
            shared = (trainer.ranks - 1) * _SHARED.get(trainer.backend, 0)
            processes = _PROCESSES["pool"] + trainer.ranks * _PROCESSES[trainer.backend] - shared
        if servers := _started(spec):
            processes += servers * SERVERS[spec.rollout.backend].process_mib
    parts = {
        "processes": processes * _MB,
        "bases": 0 if teacher is None else teacher.bytes(dtype),
        **_of_adapters(spec, model, adapter, numbers, dtype),
    }
    for side in sides:
        for name, part in side.items():
            parts[name] = parts.get(name, 0) + part
    if not _apart(spec):  # one process samples or trains, and its malloc keeps what the other left
        smaller = min("activations", "keys and values", key=lambda name: parts[name])
        parts[smaller] = 0
    return {name: part for name, part in parts.items() if part}


def memory_of_gpus(
    spec: Spec, model: ModelFacts, adapter: AdapterConfig, numbers: Numbers, data: Dataset
) -> list[_Side]:
    """Return what is known to be on the GPUs of this machine at a time.

    Trainer and servers are a side each where they have devices of their own or take turns; where they share
    them, the pool is the one side.
    """
    device = "cuda"
    step = step_of(spec, data)
    dtype = _dtype_of(spec, model, device)
    trained = _training(spec, model, step, device, dtype)
    trained["adapter"] = _of_adapters(spec, model, adapter, numbers, dtype)["adapter"]
    sampled = _sampling(spec, model, step, device, dtype)
    sampled["expert buffers"] = _expert_buffers(spec, model, adapter.modules, dtype)
    if spec.server_devices or _takes_turns(spec, device):
        trainers = spec.gpus - spec.server_devices
        return [
            _Side("the trainer", trained, trainers),
            _Side("the servers", sampled, spec.server_devices or trainers),
        ]
    both = {name: trained.get(name, 0) + sampled.get(name, 0) for name in {**trained, **sampled}}
    return [_Side("the pool", both, spec.gpus)]


def check_memory(
    parts: Mapping[str, int], sides: Iterable[_Side], free: int | None, device: str, fraction: float
) -> None:
    """Raise SpecError for a pool that needs more memory than there is.

    parts: bytes by what takes them, of a CPU's machine.
    sides: the sides of the pool on GPUs.
    free: bytes that are free on a CPU, or that each GPU has; None where that is not known.
    """
    if free is None:
        return
    for side in sides if device != "cpu" else ():
        needed = sum(side.parts.values())
        if needed > side.gpus * free * fraction:
            of = ", ".join(f"{name} {size(part)}" for name, part in side.parts.items() if part)
            count = f"{side.gpus} GPUs of {size(free)} each" if side.gpus > 1 else f"a GPU of {size(free)}"
            raise SpecError(
                f"{side.who} would need {size(needed)} of {count}, of which {fraction:.0%} may be taken "
                f"(pool.memory_fraction): {of}",
                key="model.path",
                hint="Give it more GPUs (trainer.dp, resources.devices, resources.rollout_devices), lower "
                "trainer.tokens_per_microbatch or lora.rank, or take a smaller model.",
            )
    if device == "cpu" and (needed := sum(parts.values())) > free * fraction:
        of = ", ".join(f"{name} {size(part)}" for name, part in parts.items())
        raise SpecError(
            f"the pool needs {size(needed)} on {device}, {size(free)} are free, of which it may take "
            f"{fraction:.0%} (pool.memory_fraction): {of}",
            key="model.path",
            hint="Free some memory, use model.dtype: bfloat16, a smaller lora.rank (and lora.experts.rank), "
            "fewer data.prompts_per_step or trainer.tokens_per_microbatch, or a smaller model.",
        )


def _apart(spec: Spec) -> bool:
    """Return whether trainer and engine are in processes of their own."""
    return _has_ranks(spec) or spec.rollout.backend in SERVERS


def _has_ranks(spec: Spec) -> bool:
    return spec.trainer.backend in RANKED and not is_fused(spec)


def _started(spec: Spec) -> int:
    """Count the servers that are started."""
    return spec.rollout.servers if spec.rollout.backend in SERVERS and not spec.rollout.urls else 0


def _takes_turns(spec: Spec, device: str) -> bool:
    is_ranked = spec.trainer.backend in RANKED
    in_turn = spec.pool.mode in ("auto", "timesliced") and not spec.server_devices
    return device != "cpu" and bool(_started(spec)) and is_ranked and in_turn


def _training(spec: Spec, model: ModelFacts, step: Step, device: str, dtype: str) -> dict[str, int]:
    """FSDP cuts one base over all ranks, Megatron has one for each data-parallel copy."""
    trainer = spec.trainer
    copies = trainer.dp if trainer.backend == "megatron" else 1
    on_heap = model.bytes(dtype) * (device == "cpu" and trainer.backend == "fsdp")
    return {
        "gathered weights": _GATHERED * trainer.ranks * on_heap * _has_ranks(spec),
        "gaps in the heap": int(_GAPS * on_heap) * (not _has_ranks(spec)),
        "bases": copies * _base_of_trainer(spec, model, dtype),
        "activations": _activations(spec, model, step, device, dtype),
    }


def _base_of_trainer(spec: Spec, model: ModelFacts, dtype: str) -> int:
    """Return the bytes of a base, which ranks hold dense where it is rounded."""
    return model.bytes(dtype, None if spec.trainer.backend in RANKED else spec.model.quantize)


def _sampling(spec: Spec, model: ModelFacts, step: Step, device: str, dtype: str) -> dict[str, int]:
    """Servers have a base each; a base in the pool's process is the trainer's, where that is there too. On
    GPUs engines take what is left for keys and values, whatever that is; on a CPU they have those of all of
    a step's samples, or with a server that fills its cache, of a whole context for each that it runs at once.
    """
    servers = _started(spec)
    in_pool = int(spec.rollout.backend not in SERVERS)
    has_own = not is_fused(spec) and (spec.trainer.backend in RANKED or spec.rollout.backend in OWN_BASE)
    bases = in_pool * has_own + servers
    cache = 0
    if device == "cpu":
        tokens = 0 if spec.rollout.urls else int(step.samples * (step.prompt + spec.rollout.max_new_tokens))
        if servers and SERVERS[spec.rollout.backend].fills_cache:
            tokens = servers * (MAX_RUNNING["cpu"] + 1) * context_length(spec, model.max_positions)
        cache = tokens * model.cached * BYTES[dtype]
        if in_pool:
            cache = min(cache + int(step.samples) * model.states, CPU_CACHE)
    return {"bases": bases * model.bytes(dtype, spec.model.quantize), "keys and values": cache}


def _activations(spec: Spec, model: ModelFacts, step: Step, device: str, dtype: str) -> int:
    """Return the activations of a micro-batch of each rank (lorad/pool/microbatches.py), and a chunk of
    logits.

    On a GPU, where the pool goes by what is left, the micro-batch is the smallest one.
    """
    trainer = spec.trainer
    is_ranked = spec.trainer.backend in RANKED
    parts, dp = (trainer.tp * trainer.pp * trainer.cp, trainer.dp) if is_ranked else (1, 1)
    each = kept(model, BYTES[dtype], parts)
    token = plain = each.token + each.dropout * bool(spec.lora.dropout or spec.lora.dora)
    limit = 0 if trainer.tokens_per_microbatch == "auto" else trainer.tokens_per_microbatch
    room = _room(spec, model, dtype) if device == "cpu" else 0
    recomputes = trainer.activation_checkpointing
    fits = room // max(1, plain)
    is_mixed = False
    if recomputes == "auto":
        recomputes = fits < max(spec.longest_row, limit or LEAST)
        is_mixed = recomputes and not is_ranked and fits >= LEAST
    token = each.recomputed if recomputes and not is_mixed else plain
    most = MOST_SQUARED if trainer.backend == "megatron" else MOST
    most = max(limit, spec.longest_row) if limit else min(most, max(LEAST, room // max(1, token)))
    tokens = min(most, -(-step.inputs(shared=not is_ranked) // (spec.algorithm.minibatches * dp)))
    rows = min(tokens, max(_LOGIT_ROWS, _LOGITS // model.vocab))
    logits = _CHUNKS * rows * model.vocab * _FP32 if device == "cpu" else 0
    scores = 0
    if device == "cpu" and trainer.backend == "megatron":  # attention that holds tokens x tokens of each head
        width = model.cached // max(1, 2 * model.layers * model.kv_heads)
        queries = sum(shape[0] for name, shape in model.linears.items() if leaf(name) == "q_proj")
        scores = int(_SCORES * _FP32 * queries // max(1, width) * tokens**2)
        scores //= model.layers if recomputes else 1
    activations = tokens * token
    if is_mixed and tokens > fits:
        activations = max(fits * plain, tokens * each.recomputed)
    return parts * dp * (activations + logits) + dp * scores


def _room(spec: Spec, model: ModelFacts, dtype: str) -> int:
    """Return the bytes that the pool leaves to the activations of each rank on a CPU."""
    granted = read_machine().memory
    if granted >= NO_LIMIT:
        return NO_LIMIT
    bases = _base_of_trainer(spec, model, dtype)
    if _apart(spec):
        bases += model.bytes(dtype, spec.model.quantize)
    ranks = spec.trainer.ranks if spec.trainer.backend in RANKED else 1
    return on_cpu(granted * spec.pool.memory_fraction, bases, ranks)


def _of_adapters(
    spec: Spec, model: ModelFacts, adapter: AdapterConfig, numbers: Numbers, dtype: str, *, warm: bool = False
) -> dict[str, int]:
    """Every rank has all weights and gradients of an adapter, and its share of the moments.

    Servers set room aside for as many adapters as a batch may have, on all linears that are targets.
    """
    ranks = spec.trainer.dp * spec.trainer.cp if spec.trainer.backend in RANKED else 1
    vectors = _VECTORS // 2 * ranks + _VECTORS // 2
    versions = _FP32 * numbers.adapter * (_SNAPSHOT + _VERSIONS)
    if not warm and (servers := _started(spec)):
        leaves = {leaf(module) for module in adapter.modules if not experts_of(module)}
        through = sum(sum(s) for n, s in model.linears.items() if leaf(n) in leaves and leaf(n) != HEAD)
        versions += servers * SERVER_SLOTS * max_rank(spec) * through * BYTES[dtype]
    return {
        "adapter": _FP32 * ((numbers.adapter + numbers.critic) * vectors + numbers.frozen),
        "versions": versions,
    }


def _expert_buffers(spec: Spec, model: ModelFacts, modules: tuple[str, ...], dtype: str) -> int:
    """Return the bytes of servers for adapters on experts: all experts, at the highest rank, in each slot.

    Some servers set them aside too where linears beside the experts are adapted that have their names, as
    those of a shared MLP.
    """
    if not (servers := _started(spec)):
        return 0
    experts = served_experts(spec.rollout.backend, model) if any(map(experts_of, modules)) else {}
    if SERVERS[spec.rollout.backend].sizes_by_leaf and {*map(leaf, modules)} & {*map(leaf, model.experts)}:
        experts = model.experts
    numbers = max_rank(spec) * sum(map(sum, experts.values()))
    return servers * SERVER_SLOTS * numbers * BYTES[dtype]
