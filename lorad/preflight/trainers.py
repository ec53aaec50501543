"""The trainer of a spec, looked at before anything starts: the keys that are for it, its ranks, its
installation.
"""

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lorad.adapters.adapter import Adapter, AdapterConfig
from lorad.adapters.targets import ALL_LINEAR, entries, entry_matches, experts_of, leaf
from lorad.backends.registry import RANKED
from lorad.backends.setup import AXES, fused, refuse_unserved
from lorad.backends.trainer_install import installed_versions, interpreter_of, older
from lorad.box.config import Backend, Config
from lorad.box.machine import cpu_facts
from lorad.box.paths import python_path
from lorad.errors import SpecError, from_wire
from lorad.models.config import ModelConfig
from lorad.models.facts import ModelFacts, known_config
from lorad.preflight.telling import begin
from lorad.protocol.heartbeat import HEART
from lorad.spec.model import Spec
from lorad.trainers.arguments import ADAPTS, ATTENTION, LOADS, OWN, SPLITS

_AXES_OF = {"fsdp": ("dp", "cp"), "megatron": ("tp", "pp", "ep", "dp")}
_WITH_DORA = ("builtin", "fsdp")
_RANK_NAMES = " or ".join(sorted(RANKED))
ON_NODES = "is not on this machine; `lorad doctor --cluster` looks for it on the nodes"
_BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16"}  # of these, what a CPU has that computes with it
_NUMBER = re.compile(r"\.\d+(?=\.)")
_NAMES_SECONDS = {
    "fsdp": 100.0,
    "megatron": 600.0,
}  # Megatron-Bridge takes minutes to import on a busy machine
_TOLD_SECONDS = 20.0  # between two signs that the check waits


class _Names(msgspec.Struct, frozen=True):
    """Holds what `lorad.trainers.fsdp.names` and `lorad.trainers.megatron.names` answer."""

    names: list[str] = []
    error: dict[str, Any] | None = None


def check_trainer_keys(spec: Spec) -> None:
    """Raise SpecError for axes and settings that the trainer does not have, and for a mode that it cannot
    keep.
    """
    trainer, backend = spec.trainer, spec.trainer.backend
    for axis in AXES:
        if getattr(trainer, axis) > 1 and axis not in _AXES_OF.get(backend, ()):
            raise SpecError(f"{_why_not(backend)}", key=f"trainer.{axis}", hint=_instead(backend, axis))
    if trainer.backend_args and backend not in RANKED:
        given = ", ".join(trainer.backend_args)
        raise SpecError(
            f"the {backend} trainer takes none, {given} would do nothing",
            key="trainer.backend_args",
            hint=f"Leave them out, or name the trainer.backend that they are for: {_RANK_NAMES}.",
        )
    if backend == "fsdp":
        _check_fsdp_args(trainer.backend_args)
    if backend in RANKED and spec.pool.mode == "fused":
        raise SpecError(
            f"fused is one process for trainer and engine, but {backend} has processes of its own",
            key="pool.mode",
            hint="Leave it out (auto), or set it to resident.",
        )
    if backend == "megatron":
        _check_megatron(spec)


def _why_not(backend: str) -> str:
    if backend == "megatron":
        return "the megatron trainer cuts no sequence over ranks"
    if backend == "fsdp":
        return "fsdp cuts the base over all of its ranks, and sequences over those of trainer.cp"
    return f"the {backend} trainer is one process"


def _instead(backend: str, axis: str) -> str:
    if backend == "megatron":
        return "Set it to 1 and use trainer.tp, pp or dp, or take trainer.backend: fsdp."
    if backend == "fsdp":
        return "Set it to 1 and use trainer.dp, or take trainer.backend: megatron."
    fit = {"dp": _RANK_NAMES, "cp": "fsdp"}.get(axis, "megatron")
    return f"Set it to 1, or take a trainer.backend with ranks: {fit}."


