"""One adapter being trained: its weights, gradients, Adam state and dropout generator; of a critic, its head.

Each of the four kinds of numbers is one flat fp32 vector with the same layout, so that a step is a handful of
calls; logical names are views into them. Its files: see `lorad/trainers/checkpoint.py`.
"""

import hashlib
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lorad.adapters.adapter import MAGNITUDE, Adapter
from lorad.adapters.validate import expected_shapes
from lorad.errors import AdapterRefused, IntegrityError
from lorad.models.base import Base
from lorad.models.directory import linear_shapes
from lorad.models.lora import fused_groups, layers_with_experts, members, row_norms, weight_at
from lorad.protocol.batch import Optimizer
from lorad.trainers import checkpoint
from lorad.trainers.base import SlotInfo, SlotSpec
from lorad.trainers.checkpoint import MOMENTS, RNG
from lorad.trainers.slot_math import adamw, initial_a, l2_norm, spans_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Half:
    """The B of one trained module of a fused linear, [out, rank], and where it works.

    Attributes:
        rows: Its rows of the linear's output.
        ranks: Its columns of A x.
        magnitude: The magnitude of DoRA, [out].
    """

    rows: slice
    ranks: slice
    b: Tensor
    b_grad: Tensor
    magnitude: Tensor | None = None
    magnitude_grad: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """The trained part of one fused linear, as views into the slot's vectors. For several experts, all
    tensors are [experts, …].

    Attributes:
        a: The A of all its modules, [modules * rank, in].
        scale: The factor of B A.
        weight, bias: What the base has there, for DoRA.
    """

    a: Tensor
    a_grad: Tensor
    halves: tuple[Half, ...]
    scale: float
    weight: Tensor | None = None
    bias: Tensor | None = None

    def norms(self, half: Half, scale: float) -> Tensor:
        """Return |W + scale * B A| of the rows of a module, [out] in fp32."""
        assert self.weight is not None
        return row_norms(self.weight[half.rows], half.b * scale, self.a[half.ranks])


