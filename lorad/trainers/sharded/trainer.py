"""What one rank does for each verb of the trainer protocol; all ranks do the same, in the same order.

Contracts are stated in `trainers/base.py`. The pool has checked the arguments (`check_verb`). Ranks refuse
the same, before anything collective; where they may disagree (files), they ask each other first.
"""

import hashlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lorad.adapters.adapter import MAGNITUDE, Adapter
from lorad.adapters.targets import MEGATRON
from lorad.adapters.validate import expected_shapes
from lorad.errors import AdapterRefused, Conflict, IntegrityError, LoradError
from lorad.limits.check import refuse, refuse_adapter
from lorad.protocol.batch import (
    LOSSES,
    OF_PAIRS,
    VALUE_LOSS,
    Batch,
    Gradients,
    LossStats,
    Predictions,
)
from lorad.protocol.calls import ForwardBackward, OptimStep, StepResult, TrainerVerb, ValueBackward, Values
from lorad.protocol.heartbeat import HEART
from lorad.rl.value_loss import value_losses, value_stats
from lorad.trainers import checkpoint
from lorad.trainers.base import (
    BaseChecksum,
    CloseSlot,
    DiscardGrads,
    ExportSlot,
    LoadSlot,
    Offload,
    Onload,
    OpenSlot,
    Predict,
    SaveSlot,
    SlotInfo,
    SlotSpec,
    TrainerCapabilities,
    UnmetExperts,
)
from lorad.trainers.checkpoint import MOMENTS
from lorad.trainers.device_memory import give_back
from lorad.trainers.sharded.body import Body, Mounted, MountKey
from lorad.trainers.sharded.losses import Losses, over_ranks
from lorad.trainers.sharded.rows import Rows, Sample, cut, pack, plan, sequences, share
from lorad.trainers.sharded.slot import HOST, ParameterSection, ShardedSlot
from lorad.trainers.sharded.workers import Calls
from lorad.trainers.slot_math import initial_a
from lorad.trainers.slots import Slots

T = TypeVar("T")
_TOKENS_PER_MICROBATCH = 16384  # for log-probabilities of the base, which belong to no slot
_REPLAYED = ("replayed", "rerouted", "unrouted")  # what `Body.replayed` returns, as fields of LossStats