def _check_fsdp_args(args: Mapping[str, object]) -> None:
    if unknown := sorted(set(args) - {ATTENTION}):
        raise SpecError(
            f"fsdp has no {', '.join(unknown)}",
            key="trainer.backend_args",
            hint=f"It takes {ATTENTION}: a name.",
        )
    if not isinstance(name := args.get(ATTENTION), str | None):
        raise SpecError(
            f"{ATTENTION} is {name!r}, no name",
            key="trainer.backend_args",
            hint="Give one of transformers', as sdpa.",
        )


def _check_megatron(spec: Spec) -> None:
    """Refuse arguments that lorad sets itself; those that only Megatron's own fields can check are left to
    the ranks.
    """
    if mine := sorted(OWN & spec.trainer.backend_args.keys()):
        hint = "Leave it out: it follows from the rest of the spec."
        if {"sequence_parallel", "context_parallel_size"} & {*mine}:
            hint = "Leave it out. For long sequences use trainer.backend: fsdp with trainer.cp."
        raise SpecError(f"{', '.join(mine)} is for lorad to set", key="trainer.backend_args", hint=hint)
    tp, rank = spec.trainer.tp, spec.lora.rank
    if rank % tp:
        upper = rank + tp - rank % tp
        near = f"{upper - tp} or {upper}" if upper > tp else str(upper)
        raise SpecError(
            f"{rank} cannot be cut over the {tp} tensor-parallel ranks of trainer.tp",
            key="lora.rank",
            hint=f"Use a rank of {near}, or another trainer.tp.",
        )
    stage = spec.trainer.ranks // spec.trainer.pp
    if stage % spec.trainer.ep:
        raise SpecError(
            f"{spec.trainer.ep} does not divide the {stage} ranks of a pipeline stage (tp x dp)",
            key="trainer.ep",
            hint="Experts are spread over ranks that are there already: lower it, or raise trainer.dp.",
        )


def check_sizes(spec: Spec, facts: ModelFacts) -> None:
    """Check, as far as config.json shows, that Megatron can cut this model over these ranks.

    Raises SpecError.
    """
    trainer = spec.trainer
    if facts.kv_heads % trainer.cp:
        raise SpecError(
            f"{trainer.cp} ranks cannot share {facts.kv_heads} key-value heads",
            key="trainer.cp",
            hint="It must divide num_key_value_heads; use trainer.dp for more ranks.",
        )
    if trainer.cp > 1 and ATTENTION in trainer.backend_args:
        raise SpecError(
            f"{ATTENTION} does nothing with trainer.cp, whose ranks have an attention of their own",
            key="trainer.backend_args",
            hint="Leave it out.",
        )
    if trainer.backend != "megatron":
        return
    if facts.kv_heads % trainer.tp:
        raise SpecError(
            f"{trainer.tp} ranks cannot share {facts.kv_heads} key-value heads",
            key="trainer.tp",
            hint="It must divide num_key_value_heads; use trainer.dp for more ranks.",
        )
    if facts.layers % trainer.pp and not SPLITS & trainer.backend_args.keys():
        raise SpecError(
            f"{trainer.pp} stages cannot share {facts.layers} layers evenly",
            key="trainer.pp",
            hint="It must divide num_hidden_layers, or trainer.backend_args say "
            "num_layers_in_first_pipeline_stage.",
        )
    if trainer.ep > 1 and not facts.experts:
        raise SpecError(
            f"{trainer.ep} ranks for experts, but the model has none",
            key="trainer.ep",
            hint="Leave it out, or set it to 1.",
        )
    if facts.expert_count % trainer.ep:
        raise SpecError(
            f"{trainer.ep} ranks cannot share {facts.expert_count} experts",
            key="trainer.ep",
            hint="It must divide the experts of a layer.",
        )


def check_adapter(spec: Spec, facts: ModelFacts, adapter: AdapterConfig, device: str) -> None:
    """Check that the trainer can train this adapter of modules that it can adapt, and the engine serve it.

    Raises SpecError.
    """
    refuse_unserved(spec, facts, adapter)
    if adapter.dora:
        _check_dora(spec, adapter)
    backend, kind = spec.trainer.backend, facts.model_type
    if adapter.experts and kind not in ADAPTS.get(backend, (kind,)):
        raise SpecError(
            f"the {backend} trainer adapts no experts of {kind or 'this model'}",
            key="lora.target_modules",
            hint='Leave them as they are with lora.exclude_modules: ["*.experts.*"], or use '
            "trainer.backend: builtin.",
        )
    if _shares(spec):
        _check_fused(adapter)
    if spec.trainer.backend == "megatron":
        _check_experts(spec, facts, adapter, device)


