"""What a run asks of its server and of its ranks: the same for runs that can share them."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from lorad.adapters.adapter import AdapterConfig
from lorad.adapters.targets import EXPERTS, HEAD, MEGATRON, experts_of, leaf, match_modules
from lorad.backends.installed import install_hint, interpreter_of
from lorad.box.config import Backend
from lorad.errors import SpecError
from lorad.files import expanded
from lorad.limits.arguments import AXES, FUSES, OWN_BASE, RANKED
from lorad.limits.limit import BackendSetup
from lorad.models.facts import ModelFacts
from lorad.protocol.pool_setup import RanksSetup, ServerSetup
from lorad.protocol.preflight import BaseFacts
from lorad.servers.kind import MLP
from lorad.servers.table import SERVERS
from lorad.spec.lora import Lora
from lorad.spec.model import Spec

_OF_CLIENTS = 32  # the rank of models whose client names none
RANKS = (16, 32, 64, 128, 256, 320, 512)  # what vLLM takes; more of them would only make more pools
CANARY_PROMPT = 8  # tokens, see lorad/pool/attest/canaries.py
_PLAIN = Backend()
_Shapes = Mapping[str, tuple[int, int]]
_MEGATRON_LAYER = re.compile(r"model\.layers\.\d+\.(self_attn|mlp|mlp\.experts\.\d+)\.\w+")
_MEGATRON_LEAVES = {name for names in MEGATRON.values() for name in names}


def backend_setup(
    spec: Spec, facts: ModelFacts | None = None, adapter: AdapterConfig | None = None, device: str = "cpu"
) -> BackendSetup:
    """Return what the limits of trainers and engines are about; the more is known, the more is checked."""
    trainer = spec.trainer
    dtype = facts.dtype if facts and spec.model.dtype == "auto" else spec.model.dtype
    return BackendSetup(
        trainer=trainer.backend,
        engine=spec.rollout.backend,
        rank=spec.lora.rank,
        args=trainer.backend_args,
        mode=spec.pool.mode,
        quantize=spec.model.quantize,
        device=device,
        dtype=dtype,
        has_critic=spec.algorithm.has_critic,
        lora_type=spec.lora.type,
        model=facts,
        adapter=adapter,
        **{axis: getattr(trainer, axis) for axis in AXES},
    )


def server_setup(spec: Spec, backend: Backend, facts: BaseFacts, cwd: Path) -> ServerSetup:
    """Make the setup of servers. Raises SpecError without an interpreter, and for a rank that none takes."""
    rollout = spec.rollout
    takes = SERVERS[rollout.backend].takes(facts.linears, facts.model_type)
    if backend.python is None and not rollout.urls:
        raise SpecError(
            f"config.yaml names no python for {rollout.backend}",
            key="rollout.backend",
            hint=install_hint(rollout.backend),
        )
    return ServerSetup(
        python="" if rollout.urls else str(backend.python),
        env={} if rollout.urls else backend.env,
        servers=len(rollout.urls) or rollout.servers,
        tp=rollout.tp,
        max_rank=max_rank(spec),
        targets=targets(facts.modules, takes, facts.of_experts),
        context_length=context_length(spec, facts.max_positions),
        scaled_logprobs=rollout.temperature != 1.0,
        urls=rollout.urls,
        key_file=absolute(rollout.key_file, cwd),
        admin_key_file=absolute(rollout.admin_key_file, cwd),
        engine_args=rollout.engine_args,
        routes=facts.routes,
    )


def max_rank(spec: Spec) -> int:
    """Return the highest rank that a server is started for. Raises SpecError where none takes as much.

    A client of Tinker makes models of several ranks while its first one keeps the server.
    """
    least = _OF_CLIENTS if spec.algorithm.kind == "tinker" else 0
    if (rank := max(spec.lora.max_rank, least)) > RANKS[-1]:
        key = "lora.rank" if rank == spec.lora.rank else "lora.experts.rank"
        raise SpecError(f"{rank} is more than the {RANKS[-1]} that servers take", key=key, hint="Lower it.")
    return next(most for most in RANKS if most >= rank)


def targets(
    modules: Iterable[str], linears: Iterable[str], of_experts: Iterable[str] = ()
) -> tuple[str, ...]:
    """Return leaf names, sorted: all linears but the head, so that runs share the server, or the run's own.

    EXPERTS is among them where experts are adapted. With linears `of_experts`, the MLP is among them only
    where it is adapted: servers set memory aside for adapters on every expert else.
    """
    own = {leaf(module) for module in modules}
    usual = set(linears) - {HEAD}
    inner = set(of_experts)
    if inner and not own & (inner | {*MLP}):
        usual -= inner | {*MLP}
    if any(experts_of(module) for module in modules):
        usual |= inner | {EXPERTS}
    return tuple(sorted(usual if own <= usual else own))


def longest(spec: Spec) -> int:
    """Count the tokens of the longest request: a prompt and its sample, or a canary and one token more."""
    is_tinker = spec.algorithm.kind == "tinker"  # whose client says how long each sample is
    sample = spec.longest_row if is_tinker else spec.data.max_prompt_tokens + spec.rollout.max_new_tokens
    return max(sample, CANARY_PROMPT + spec.attest.tokens + 1)


def context_length(spec: Spec, positions: int) -> int:
    """Return the next power of two, which runs of similar length share, or the base's positions."""
    return min(1 << (longest(spec) - 1).bit_length(), positions)


