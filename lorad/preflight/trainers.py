"""Look at the trainer of a spec before anything starts: its keys, its ranks, its installation."""

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
from msgspec.structs import replace

from lorad.adapters.adapter import Adapter, AdapterConfig
from lorad.adapters.targets import ALL_LINEAR, entries, entry_matches, leaf
from lorad.backends.installed import installed_versions, interpreter_of, older
from lorad.backends.setup import is_fused
from lorad.box.config import Backend, Config
from lorad.box.machine import cpu_facts
from lorad.box.paths import python_path
from lorad.errors import SpecError, from_wire
from lorad.limits.arguments import LOADS, RANKED, SPLITS, fused
from lorad.models.facts import ModelFacts, known_config
from lorad.preflight.telling import begin
from lorad.protocol.heartbeat import HEART
from lorad.spec.model import Spec

ON_NODES = "is not on this machine; `lorad doctor --cluster` looks for it on the nodes"
_BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16"}  # of these, what a CPU has that computes with it
_NUMBER = re.compile(r"\.\d+(?=\.)")
_NAMES_SECONDS = {"fsdp": 240.0, "megatron": 600.0}  # Megatron-Bridge may take minutes to import
_TOLD_SECONDS = 20.0  # between two signs that the check waits


class _Names(msgspec.Struct, frozen=True):
    """Holds what `lorad.trainers.fsdp.names` and `lorad.trainers.megatron.names` answer."""

    names: list[str] = []
    error: dict[str, Any] | None = None


def check_names(
    spec: Spec, facts: ModelFacts, adapter: AdapterConfig, directory: Path, config: Config, device: str
) -> list[str]:
    """Check that fsdp or megatron loads the checkpoint, and has the adapter's linears under its own names.

    Returns warnings; raises SpecError. The ranks' own functions answer in a process of its own, since they
    import torch. Models that lorad's tests load there are not asked about.
    """
    name = spec.trainer.backend
    kind = known_config(directory)
    if name not in RANKED:
        return []
    if kind is not None:  # lorad computes it itself: do its tests load models of this kind there?
        is_plain = facts.model_type == "qwen2" or not kind.qkv_bias
        if name == "fsdp" or (facts.model_type in LOADS and is_plain and not (kind.o_bias or kind.mlp_bias)):
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
            else "Give a checkpoint of the language model alone.",
        )
    return []


def _output(command: Sequence[str], env: Mapping[str, str], seconds: float) -> bytes:
    """Return what a process prints in time, and say meanwhile that the check goes on.

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


def check_shared(spec: Spec, adapter: Adapter) -> None:
    """Raise SpecError for an adapter with several A where `lora.type: lora` has but one."""
    if spec.trainer.backend != "megatron" or spec.lora.type != "lora":
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


def check_devices(spec: Spec, device: str, count: int) -> None:
    """Check that the machine has the devices of ranks and servers, `count` GPUs or slots of its CPU.

    On the CPU ranks share it, and servers with devices of their own have slots of it. Raises SpecError.
    """
    ranks = spec.trainer.ranks
    tp = spec.rollout.tp
    asked = spec.resources.devices
    if device == "cpu":
        if spec.server_devices >= count:
            raise SpecError(
                f"{spec.server_devices} devices for servers and one for the trainer, but this machine has "
                f"{'no GPU' if count == 1 else f'{count} slots of its CPU'}",
                key="resources.rollout_devices" if spec.resources.rollout_devices else "pool.mode",
                hint="Leave it out, or set devices.cpu_slots in config.yaml, to try it on a CPU.",
            )
        if tp > 1 or (asked or 1) > 1:
            key, what = (
                ("rollout.tp", f"{tp} devices for one server")
                if tp > 1
                else ("resources.devices", str(asked))
            )
            raise SpecError(f"{what}, but this machine has no GPU", key=key, hint="Leave it out.")
        return
    own_tp = 0 if spec.server_devices else tp  # servers with devices of their own take none of `devices`
    for key, needed in (("trainer", ranks), ("rollout.tp", own_tp)):
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
            hint="Lower trainer.tp, pp or dp, rollout.tp or rollout.servers"
            + (", or let them share devices: pool.mode: timesliced." if spec.server_devices else "."),
        )


def check_trainer(spec: Spec, config: Config, device: str, *, elsewhere: bool) -> list[str]:
    """Check that a trainer with ranks is installed. Returns warnings; raises SpecError.

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


def settled_mode(spec: Spec, config: Config) -> Spec:
    """Return the spec with `pool.mode: resident` where config.yaml alone keeps it from being fused."""
    trainer = config.backends.get(spec.trainer.backend, Backend())
    if not is_fused(spec) or is_fused(spec, trainer):
        return spec
    return replace(spec, pool=replace(spec.pool, mode="resident"))


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
    """Return a warning where a CPU without the means for bfloat16 is asked for it; /proc is below `root`."""
    flags = set(cpu_facts(root).get("flags", "").split())
    if device != "cpu" or spec.model.dtype != "bfloat16" or not flags or flags & _BFLOAT16:
        return []
    return [
        "model.dtype: this CPU has no means for bfloat16, neither AMX nor AVX512-BF16: products of 32 rows "
        "or more take about three times as long as in float32, which model.dtype: auto is here"
    ]


def check_adapted(spec: Spec, facts: ModelFacts, shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """Raise SpecError for targets among which the trainer adapts only `shapes`; `all-linear` means no
    experts.

    Returns a warning where experts get no adapters.
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
            adaptable = ", ".join(dict.fromkeys(leaf(name) for name in shapes))
            leave = f"Leave them as they are with lora.exclude_modules: {json.dumps([*excluded, *patterns])}"
            is_all = not any(entry_matches(entry, name) for name in shapes)
            raise SpecError(
                f"{entry!r} names {len(lost)} linears that {who} cannot adapt: {', '.join(patterns)}",
                key="lora.target_modules",
                hint=(f"Name others: {adaptable}" if is_all else f"{leave}, or name others: {adaptable}")
                + (", or use trainer.backend: fsdp." if dense else "."),
            )
    left = len(facts.experts.keys() - shapes.keys())
    return [f"lora.target_modules: the {left} linears of the experts get no adapters"] * bool(left)