def check_names(
    spec: Spec, facts: ModelFacts, adapter: AdapterConfig, directory: Path, config: Config, device: str
) -> list[str]:
    """Check that fsdp or megatron loads the checkpoint, and has the adapter's linears under its own names.

    Returns warnings; raises SpecError. The ranks' own functions answer in a process of its own, since they
    import torch. Models that lorad's tests load there are not asked about.
    """
    name, kind = spec.trainer.backend, known_config(directory)
    if name not in RANKED or _is_loaded(name, facts.model_type, kind):
        return []
    begin(f"asking {name} whether it loads the model")
    backend = config.backends.get(name, Backend())
    own = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": python_path(backend.env.get("PYTHONPATH"))}
    dtype = facts.dtype if spec.model.dtype == "auto" else spec.model.dtype
    settings = {
        "model": str(directory),
        "dtype": "float32" if dtype == "float32" else "bfloat16",
        "device": device,
        "args": {key: value for key, value in spec.trainer.backend_args.items() if key not in SPLITS},
    }
    question = json.dumps(settings) if name == "megatron" else str(directory)
    command = [str(interpreter_of(name, backend.python)), "-P", "-m", f"lorad.trainers.{name}.names"]
    try:
        environment = {**os.environ, **backend.env, **own}
        output = _output([*command, question], environment, _NAMES_SECONDS[name])
        answer = msgspec.json.decode(output.strip().rpartition(b"\n")[2], type=_Names)
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        return [f"trainer.backend: {name} could not be asked whether it loads the model: {error}"]
    if answer.error is not None:
        raise from_wire(answer.error)
    if unknown := [module for module in adapter.modules if module not in answer.names]:
        ends = unknown[0].partition("layers.")[2]
        alike = (module for module in answer.names if ends and module.endswith(ends))
        others = f", nor {len(unknown) - 1} others of the {len(adapter.modules)} that would be adapted"
        calls = next(alike, next(iter(answer.names), "otherwise"))
        raise SpecError(
            f"{name} has no linear {unknown[0]}{others}: it calls its linears {calls} and the like",
            key="model.path",
            hint="Use trainer.backend: fsdp."
            if name == "megatron"
            else "lorad trains no checkpoint yet whose names are others than those of its class in "
            "transformers; give one of the language model alone.",
        )
    return []


def _output(command: Sequence[str], env: Mapping[str, str], seconds: float) -> bytes:
    """Return what a process prints within so many seconds, and say meanwhile that the check goes on.

    Raises OSError and TimeoutExpired.
    """
    end = time.monotonic() + seconds
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=env) as process:
        while True:
            try:
                return process.communicate(timeout=_TOLD_SECONDS)[0]
            except subprocess.TimeoutExpired:
                if time.monotonic() > end:
                    process.kill()
                    raise
                HEART.progress()


def _is_loaded(trainer: str, kind: str, config: ModelConfig | None) -> bool:
    """Return whether lorad's tests show that a trainer loads models of this kind. config: None of a model
    that lorad does not compute itself.
    """
    if config is None or trainer == "fsdp":
        return config is not None
    has_biases = config.o_bias or config.mlp_bias or (config.qkv_bias and kind != "qwen2")
    return kind in LOADS and not has_biases


