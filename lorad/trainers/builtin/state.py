"""A slot on disk: PEFT's two files, Adam's two moments under logical names, the state of the dropout generator.

Gradients are not among it: a checkpoint is taken after a step. Loading reads and checks everything before it changes
anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from lorad.adapters.adapter import PEFT_PREFIX, AdapterConfig
from lorad.adapters.peft import CONFIG, WEIGHTS, read_peft, write_peft
from lorad.adapters.validate import validate
from lorad.errors import AdapterRefused, IntegrityError
from lorad.models.base import Base
from lorad.models.directory import linear_shapes
from lorad.trainers.base import SlotSpec
from lorad.trainers.builtin.slot import Slot, dropout_generator

OPTIMIZER = "optimizer.safetensors"
RNG = "rng.safetensors"

Arrays = dict[str, np.ndarray]
Wanted = Mapping[str, tuple[tuple[int, ...], str]]
"""name -> (shape, dtype)"""

NOT_WHOLE = "this checkpoint is not whole or not of this adapter: resume from another one"


def new_slot(base: Base, spec: SlotSpec) -> Slot:
    """A fresh slot, its weights from `spec.source` when there is one. Raises AdapterRefused when that does not fit."""
    slot = Slot(base, spec)
    if spec.source is None:
        return slot
    source = read_peft(spec.source)
    if told := _difference(source.config, spec.adapter, ("modules", "rank", "scale")):
        raise AdapterRefused(
            f"{spec.source}: {told}",
            hint="give lora.rank, lora.alpha, lora.rslora and lora.target_modules the values of that adapter",
        )
    validate(source, linear_shapes(base.config))
    slot.set_weights(source.tensors)
    return slot


def save(slot: Slot, directory: Path, base_model: str) -> list[str]:
    """Writes the slot's files into an existing directory and returns their names."""
    write_peft(slot.snapshot(), directory, base_model)
    moments = {
        f"{moment}.{name}": view.cpu().numpy()
        for moment in ("exp_avg", "exp_avg_sq")
        for name, view in slot.views(getattr(slot, moment)).items()
    }
    save_file({**moments, "step": np.array([slot.step], np.int64)}, directory / OPTIMIZER)
    save_file({"dropout": slot.dropout.get_state().numpy()}, directory / RNG)
    return [WEIGHTS, CONFIG, OPTIMIZER, RNG]


def load(slot: Slot, directory: Path) -> None:
    """Raises IntegrityError, and changes nothing, unless every tensor is there with its shape and no other is, and
    they are of an adapter like the slot's.
    """
    weights = {name: (shape, "float32") for name, shape in slot.shapes.items()}
    prefixed = _read(directory / WEIGHTS, {PEFT_PREFIX + name: wanted for name, wanted in weights.items()})
    moments = {f"{moment}.{name}": wanted for moment in ("exp_avg", "exp_avg_sq") for name, wanted in weights.items()}
    optimizer = _read(directory / OPTIMIZER, {**moments, "step": ((1,), "int64")})
    _check_config(slot, directory)
    dropout = _dropout_state(slot, directory / RNG)

    slot.set_weights({name: prefixed[PEFT_PREFIX + name] for name in weights})
    for moment in ("exp_avg", "exp_avg_sq"):
        for name, view in slot.views(getattr(slot, moment)).items():
            view.copy_(torch.from_numpy(optimizer[f"{moment}.{name}"]))
    slot.step = int(optimizer["step"][0])
    slot.dropout.set_state(dropout)
    slot.grads.zero_()


def _check_config(slot: Slot, directory: Path) -> None:
    """The same tensors mean another adapter with another alpha."""
    hint = "resume with the settings that the checkpoint was made with, or from another one"
    try:
        saved = read_peft(directory).config
    except AdapterRefused as error:
        raise IntegrityError(str(error), hint=hint) from error
    if told := _difference(saved, slot.spec.adapter, ("modules", "rank", "alpha", "rslora")):
        raise IntegrityError(f"{directory / CONFIG}: {told}", hint=hint)


def _dropout_state(slot: Slot, path: Path) -> Tensor:
    """That of the file. A device takes only states of its own kind, which without dropout, where nothing is ever drawn,
    does not matter: then that of a new slot.
    """
    found, device, seed = _arrays(path), slot.dropout.device, slot.spec.seed
    shape = found["dropout"].shape if "dropout" in found else ()
    _check(path, found, {"dropout": (shape, "uint8")})
    generator = dropout_generator(device, seed)
    try:
        generator.set_state(torch.from_numpy(found["dropout"]))
    except (RuntimeError, TypeError) as error:
        if not slot.spec.adapter.dropout:
            return dropout_generator(device, seed).get_state()
        raise IntegrityError(
            f"{path}: dropout can not go on with it: it is no state of a generator on {device.type} ({error})",
            hint="resume on the kind of device that the checkpoint was made on, or from another checkpoint",
        ) from error
    return generator.get_state()


def _read(path: Path, wanted: Wanted) -> Arrays:
    """The arrays of one file, which must be exactly `wanted`."""
    found = _arrays(path)
    _check(path, found, wanted)
    return found


def _arrays(path: Path) -> Arrays:
    try:
        found: Arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise IntegrityError(f"{path}: not readable: {error}", hint=NOT_WHOLE) from error
    return found


def _check(path: Path, found: Arrays, wanted: Wanted) -> None:
    wrong = {
        "missing": wanted.keys() - found.keys(),
        "unexpected": found.keys() - wanted.keys(),
        "of the wrong shape or dtype": {
            key for key in wanted.keys() & found.keys() if (found[key].shape, found[key].dtype.name) != wanted[key]
        },
    }
    told = [f"{len(keys)} {what}: {_few(sorted(keys))}" for what, keys in wrong.items() if keys]
    if told:
        raise IntegrityError(f"{path}: {'; '.join(told)}", hint=NOT_WHOLE)


def _difference(found: AdapterConfig, wanted: AdapterConfig, fields: Sequence[str]) -> str:
    """The first of some fields that are not the same, in words; empty when there is none."""
    for field in fields:
        theirs, ours = getattr(found, field), getattr(wanted, field)
        if theirs != ours:
            return f"its {field} is {_shown(theirs, ours)}, the slot's {_shown(ours, theirs)}"
    return ""


def _few(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")


def _shown(value: object, other: object) -> str:
    """A list of modules is shown by what the other one lacks."""
    if isinstance(value, tuple) and isinstance(other, tuple):
        return f"{len(value)} modules ({_few(sorted(set(value) - set(other))) or 'all of them shared'})"
    return str(value)
