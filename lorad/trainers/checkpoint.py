"""A slot on disk: PEFT's two files, Adam's two moments by logical name, dropout's state, a critic's head.

The files are the same whatever trainer wrote them and over however many ranks, so that any other can continue
with them. Gradients are not among them: a checkpoint is taken after a step. Everything is read and checked
before anything is changed.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from lorad.adapters.adapter import PEFT_PREFIX, Adapter, AdapterConfig
from lorad.adapters.peft import CONFIG, WEIGHTS, read_peft, write_peft
from lorad.adapters.prefixes import adapter_for
from lorad.adapters.validate import validate
from lorad.errors import AdapterRefused, IntegrityError

_OPTIMIZER = "optimizer.safetensors"
RNG = "rng.safetensors"
_VALUE_HEAD = "value_head.safetensors"
_HEAD_PREFIX = "value_head."
MOMENTS = ("exp_avg", "exp_avg_sq")

_Arrays = dict[str, np.ndarray]
_Expected = Mapping[str, tuple[tuple[int, ...], str]]  # shape and dtype by name

_NOT_WHOLE = "this checkpoint is not whole or not of this adapter: resume from another one"


def head_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a critic's head by logical name; it is a Linear(hidden, 1) of torch."""
    return {f"{_HEAD_PREFIX}weight": (1, hidden), f"{_HEAD_PREFIX}bias": (1,)}


class Saved(NamedTuple):
    """What the files hold, tensors by logical name, after so many optimizer steps."""

    weights: _Arrays
    exp_avg: _Arrays
    exp_avg_sq: _Arrays
    step: int
    rng: _Arrays  # `dropout` (uint8, of a generator), or `draws` (int64 [2]: a seed, how many calls drew)


def write(
    directory: Path,
    adapter: Adapter,
    head: _Arrays,
    moments: Mapping[str, _Arrays],
    step: int,
    rng: _Arrays,
    base: str,
) -> list[str]:
    """Write a slot into an existing directory, a critic with its head; return the names of the files."""
    write_peft(adapter, directory, base)
    named = {
        f"{moment}.{name}": tensors[name]
        for moment, tensors in moments.items()
        for name in (*adapter.tensors, *head)
    }
    save_file({**named, "step": np.array([step], np.int64)}, directory / _OPTIMIZER)
    save_file(rng, directory / RNG)
    if head:
        save_file(
            {name.removeprefix(_HEAD_PREFIX): array for name, array in head.items()}, directory / _VALUE_HEAD
        )
    return [WEIGHTS, CONFIG, _OPTIMIZER, RNG, *([_VALUE_HEAD] if head else [])]


def read(directory: Path, config: AdapterConfig, shapes: Mapping[str, tuple[int, ...]]) -> Saved:
    """Read a slot whose tensors have these shapes, by logical name.

    Raises IntegrityError unless it has exactly these, of an adapter like `config` (dropout may differ).
    """
    weights = {name: (tuple(shape), "float32") for name, shape in shapes.items()}
    head = {name.removeprefix(_HEAD_PREFIX): name for name in weights if name.startswith(_HEAD_PREFIX)}
    body = {PEFT_PREFIX + name: name for name in weights.keys() - head.values()}
    arrays: _Arrays = {}
    for file, names in {WEIGHTS: body, **({_VALUE_HEAD: head} if head else {})}.items():
        stored = _read(directory / file, {key: weights[name] for key, name in names.items()})
        arrays |= {name: stored[key] for key, name in names.items()}
    moments = {f"{moment}.{name}": shape for moment in MOMENTS for name, shape in weights.items()}
    optimizer = _read(directory / _OPTIMIZER, {**moments, "step": ((1,), "int64")})
    hint = "resume with the settings that the checkpoint was made with, or from another one"
    try:
        saved = read_peft(directory).config
    except AdapterRefused as error:
        raise IntegrityError(str(error), hint=hint) from error
    # with another alpha the same tensors are another adapter
    fields = ("dora", "modules", "rank", "rank_of_experts", "alpha", "rslora")
    if difference := _difference(saved, config, fields):
        raise IntegrityError(f"{directory / CONFIG}: {difference}", hint=hint)
    rng = _arrays(directory / RNG)
    shape = rng["dropout"].shape if "dropout" in rng else ()
    is_of_ranks = rng.keys() == {"draws"}
    _check(directory / RNG, rng, {"draws": ((2,), "int64")} if is_of_ranks else {"dropout": (shape, "uint8")})
    return Saved(
        weights={name: arrays[name] for name in weights},
        exp_avg={name: optimizer[f"exp_avg.{name}"] for name in weights},
        exp_avg_sq={name: optimizer[f"exp_avg_sq.{name}"] for name in weights},
        step=int(optimizer["step"][0]),
        rng=rng,
    )


def read_source(directory: Path, config: AdapterConfig, linears: Mapping[str, tuple[int, int]]) -> Adapter:
    """Read the PEFT directory that a slot begins with; `linears` has (out, in). Raises AdapterRefused."""
    source = adapter_for(linears, read_peft(directory, None))
    fields = ("dora", "modules", "rank", "rank_of_experts", "scale")
    if difference := _difference(source.config, config, fields):
        raise AdapterRefused(
            f"{directory}: {difference}",
            hint="give lora.rank, lora.experts.rank, lora.alpha, lora.rslora, lora.dora and "
            "lora.target_modules the values of that adapter",
        )
    validate(source, linears)
    return source


def _difference(file: AdapterConfig, slot: AdapterConfig, fields: Sequence[str]) -> str:
    """Describe the fields that differ; "" when all are equal."""
    pairs = {field.replace("_", " "): (getattr(file, field), getattr(slot, field)) for field in fields}
    return "; ".join(
        f"its {name} is {_shown(theirs, ours)}, the slot's {_shown(ours, theirs)}"
        for name, (theirs, ours) in pairs.items()
        if theirs != ours
    )


def later_seed(seed: int, step: int) -> int:
    """Derive dropout's seed for a slot that continues after another kind of trainer."""
    return int.from_bytes(hashlib.sha256(f"{seed} from step {step}".encode()).digest()[:8], "big") >> 1


def _read(path: Path, expected: _Expected) -> _Arrays:
    """Return the arrays of a file. Raises IntegrityError unless they are exactly as expected."""
    arrays = _arrays(path)
    _check(path, arrays, expected)
    return arrays


def _arrays(path: Path) -> _Arrays:
    try:
        arrays: _Arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise IntegrityError(f"{path}: not readable: {error}", hint=_NOT_WHOLE) from error
    return arrays


def _check(path: Path, arrays: _Arrays, expected: _Expected) -> None:
    wrong = {
        "missing": expected.keys() - arrays.keys(),
        "unexpected": arrays.keys() - expected.keys(),
        "of the wrong shape or dtype": {
            key
            for key in expected.keys() & arrays.keys()
            if (arrays[key].shape, arrays[key].dtype.name) != expected[key]
        },
    }
    problems = [f"{len(keys)} {what}: {_few(sorted(keys))}" for what, keys in wrong.items() if keys]
    if problems:
        raise IntegrityError(f"{path}: {'; '.join(problems)}", hint=_NOT_WHOLE)


def _few(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")


def _shown(value: object, other: object) -> str:
    """Show a value; for a list of modules those that the other list lacks."""
    if isinstance(value, tuple) and isinstance(other, tuple):
        return f"{len(value)} modules ({_few(sorted(set(value) - set(other))) or 'all of them shared'})"
    return str(value)