def _check_dora(spec: Spec, adapter: AdapterConfig) -> None:
    """Check that trainer and engine compute DoRA as PEFT does. Raises SpecError."""
    key, leave = "lora.dora", "or leave lora.dora out."
    if spec.trainer.backend not in _WITH_DORA:
        raise SpecError(
            f"the {spec.trainer.backend} trainer has no place for the magnitudes of DoRA",
            key=key,
            hint=f"Use trainer.backend: {' or '.join(_WITH_DORA)}, {leave}",
        )
    if spec.rollout.backend != "builtin":
        raise SpecError(
            f"{spec.rollout.backend} has no place for the magnitudes of DoRA",
            key=key,
            hint=f"Sample with rollout.backend: builtin, {leave}",
        )
    if adapter.experts:
        raise SpecError(
            f"DoRA is not computed on experts ({adapter.experts[0]})",
            key=key,
            hint=f'Leave them as they are with lora.exclude_modules: ["*.experts.*"], {leave}',
        )
    if adapter.dropout:
        raise SpecError(
            f"{adapter.dropout} with lora.dora: PEFT then drops inputs of the base itself, too",
            key="lora.dropout",
            hint=f"Set it to 0, {leave}",
        )


def _check_fused(adapter: AdapterConfig) -> None:
    """Check that `lora.type: lora` targets all or none of the linears that Megatron fuses into one. Raises
    SpecError.
    """
    for members in fused(adapter.modules):
        there = [member for member in members if member in adapter.modules]
        if len(there) < len(members):
            together = ", ".join(leaf(member) for member in members)
            raise SpecError(
                f"{there[0]}: with lora.type: lora, {together} share one A",
                key="lora.target_modules",
                hint="Target all of them, or use lora.type: canonical_lora.",
            )


def _check_experts(spec: Spec, facts: ModelFacts, adapter: AdapterConfig, device: str) -> None:
    """Check that Megatron computes the experts one by one where they are adapted, and the same on all ranks.

    Raises SpecError.
    """
    trainer = spec.trainer
    if not any(map(experts_of, adapter.modules)):
        return
    leave = 'or leave the experts as they are with lora.exclude_modules: ["*.experts.*"].'
    dtype = facts.dtype if spec.model.dtype == "auto" else spec.model.dtype
    grouped = device != "cpu" and dtype != "float32"  # Transformer Engine has no fp32 attention
    if grouped and trainer.backend_args.get("moe_grouped_gemm") is not False:
        raise SpecError(
            "on a GPU Megatron computes all experts in one grouped product, where they get no adapters",
            key="trainer.backend_args",
            hint="Set {moe_grouped_gemm: false}, which computes one expert after another and is slower, use "
            f"trainer.backend: fsdp, {leave}",
        )
    if adapter.dropout and trainer.tp > 1 and trainer.ep > 1:
        raise SpecError(
            f"{adapter.dropout} on experts would differ between the copies of a token that the ranks of "
            "trainer.tp send to those of trainer.ep",
            key="lora.dropout",
            hint=f"Set it to 0, set trainer.tp or ep to 1, {leave}",
        )


def check_shared(spec: Spec, adapter: Adapter) -> None:
    """The adapter to start from has equal A where `lora.type: lora` has but one. Raises SpecError."""
    if not _shares(spec):
        return
    for first, *others in fused(adapter.config.modules):
        for other in others:
            if not np.array_equal(
                adapter.tensors[f"{first}.lora_A.weight"], adapter.tensors[f"{other}.lora_A.weight"]
            ):
                raise SpecError(
                    f"lora.type: lora shares A over {first} and {other}, but theirs differ",
                    key="lora.adapter_path",
                    hint="Such an adapter needs lora.type: canonical_lora.",
                )


def _shares(spec: Spec) -> bool:
    """Return whether linears share an A."""
    return spec.trainer.backend == "megatron" and spec.lora.type == "lora"


def check_devices(spec: Spec, device: str, count: int) -> None:
    """Check that the machine has what the backends need; on the CPU ranks are processes that share it. Raises
    SpecError.

    count: GPUs of the machine.
    """
    ranks, tp, asked = spec.trainer.ranks, spec.rollout.tp, spec.resources.devices
    if device == "cpu":
        if tp > 1 or (asked or 1) > 1:
            key, what = (
                ("rollout.tp", f"{tp} devices for one server")
                if tp > 1
                else ("resources.devices", str(asked))
            )
            raise SpecError(f"{what}, but this machine has no GPU", key=key, hint="Leave it out.")
        return
    for key, needed in (("trainer", ranks), ("rollout.tp", tp)):
        if asked is not None and needed > asked:
            raise SpecError(
                f"{'tp x pp x dp ' if key == 'trainer' else ''}is {needed} but resources.devices is {asked}",
                key=key,
                hint="Lower it, or ask for more devices; without resources.devices there are as many as are "
                "needed.",
            )
    if spec.gpus > count:
        raise SpecError(
            f"the run needs {spec.gpus} GPUs, this machine has {count}",
            key="resources.devices",
            hint="Lower trainer.tp, pp or dp, rollout.tp or rollout.servers.",
        )


