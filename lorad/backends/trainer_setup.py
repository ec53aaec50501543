"""What a run asks of the ranks that it trains on: the same for runs that can share them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from lorad.adapters.targets import HEAD, MEGATRON, leaf, match_modules
from lorad.backends.engine_registry import SERVERS
from lorad.backends.trainer_install import interpreter_of
from lorad.backends.trainer_registry import RANKED
from lorad.box.config import Backend
from lorad.errors import SpecError
from lorad.models.facts import ModelFacts
from lorad.protocol.ranks import RanksSetup
from lorad.spec.model import Spec

AXES = ("tp", "pp", "ep", "dp")
Shapes = Mapping[str, tuple[int, int]]

_MEGATRON_LAYER = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+")
_FUSED = {names[0]: names for names in MEGATRON.values() if len(names) > 1}
_MEGATRON_LEAVES = {name for names in MEGATRON.values() for name in names}


def needs_base(spec: Spec) -> bool:
    """Return whether the pool's own process loads the model, whose architecture the builtin backend then has
    to know.
    """
    return spec.trainer.backend not in RANKED or spec.rollout.backend not in SERVERS


def ranks_setup(spec: Spec, backend: Backend) -> RanksSetup:
    """Raises SpecError when the backend has no interpreter."""
    trainer = spec.trainer
    interpreter_of(trainer.backend, backend.python)
    return RanksSetup(
        python=str(backend.python or ""),
        env=backend.env,
        tp=trainer.tp,
        pp=trainer.pp,
        cp=trainer.cp,
        dp=trainer.dp,
        ep=trainer.ep,
        args=trainer.backend_args,
    )


def targets_of(backend: str, linears: Shapes) -> dict[str, tuple[int, int]]:
    """Select the linears of a base that the trainer can adapt: for Megatron, only those that it has a name
    for.

    Raises SpecError when there are none.
    """
    if backend != "megatron":
        return dict(linears)
    found = {
        name: shape
        for name, shape in linears.items()
        if name == HEAD or (_MEGATRON_LAYER.fullmatch(name) and leaf(name) in _MEGATRON_LEAVES)
    }
    if not found:
        raise SpecError(
            f"megatron can adapt no linear of the model (it has {next(iter(linears), 'none')})",
            key="trainer.backend",
            hint="It needs layers named like Llama's (model.layers.0.self_attn.q_proj). Use "
            "trainer.backend: fsdp.",
        )
    return found


def modules_of(spec: Spec, facts: ModelFacts) -> tuple[str, ...]:
    """Return the linears that the run's adapter is on. Raises SpecError, see `match_modules`."""
    shapes = targets_of(spec.trainer.backend, facts.linears)
    return match_modules(
        shapes, spec.lora.target_modules, spec.lora.exclude_modules, (*facts.linears, *facts.experts)
    )


def fused(modules: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield the linears that Megatron makes one of, for each of these that has any of `modules`: all, asked
    for or not.
    """
    seen: set[str] = set()
    for module in modules:
        parent, _, last = module.rpartition(".")
        for first, names in _FUSED.items():
            if last in names and f"{parent}.{first}" not in seen:
                seen.add(f"{parent}.{first}")
                yield tuple(f"{parent}.{name}" for name in names)
