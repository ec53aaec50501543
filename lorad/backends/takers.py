"""Judge of a base model which trainers and engines take it, by the checks that every spec passes."""

import contextlib
from itertools import product
from pathlib import Path

from msgspec import Struct

from lorad.backends.registry import ENGINES, TRAINERS
from lorad.backends.setup import adapter_config, backend_setup, needs_base
from lorad.errors import SpecError
from lorad.limits.check import refuse
from lorad.models.facts import check_whole, known_config, read_facts
from lorad.spec.model import Rollout, Spec
from lorad.spec.trainer import Trainer


class Takers(Struct, frozen=True):
    """Says what a base is and who takes it.

    parameters: how many numbers it has.
    dtype: the dtype of its files.
    weights: how many bytes its weights have when they are loaded once.
    trainers, engines: names of those that take it together with at least one of the others.
    pairs: all pairs of a trainer and an engine that take it.
    problem: why it is no base; an empty text where it is one.
    """

    parameters: int = 0
    dtype: str = ""
    weights: int = 0
    trainers: list[str] = []
    engines: list[str] = []
    pairs: list[tuple[str, str]] = []
    problem: str = ""


def takers(directory: Path, device: str) -> Takers:
    """Judge the model of a directory. device: `cpu`, where weights become float32, or `cuda`."""
    try:
        facts = read_facts(directory)
        config = known_config(directory)
        if config is not None:
            check_whole(directory, config)
        weights = facts.bytes("float32" if device == "cpu" else "auto")
    except SpecError as error:
        return Takers(problem=error.problem)
    pairs = []
    for trainer, engine in product(sorted(TRAINERS), sorted(ENGINES)):
        spec = Spec(trainer=Trainer(backend=trainer), rollout=Rollout(backend=engine))
        if needs_base(spec) and config is None:
            continue
        # as a run asks in its preflight: for the model first, and for its adapter of all linears
        with contextlib.suppress(SpecError):
            refuse(backend_setup(spec, facts, device=device))
            refuse(backend_setup(spec, facts, adapter_config(spec, facts), device))
            pairs.append((trainer, engine))
    return Takers(
        parameters=facts.parameters,
        dtype=facts.dtype,
        weights=weights,
        trainers=sorted({trainer for trainer, _ in pairs}),
        engines=sorted({engine for _, engine in pairs}),
        pairs=pairs,
    )
