"""A builtin slot and its files, see `lorad/trainers/checkpoint.py`."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from lorad.errors import IntegrityError
from lorad.models.base import Base
from lorad.models.directory import linear_shapes
from lorad.trainers import checkpoint
from lorad.trainers.base import SlotSpec
from lorad.trainers.builtin.slot import Slot, dropout_generator
from lorad.trainers.checkpoint import MOMENTS, RNG, Saved

log = logging.getLogger(__name__)


def new_slot(base: Base, spec: SlotSpec) -> Slot:
    """A fresh slot, its weights from `spec.source` when there is one.

    Raises AdapterRefused when that does not fit.
    """
    slot = Slot(base, spec)
    if spec.source is not None:
        source = checkpoint.read_source(spec.source, spec.adapter, linear_shapes(base.config))
        slot.set_weights(source.tensors)
    return slot


def save(slot: Slot, directory: Path, base_model: str) -> list[str]:
    """Writes the slot's files into an existing directory and returns their names."""
    moments = {
        moment: {name: view.cpu().numpy() for name, view in slot.views(getattr(slot, moment)).items()}
        for moment in MOMENTS
    }
    rng = {"dropout": slot.dropout.get_state().numpy()}
    return checkpoint.write(directory, slot.snapshot(), moments, slot.step, rng, base_model)


def load(slot: Slot, directory: Path) -> None:
    """Load a checkpoint.

    Raises IntegrityError, and changes nothing, when it is damaged or of an unlike adapter.
    """
    saved = checkpoint.read(directory, slot.spec.adapter, slot.shapes)
    dropout = _dropout_state(slot, saved, directory)

    slot.set_weights(saved.weights)
    for moment in MOMENTS:
        for name, view in slot.views(getattr(slot, moment)).items():
            view.copy_(torch.from_numpy(getattr(saved, moment)[name]))
    slot.step = saved.step
    slot.dropout.set_state(dropout)
    slot.grads.zero_()


def _dropout_state(slot: Slot, saved: Saved, directory: Path) -> Tensor:
    """Return the generator's state from the file; after another kind of trainer, one derived from the seed
    and the step.

    A device takes only states of its own kind. Without dropout nothing is ever drawn, so that a new slot's
    state does.
    """
    device, seed = slot.dropout.device, slot.spec.seed
    if "dropout" not in saved.rng:
        log.info("%s was written by another trainer: dropout continues with masks of its own", directory)
        return dropout_generator(device, checkpoint.later_seed(seed, saved.step)).get_state()
    generator = dropout_generator(device, seed)
    try:
        generator.set_state(torch.from_numpy(saved.rng["dropout"]))
    except (RuntimeError, TypeError) as error:
        if not slot.spec.adapter.dropout:
            return dropout_generator(device, seed).get_state()
        raise IntegrityError(
            f"{directory / RNG}: dropout cannot continue with it: no state of a generator on {device.type} "
            f"({error})",
            hint="resume on the kind of device that the checkpoint was made on, or from another checkpoint",
        ) from error
    return generator.get_state()