class Slot:
    """An adapter in training. Raises AdapterRefused unless all modules of `spec.adapter` are linears of the
    base.
    """

    def __init__(self, base: Base, spec: SlotSpec) -> None:
        self.spec = spec
        head = checkpoint.head_shapes(base.config.hidden_size) if spec.critic else {}
        # group by group the A of all its modules, then their B; a group's A is one block
        shapes = expected_shapes(spec.adapter, linear_shapes(base.config))
        if not shapes:
            raise AdapterRefused("the adapter targets no module", hint="name some in lora.target_modules")
        places = [members(base, *place) for place in fused_groups(base)]
        parts = ("lora_A.weight", "lora_B.weight", MAGNITUDE)
        order = [f"{module}.{part}" for modules in places for part in parts for module in modules]
        self.shapes = {name: shapes[name] for name in order if name in shapes} | head
        self.head = tuple(head)  # names
        total = sum(math.prod(shape) for shape in self.shapes.values())
        sizes = ((math.prod(shape), ".lora_B." in name) for name, shape in self.shapes.items())
        self._spans = spans_of(sizes, 0, total)
        others = torch.device("meta") if spec.frozen else base.device  # where vectors take no memory
        self.weights, self.grads, self.exp_avg, self.exp_avg_sq = (
            torch.zeros(total, dtype=torch.float32, device=device) for device in (base.device, *3 * [others])
        )
        self.tokens_per_microbatch = spec.tokens_per_microbatch
        self.step = 0
        self.dropout = _dropout_generator(base.device, spec.seed)
        self.sites = self._sites(base)
        self.with_experts = layers_with_experts(self.sites)
        self.of_experts = self._of_experts(base)
        self.anchor = torch.zeros((), device=base.device, requires_grad=True)  # nothing ever flows into it
        generator = torch.Generator().manual_seed(spec.seed)
        weights = self.views(self.weights)
        for module in spec.adapter.modules:
            a = weights[f"{module}.lora_A.weight"]
            a.copy_(initial_a(spec.init, (a.shape[0], a.shape[1]), generator))
        for site in self.sites.values():
            for half in site.halves:
                if half.magnitude is not None:  # so that the slot begins as the base
                    half.magnitude.copy_(site.norms(half, 0.0))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut one of the slot's vectors by logical name, in layout order, sharing its memory."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = flat.split(sizes)
        return {
            name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def info(self, name: str) -> SlotInfo:
        size = self.weights.numel()
        vectors = 1 if self.spec.frozen else 4
        return SlotInfo(slot=name, parameters=size, tensors=len(self.shapes), bytes=vectors * size * 4)

    def set_weights(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Overwrite weights, which have the names and shapes of `shapes`."""
        views = self.views(self.weights)
        for name, array in tensors.items():
            views[name].copy_(torch.from_numpy(np.array(array, np.float32)))

    def snapshot(self) -> Adapter:
        """Return a frozen copy of the adapter."""
        frozen = self.weights.detach().to("cpu", copy=True)
        views = self.views(frozen)
        tensors = {name: view.numpy() for name, view in views.items() if name not in self.head}
        for array in tensors.values():
            array.flags.writeable = False
        return Adapter(self.spec.adapter, tensors)

    def recomputes(self, tokens: int, lent: int = 0) -> bool:
        """Return whether a micro-batch of so many tokens recomputes its activations. lent: tokens that keep
        theirs in memory of somebody else.
        """
        # fewer once there was no memory
        unrecomputed = min(self.spec.kept_tokens + lent, self.tokens_per_microbatch)
        return self.spec.activation_checkpointing and tokens > unrecomputed

    def optim_step(
        self, lr: float, max_grad_norm: float, optimizer: Optimizer | None = None
    ) -> tuple[float, bool]:
        """Make a step, for which `optimizer` may replace the settings; return the norm before clipping, and
        whether it was applied. Gradients are zero afterwards either way.
        """
        norm = l2_norm(self.grads)
        applied = bool(np.isfinite(norm))
        if applied:
            if 0 < max_grad_norm < norm:
                self.grads.mul_(max_grad_norm / norm)
            self.step += 1
            settings = optimizer or self.spec.optimizer
            moments = self.exp_avg, self.exp_avg_sq
            adamw(self.weights, self.grads, *moments, self.step, lr, settings, self._spans)
        self.grads.zero_()
        return norm, applied

    def _of_experts(self, base: Base) -> dict[tuple[int, str], list[tuple[range, Site]]]:
        """Return the sites of experts by (layer, linear): one for all of them, or where only some are trained
        or they differ, one for each.
        """
        sites: dict[tuple[int, str], list[tuple[range, Site]]] = {}
        count = base.config.experts.count if base.config.experts else 0
        for layer, linear in itertools.product(sorted(self.with_experts), ("gate_up", "down")):
            places = ((number, (layer, f"experts.{number}.{linear}")) for number in range(count))
            trained = {number: self.sites[place] for number, place in places if place in self.sites}
            inner = [*trained.values()]
            shapes = {(site.a.shape, *(half.rows.start for half in site.halves)) for site in inner}
            starts = [site.a.storage_offset() for site in inner]
            distances = {after - before for before, after in itertools.pairwise(starts)}
            if len(trained) == count and len(shapes) == 1 and len(distances) <= 1:
                sites[layer, linear] = [(range(count), _together(inner))]
            else:
                alone = ((range(number, number + 1), site) for number, site in trained.items())
                sites[layer, linear] = [(experts, _together([site])) for experts, site in alone]
        return sites

    def _sites(self, base: Base) -> dict[tuple[int, str], Site]:
        """Return views over weights and gradients, place by place."""
        weights = self.views(self.weights)
        grads = self.views(self.grads)
        adapter = self.spec.adapter
        linears = linear_shapes(base.config)
        sites = {}
        for place in fused_groups(base):
            names = members(base, *place)
            rank = adapter.rank_of(names[0])
            row = 0
            halves: list[Half] = []
            trained: list[str] = []
            for module in names:
                rows = slice(row, row + linears[module][0])
                row = rows.stop
                name = f"{module}.lora_B.weight"
                if name in weights:
                    ranks = slice(len(halves) * rank, (len(halves) + 1) * rank)
                    magnitude = f"{module}.{MAGNITUDE}"
                    both = weights.get(magnitude), grads.get(magnitude)
                    halves.append(Half(rows, ranks, weights[name], grads[name], *both))
                    trained.append(f"{module}.lora_A.weight")
            if halves:
                first = weights[trained[0]]  # the A of all halves is one block
                start = first.storage_offset()
                block = slice(start, start + len(halves) * rank * first.shape[1])
                a, a_grad = (flat[block].view(-1, first.shape[1]) for flat in (self.weights, self.grads))
                its = weight_at(base, *place) if adapter.dora else ()
                sites[place] = Site(a, a_grad, tuple(halves), adapter.scale_of(names[0]), *its)
        return sites


def _together(sites: Sequence[Site]) -> Site:
    """Return one site for all of some experts that are even; its tensors are [experts, …]."""
    first = sites[0]
    last = sites[-1]
    step = (last.a.storage_offset() - first.a.storage_offset()) // max(len(sites) - 1, 1)

    def every(tensor: Tensor) -> Tensor:
        return tensor.as_strided(
            (len(sites), *tensor.shape), (step, *tensor.stride()), tensor.storage_offset()
        )

    halves = tuple(Half(h.rows, h.ranks, every(h.b), every(h.b_grad)) for h in first.halves)
    return Site(every(first.a), every(first.a_grad), halves, first.scale)


def _dropout_generator(device: torch.device, seed: int) -> torch.Generator:
    """Make the generator that a new slot with this seed begins with."""
    generator = torch.Generator(device=device)
    digest = hashlib.sha256(f"dropout {seed}".encode()).digest()  # another seed than that of the weights
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return generator


def new_slot(base: Base, spec: SlotSpec) -> Slot:
    """Make a fresh slot, its weights from `spec.source` when there is one.

    Raises AdapterRefused when that does not fit.
    """
    slot = Slot(base, spec)
    if spec.source is not None:
        source = checkpoint.read_source(spec.source, spec.adapter, linear_shapes(base.config))
        slot.set_weights(source.tensors)
    return slot


def save_slot(slot: Slot, directory: Path, base_model: str) -> list[str]:
    """Write the slot's files into an existing directory, and return their names."""
    moments = {
        moment: {name: view.cpu().numpy() for name, view in slot.views(getattr(slot, moment)).items()}
        for moment in MOMENTS
    }
    rng = {"dropout": slot.dropout.get_state().numpy()}
    weights = slot.views(slot.weights)
    head = {name: weights[name].cpu().numpy() for name in slot.head}
    return checkpoint.write(directory, slot.snapshot(), head, moments, slot.step, rng, base_model)


def load_slot(slot: Slot, directory: Path) -> None:
    """Load a checkpoint.

    Raises IntegrityError, and changes nothing, when it is damaged or of an unlike adapter.
    """
    saved = checkpoint.read(directory, slot.spec.adapter, slot.shapes)
    seed = slot.spec.seed
    if "dropout" not in saved.rng:
        log.info("%s was written by another trainer: dropout continues with masks of its own", directory)
        seed = checkpoint.later_seed(seed, saved.step)
    generator = _dropout_generator(slot.dropout.device, seed)
    if "dropout" in saved.rng:
        try:
            generator.set_state(torch.from_numpy(saved.rng["dropout"]))
        except (RuntimeError, TypeError) as error:
            # a device takes only states of its own kind; without dropout nothing is ever drawn, so that a new
            # slot's state does
            if slot.spec.adapter.dropout:
                raise IntegrityError(
                    f"{directory / RNG}: dropout cannot continue with it: no state of a generator on "
                    f"{slot.dropout.device.type} ({error})",
                    hint="resume on the kind of device that the checkpoint was made on, or from another "
                    "checkpoint",
                ) from error
            generator = _dropout_generator(slot.dropout.device, seed)
    dropout = generator.get_state()

    slot.set_weights(saved.weights)
    for moment in MOMENTS:
        for name, view in slot.views(getattr(slot, moment)).items():
            view.copy_(torch.from_numpy(getattr(saved, moment)[name]))
    slot.step = saved.step
    slot.dropout.set_state(dropout)
    slot.grads.zero_()