def check_trainer(spec: Spec, config: Config, device: str, *, elsewhere: bool = False) -> list[str]:
    """Check that `trainer.backend`'s packages are installed beside its interpreter. Returns warnings; raises
    SpecError.

    Nothing is checked for a trainer in the pool's own process.
    elsewhere: the ranks are on nodes of a cluster, whose interpreters need not be on this machine.
    """
    name = spec.trainer.backend
    if name not in RANKED:
        return []
    python = interpreter_of(name, config.backends.get(name, Backend()).python)
    if elsewhere and not python.exists():
        return [f"trainer.backend: {python} {ON_NODES}"]
    versions = installed_versions(name, python, gpu=device != "cpu")
    return [f"trainer.backend: {words}" for words in older(name, versions)]


def check_bits(spec: Spec, device: str) -> list[str]:
    """Return a warning where `deterministic: true` is more than the backends can keep."""
    others = {spec.trainer.backend, spec.rollout.backend} - {"builtin"}
    if device == "cpu" or not spec.deterministic or not others:
        return []
    names = " and ".join(sorted(others))
    return [
        "deterministic: on GPUs the builtin trainer and engine alone give the same bits again; of "
        f"{names} only seeds, batches and threads are the same"
    ]


def check_dtype(spec: Spec, device: str, root: Path = Path("/")) -> list[str]:
    """Return a warning where a CPU without the means for bfloat16 is asked for it. root: of /proc."""
    flags = set(cpu_facts(root).get("flags", "").split())
    if device != "cpu" or spec.model.dtype != "bfloat16" or not flags or flags & _BFLOAT16:
        return []
    return [
        "model.dtype: this CPU has no means for bfloat16, neither AMX nor AVX512-BF16: products of 32 rows "
        "or more take about three times as long as in float32, which model.dtype: auto is here"
    ]


def check_adapted(spec: Spec, facts: ModelFacts, shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """Check that all that `lora.target_modules` names gets an adapter. Returns warnings; raises SpecError
    naming what does not.

    shapes: what the trainer can adapt. `all-linear` means no experts.
    """
    excluded = entries(spec.lora.exclude_modules)
    beyond = [
        name
        for name in (*facts.linears, *facts.experts)
        if name not in shapes and not any(entry_matches(entry, name) for entry in excluded)
    ]
    for entry in entries(spec.lora.target_modules):
        dense = [name for name in beyond if entry_matches(entry, name) and name in facts.linears]
        experts = [name for name in beyond if entry_matches(entry, name) and name not in facts.linears]
        if lost := dense if entry == ALL_LINEAR else dense + experts:
            patterns = list(dict.fromkeys(_NUMBER.sub(".*", name) for name in lost))
            who = f"the {spec.trainer.backend} trainer" if dense else "lorad (experts get no adapters)"
            there = ", ".join(dict.fromkeys(leaf(name) for name in shapes))
            leave = f"Leave them as they are with lora.exclude_modules: {json.dumps([*excluded, *patterns])}"
            is_all = not any(entry_matches(entry, name) for name in shapes)
            raise SpecError(
                f"{entry!r} names {len(lost)} linears that {who} cannot adapt: {', '.join(patterns)}",
                key="lora.target_modules",
                hint=(f"Name others: {there}" if is_all else f"{leave}, or name others: {there}")
                + (", or use trainer.backend: fsdp." if dense else "."),
            )
    left = len(facts.experts.keys() - shapes.keys())
    return [f"lora.target_modules: the {left} linears of the experts get no adapters"] * bool(left)