class RankTrainer:
    """The trainer's part on one rank. One slot at a time is in the model; the others lie in host memory.

    model: The base's name in configurations of adapters.
    """

    def __init__(self, body: Body, calls: Calls, model: str) -> None:
        self._body = body
        self._calls = calls
        self._model = model
        self.slots = Slots[ShardedSlot]()
        self._key: MountKey | None = None
        self._mounted: Mounted | None = None
        self._present: ShardedSlot | None = None

    def capabilities(self) -> TrainerCapabilities:
        return TrainerCapabilities(
            dtype=str(self._body.dtype).removeprefix("torch."),
            max_tokens=self._body.max_tokens,
            vocab=self._body.vocab,
            deterministic=self._body.device.type == "cpu",
            offload=True,
            parameters=self._body.parameter_count,
            losses=tuple(
                term for term in LOSSES if term != OF_PAIRS and (term != VALUE_LOSS or self._body.has_states)
            ),
            routes=self._body.routes,
        )

    def modules(self) -> dict[str, tuple[int, int]]:
        return dict(self._body.shapes)

    def do(self, verb: TrainerVerb[T]) -> T:
        """Do a verb, as every rank does at the same time; the answer of rank 0 counts."""
        method: Callable[[TrainerVerb[T]], T] = getattr(self, str(verb.__struct_config__.tag))
        return method(verb)

    def base_checksum(self, _: BaseChecksum) -> str:
        return hashlib.sha256(" ".join(self._calls.texts(self._body.checksum())).encode()).hexdigest()

    def memory(self) -> tuple[int, int] | None:
        """Return the bytes on all GPUs, now and the most since the last call; None on a CPU. Collective."""
        if self._body.device.type != "cuda":
            return None
        mine = [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
        torch.cuda.reset_peak_memory_stats()
        total = torch.tensor(mine, dtype=torch.int64)
        dist.all_reduce(total, group=self._calls.group)
        return int(total[0]), int(total[1])

    def open(self, verb: OpenSlot) -> SlotInfo:
        spec = verb.spec
        if verb.slot in self.slots:
            raise Conflict(f"slot {verb.slot} is open already", hint="Close it first, or take another name.")
        refuse(msgspec.structs.replace(self._body.setup, has_critic=spec.critic))
        refuse_adapter(self._body.setup, spec.adapter, spec.lora_type)
        shapes = expected_shapes(spec.adapter, self._body.shapes)
        if not shapes:
            raise AdapterRefused("the adapter targets no module", hint="name some in lora.target_modules")
        source = spec.source
        start = self._together(
            lambda: (
                _initial(spec, shapes, fuses=self._body.fuses)
                if source is None
                else dict(checkpoint.read_source(source, spec.adapter, self._body.shapes).tensors)
            )
        )
        if spec.adapter.dora and source is None:  # so that it begins as the base
            norms = self._body.row_norms(spec.adapter.modules)
            start |= {f"{module}.{MAGNITUDE}": array for module, array in norms.items()}
        mounted = self._mount(MountKey(spec.adapter, spec.lora_type))
        head = [torch.Size(shape) for shape in self._head(spec).values()]
        body = self._body
        own = [p.shape for p in mounted.parameters]
        are_b = mounted.are_b
        first = len(own) - mounted.of_experts
        experts = ParameterSection(own[first:], body.expert_dp, times=body.expert_times, are_b=are_b[first:])
        sections = [ParameterSection(own[:first], body.dp, are_b=are_b[:first]), experts]
        slot = ShardedSlot(spec, body.dp, sections, head, leads=body.leads)
        slot.fill(slot.weights, [*mounted.scatter(start), *(torch.zeros(shape) for shape in head)])
        self.slots[verb.slot] = slot
        size = sum(map(math.prod, shapes.values())) + sum(p.numel() for p in slot.head)
        vectors = 1 if spec.frozen else 4
        return SlotInfo(verb.slot, size, tensors=len(shapes) + len(head), bytes=vectors * size * 4)

    def forward_backward(self, work: ForwardBackward) -> Gradients:
        slot = self.slots.policy(work.slot)
        mounted = self._put_in(slot)
        halved_to = 0
        losses = None
        if self._body.may_forget:
            before = slot.grads.clone()
            try:
                losses = self._losses(slot, mounted, work)
            except torch.OutOfMemoryError as error:
                print(f"micro-batches are halved: {error}", file=sys.stderr, flush=True)
            # where any rank found no memory, all begin again
            if not self._calls.all_agree(losses is not None):
                losses = None
                self._body.forget()
                slot.grads.copy_(before)
                slot.bind(mounted.parameters)
                halved_to = slot.tokens_per_microbatch = max(1, slot.tokens_per_microbatch // 2)
                give_back(self._body.device)
            del before
        if losses is None:
            losses = self._losses(slot, mounted, work)
        slot.draws += 1
        stats = over_ranks(losses.stats, self._body.dp, self._body.device)
        if losses.logprobs is None:
            return Gradients.of(stats, halved_to=halved_to)
        return Gradients.of(stats, self._body.dp.add_up(losses.logprobs).cpu().numpy(), halved_to)

    def _losses(self, slot: ShardedSlot, mounted: Mounted, work: ForwardBackward) -> Losses:
        """Add the gradients of this rank's micro-batches to the slot's."""
        losses = Losses(work, self._body.device)
        for number, row in enumerate(self._rows(work.batch, slot.tokens_per_microbatch)):
            if slot.spec.adapter.dropout:
                slot.draw(number)
            collect = partial(slot.collect, mounted.parameters)
            recompute = slot.spec.activation_checkpointing
            self._body.backward(row, losses.of(row, collect), recompute=recompute)
            losses.stats += LossStats(**dict(zip(_REPLAYED, self._body.replayed(), strict=True)))
            collect()
        return losses

    def values(self, verb: Values) -> np.ndarray:
        slot = self.slots.critic(verb.slot)
        self._put_in(slot)

        def of_row(row: Rows) -> Tensor:
            states = self._body.states(row, adapter=True, train=False, recompute=False)
            return slot.values(states)[None]

        (values,) = self._per_token(verb.batch, slot.tokens_per_microbatch, of_row, 1)
        return np.asarray(values)

    def value_backward(self, work: ValueBackward) -> LossStats:
        slot = self.slots.critic(work.slot, trained=True)
        mounted = self._put_in(slot)
        stats = LossStats()
        for number, row in enumerate(self._rows(work.batch, slot.tokens_per_microbatch)):
            if slot.spec.adapter.dropout:
                slot.draw(number)
            recompute = slot.spec.activation_checkpointing
            states = self._body.states(row, adapter=True, train=True, recompute=recompute)
            losses, clipped = value_losses(slot.values(states), work.targets, row.places, work.loss)
            (losses.sum() / work.normaliser).backward()  # of no tokens too: other ranks wait for this one
            stats += value_stats(losses, clipped, work.normaliser)
            slot.collect(mounted.parameters)
        slot.draws += 1
        return over_ranks(stats, self._body.dp, self._body.device)

    def optim_step(self, verb: OptimStep) -> StepResult:
        slot = self.slots.trained(verb.slot)
        mounted = self._put_in(slot)
        norm, applied = slot.optim_step(verb.lr, verb.max_grad_norm, verb.optimizer)
        slot.bind(mounted.parameters)
        return StepResult(grad_norm=norm, applied=applied)

    def discard_grads(self, verb: DiscardGrads) -> None:
        self.slots.trained(verb.slot).grads.zero_()

    def predictions(self, verb: Predict) -> Predictions:
        policy = verb.policy
        slot = None if policy.slot is None else self.slots[policy.slot]

        def of_row(row: Rows) -> Tensor:
            likely = self._body.likely(row, verb.temperature, adapter=slot is not None)
            return torch.stack([likely.logprobs, likely.correct.float()])

        budget = slot.tokens_per_microbatch if slot else _TOKENS_PER_MICROBATCH
        with self._amplified(slot, policy.amplify) if slot else nullcontext():
            logprobs, correct = self._per_token(verb.batch, budget, of_row, 2)
        return Predictions(logprobs, correct > 0)

    def _per_token(self, batch: Batch, budget: int, of: Callable[[Rows], Tensor], count: int) -> np.ndarray:
        """Return float32 [count, M] of the whole batch; `of` makes [count, m] of a row's targets."""
        numbers = torch.zeros(count, batch.targets.size, dtype=torch.float32, device=self._body.device)
        with torch.no_grad():
            for row in self._rows(batch, budget):
                numbers[:, torch.from_numpy(row.places).to(numbers.device)] = of(row)
        result: np.ndarray = self._body.dp.add_up(numbers).cpu().numpy()
        return result

    def unmet_experts(self, verb: UnmetExperts) -> list[str] | None:
        names = self._body.experts
        if not names:
            return None if names is None else []
        met = torch.zeros(len(names), device=self._body.device)
        for row in self._rows(verb.batch, _TOKENS_PER_MICROBATCH):
            met += self._body.met(row)
        seen = self._body.dp.add_up(met).tolist()
        return [name for name, count in zip(names, seen, strict=True) if not count]

    @contextmanager
    def _amplified(self, slot: ShardedSlot, times: float) -> Iterator[None]:
        """Put the slot into the model, its B scaled inside the block and exactly as before afterwards."""
        mounted = self._put_in(slot)
        if times == 1:
            yield
            return
        before = slot.weights.clone()
        try:
            for view, is_b in zip(slot.views(slot.weights), mounted.are_b, strict=False):
                if is_b:
                    view.mul_(times)
            slot.bind(mounted.parameters)
            yield
        finally:
            slot.weights.copy_(before)
            slot.bind(mounted.parameters)

    def export(self, verb: ExportSlot) -> Adapter:
        return self._adapter(self.slots[verb.slot])

    def save(self, verb: SaveSlot) -> list[str]:
        slot = self.slots.trained(verb.slot)
        adapter = self._adapter(slot)
        mounted = self._put_in(slot)
        moments = {name: self._gathered(slot, mounted, slot.whole(getattr(slot, name))) for name in MOMENTS}
        if dist.get_rank():
            return []
        head = _arrays(dict(zip(self._head(slot.spec), slot.head, strict=True)))
        return checkpoint.write(verb.directory, adapter, head, moments, slot.step, slot.rng(), self._model)

    def load(self, verb: LoadSlot) -> None:
        slot = self.slots.trained(verb.slot)
        head = self._head(slot.spec)
        shapes = {**expected_shapes(slot.spec.adapter, self._body.shapes), **head}
        saved = self._together(lambda: checkpoint.read(verb.directory, slot.spec.adapter, shapes))
        mounted = self._put_in(slot)
        try:
            parts = {
                name: [
                    *mounted.scatter({key: array for key, array in tensors.items() if key not in head}),
                    *(torch.from_numpy(tensors[key]) for key in head),
                ]
                for name, tensors in ((name, getattr(saved, name)) for name in ("weights", *MOMENTS))
            }
        except AdapterRefused as error:
            raise IntegrityError(f"{verb.directory}: {error.message}", hint=error.hint) from error
        for name, part in parts.items():
            slot.fill(getattr(slot, name), part)
        slot.grads.zero_()
        slot.step = saved.step
        slot.set_rng(saved)
        slot.bind(mounted.parameters)

    def offload(self, _: Offload) -> None:
        self._put_away()
        self._body.offload()
        give_back(self._body.device)

    def onload(self, _: Onload) -> None:
        self._body.onload()

    def close(self, verb: CloseSlot) -> None:
        if self.slots.close(verb.slot) is self._present:
            self._put_away()

    def _head(self, spec: SlotSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a critic's head by logical name; of a policy, none."""
        return checkpoint.head_shapes(self._body.hidden) if spec.critic else {}

    def _mount(self, key: MountKey) -> Mounted:
        """Return modules for adapters of this kind, which hold no slot's weights."""
        self._put_away()
        if self._mounted is None or key != self._key:
            self._mounted = None
            self._mounted = self._body.mount(key)
            self._key = key
        return self._mounted

    def _put_in(self, slot: ShardedSlot) -> Mounted:
        """Put the slot into the model, on the device."""
        if self._present is slot and self._mounted is not None:
            return self._mounted
        mounted = self._mount(MountKey(slot.spec.adapter, slot.spec.lora_type))
        slot.move(self._body.device)
        slot.bind(mounted.parameters)
        self._present = slot
        return mounted

    def _put_away(self) -> None:
        """Take the slot out of the model, into host memory."""
        if self._present is not None and self._mounted is not None and self._present.device != HOST:
            self._present.let_go(self._mounted.parameters)
            self._present.move(HOST)
        self._present = None

    def _rows(self, batch: Batch, budget: int) -> Iterator[Rows]:
        """Yield this rank's micro-batches, or parts of them; as many as other ranks where these wait."""
        body = self._body
        parts = self._body.cp.size
        mine = share(sequences(batch), body.dp.rank // parts, body.dp.size // parts)
        rows: list[list[Sample]] = list(plan(mine, budget, packs=body.packs))
        if body.lockstep:
            rows += [[]] * (body.dp.most(len(rows), body.device) - len(rows))
        for packed in [pack(row, body.device) for row in rows]:
            yield packed if parts == 1 else cut(packed, body.cp)
            HEART.progress()

    def _adapter(self, slot: ShardedSlot) -> Adapter:
        mounted = self._put_in(slot)
        tensors = self._gathered(slot, mounted, [view.detach() for view in slot.views(slot.weights)])
        head = self._head(slot.spec)
        return Adapter(slot.spec.adapter, {name: tensors[name] for name in tensors if name not in head})

    def _gathered(self, slot: ShardedSlot, mounted: Mounted, parts: list[Tensor]) -> dict[str, np.ndarray]:
        """Return a slot's `parts` as whole arrays by logical name, a critic's head last. Collective."""
        body = len(mounted.parameters)
        head = dict(zip(self._head(slot.spec), parts[body:], strict=True))
        return {**_arrays(mounted.gather(parts[:body])), **_arrays(head)}

    def _together(self, read: Callable[[], T]) -> T:
        """Return what `read` returns; a refusal on one rank is raised on all. Collective."""
        failure: LoradError | OSError | None = None
        try:
            result = read()
        except (LoradError, OSError) as error:
            failure = error
        if self._calls.all_agree(failure is None):
            return result
        raise failure or IntegrityError("another rank refused it", hint="See the log of the trainer.")


def _initial(spec: SlotSpec, shapes: dict[str, tuple[int, ...]], *, fuses: bool) -> dict[str, np.ndarray]:
    """Make the weights that builtin begins with for this seed; linears that share an A take the first's."""
    generator = torch.Generator().manual_seed(spec.seed)
    weights = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for module in spec.adapter.modules:
        name = f"{module}.lora_A.weight"
        weights[name] = initial_a(spec.init, (shapes[name][0], shapes[name][1]), generator).numpy()
    if spec.lora_type == "lora" and fuses:
        for first, *others in (MEGATRON["linear_qkv"], MEGATRON["linear_fc1"]):
            for module in spec.adapter.modules:
                path, _, leaf = module.rpartition(".")
                if leaf in others and f"{path}.{first}.lora_A.weight" in weights:
                    weights[f"{module}.lora_A.weight"] = weights[f"{path}.{first}.lora_A.weight"]
    return weights


def _arrays(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Return frozen copies, in the order of their names."""
    arrays = {
        name: np.array(tensors[name].detach().cpu().numpy(), np.float32, order="C")
        for name in sorted(tensors)
    }
    for array in arrays.values():
        array.flags.writeable = False
    return arrays