def absolute(path: str | None, cwd: Path) -> str | None:
    return None if path is None else str(cwd / expanded(path))


def needs_base(spec: Spec) -> bool:
    """Return whether the pool's own process loads the model, and so has to know its architecture."""
    return spec.trainer.backend not in RANKED or spec.rollout.backend not in {*SERVERS, *OWN_BASE}


def is_fused(spec: Spec, trainer: Backend = _PLAIN) -> bool:
    """Return whether trainer and engine share one base in the pool's process.

    trainer: its settings of config.yaml, which may want a process with another interpreter or environment.
    """
    if spec.pool.mode != "auto":
        return spec.pool.mode == "fused"
    pair = spec.trainer.backend, spec.rollout.backend
    if spec.trainer.backend not in RANKED:
        return spec.rollout.backend not in {*SERVERS, *OWN_BASE}
    has_own = trainer.python is not None or bool(trainer.env) or trainer.trainer is not None
    return pair in FUSES and spec.trainer.ranks == 1 and not has_own


def ranks_setup(spec: Spec, backend: Backend) -> RanksSetup:
    """Make the setup of ranks. Raises SpecError without an interpreter, or with one in a fused pool."""
    trainer = spec.trainer
    interpreter_of(trainer.backend, backend.python)
    if spec.pool.mode == "fused" and (backend.python is not None or backend.env):
        raise SpecError(
            f"fused is one process with lorad's own interpreter, but config.yaml has another one, or an "
            f"environment, for {trainer.backend}",
            key="pool.mode",
            hint=f"Leave it out (auto is resident), or take backends.{trainer.backend} out of config.yaml.",
        )
    return RanksSetup(
        python=str(backend.python or ""),
        env=backend.env,
        args=trainer.backend_args,
        **{axis: getattr(trainer, axis) for axis in AXES},
    )


def targets_of(trainer: str, linears: _Shapes, experts: _Shapes | None = None) -> dict[str, tuple[int, int]]:
    """Select the linears, and the served experts, that the trainer can adapt: Megatron has names for some.

    Raises SpecError when there are none in the model's layers.
    """
    everything = {**linears, **(experts or {})}
    if trainer != "megatron":
        return everything
    targets = {
        name: shape
        for name, shape in everything.items()
        if name == HEAD or (_MEGATRON_LAYER.fullmatch(name) and leaf(name) in _MEGATRON_LEAVES)
    }
    if targets.keys() <= {HEAD}:
        raise SpecError(
            f"megatron can adapt no linear of the model's layers (it has {next(iter(linears), 'none')})",
            key="trainer.backend",
            hint="It needs layers named like Llama's (model.layers.0.self_attn.q_proj). Use "
            "trainer.backend: fsdp.",
        )
    return targets


def served_experts(rollout: str, facts: ModelFacts) -> _Shapes:
    """Return the linears of experts on which the engine serves adapters."""
    is_served = rollout in SERVERS and facts.model_type in SERVERS[rollout].expert_types
    return facts.experts if rollout == "builtin" or is_served else {}


def modules_of(spec: Spec, facts: ModelFacts) -> tuple[str, ...]:
    """Return the linears that the run's adapter is on. Raises SpecError, see `match_modules`."""
    shapes = targets_of(spec.trainer.backend, facts.linears, served_experts(spec.rollout.backend, facts))
    return match_modules(
        shapes, spec.lora.target_modules, spec.lora.exclude_modules, (*facts.linears, *facts.experts)
    )


def adapter_config(spec: Spec, facts: ModelFacts) -> AdapterConfig:
    """Return what the run's adapter is. Raises SpecError, also for a rank of experts that are not adapted."""
    lora = spec.lora
    modules = modules_of(spec, facts)
    requested = None if lora.experts.rank == "auto" else lora.experts.rank
    rank = requested or max(1, lora.rank // max(1, facts.experts_per_token))
    adapter = AdapterConfig(lora.rank, float(lora.alpha), modules, lora.rslora, lora.dropout, rank, lora.dora)
    if requested and not adapter.experts:
        why = f"{requested}, but no expert is adapted"
        hint = "Leave it out, or at auto."
        raise SpecError(why, key="lora.experts.rank", hint=hint)
    return adapter


def lora_of(lora: Lora, adapter: AdapterConfig, shapes: _Shapes) -> Lora:
    """Return `lora` with all that an adapter is, which fits `shapes`, its modules by their shortest names."""
    leaves = sorted({leaf(module) for module in adapter.modules})
    rank: int | Literal["auto"] = adapter.rank_of_experts if adapter.experts else "auto"
    return replace(
        lora,
        rank=adapter.rank,
        alpha=adapter.alpha,
        dropout=adapter.dropout,
        target_modules=leaves if match_modules(shapes, leaves) == adapter.modules else [*adapter.modules],
        exclude_modules=[],
        rslora=adapter.rslora,
        dora=adapter.dora,
        experts=replace(lora.experts, rank=rank),
    )
