"""What the pool asks of the ranks: one frame is one call, the next frame back is its answer.

A call knows what it does in a rank and what its answer looks like. Paths travel as text.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from safetensors import SafetensorError

from lorad.adapters.adapter import Adapter
from lorad.errors import LoradError, from_wire
from lorad.protocol.batch import (
    Batch,
    Gradients,
    LossStats,
    Optimizer,
    PolicyLoss,
    PolicyTargets,
    Predictions,
    ValueLoss,
    ValueTargets,
)
from lorad.trainers.base import Policy, SlotInfo, SlotSpec, StepResult, TrainerCapabilities

if TYPE_CHECKING:
    from lorad.trainers.sharded.trainer import RankTrainer

T = TypeVar("T")

REFUSALS = (LoradError, ValueError, OSError, SafetensorError)
"""What a call may raise; anything else is a fault of the rank, which ends. The last two are of files."""


class Refusal(Struct, frozen=True):
    """One of REFUSALS as it travels. errno: of an OSError."""

    kind: str
    message: str
    hint: str = ""
    errno: int = 0

    @classmethod
    def of(cls, error: BaseException) -> Refusal:
        if isinstance(error, LoradError):
            return cls(type(error).__name__, error.message, error.hint)
        if isinstance(error, ValueError):
            return cls("ValueError", str(error))
        if isinstance(error, OSError) and error.errno:
            place = f": {error.filename}" if error.filename else ""
            return cls("OSError", f"{error.strerror}{place}", errno=error.errno)
        return cls("OSError", str(error))

    def error(self) -> Exception:
        if self.kind == "OSError":
            return OSError(self.errno, self.message) if self.errno else OSError(self.message)
        if self.kind == "ValueError":
            return ValueError(self.message)
        return from_wire({"kind": self.kind, "message": self.message, "hint": self.hint})


def text(path: Path) -> str:
    """Return the absolute path as text: a rank runs in another working directory."""
    return str(path.absolute())


class Meeting(Struct, frozen=True):
    """The first frame of rank 0 where ranks are on several machines: they meet at this port of it."""

    port: int


class Ready(Struct, frozen=True):
    """The next frame of rank 0: every rank is there. software: versions, by name."""

    capabilities: TrainerCapabilities
    modules: dict[str, tuple[int, int]]
    software: dict[str, str]


class Answer(Struct, Generic[T], frozen=True):
    """memory: bytes on the devices of all ranks, now and the most since the answer before; None on a CPU."""

    result: T | None = None
    refusal: Refusal | None = None
    memory: tuple[int, int] | None = None


class Call(Struct, frozen=True, tag=True):
    answer: ClassVar[Any] = Answer[None]

    def do(self, trainer: RankTrainer) -> Any:
        """Carry out the call, on every rank alike; the result of rank 0 counts."""
        raise NotImplementedError


class BaseChecksum(Call, frozen=True):
    answer = Answer[str]

    def do(self, trainer: RankTrainer) -> str:
        return trainer.base_checksum()


class Open(Call, frozen=True):
    """spec: without its source."""

    slot: str
    spec: SlotSpec
    source: str | None
    answer = Answer[SlotInfo]

    @classmethod
    def of(cls, slot: str, spec: SlotSpec, source: str | None) -> Open:
        return cls(slot, msgspec.structs.replace(spec, source=None), source)

    def do(self, trainer: RankTrainer) -> SlotInfo:
        source = None if self.source is None else Path(self.source)
        return trainer.open(self.slot, msgspec.structs.replace(self.spec, source=source))


class ForwardBackward(Call, frozen=True):
    slot: str
    batch: Batch
    targets: PolicyTargets
    loss: PolicyLoss
    normaliser: float
    answer = Answer[Gradients]

    def do(self, trainer: RankTrainer) -> Gradients:
        return trainer.forward_backward(self.slot, self.batch, self.targets, self.loss, self.normaliser)


class OptimStep(Call, frozen=True):
    slot: str
    lr: float
    max_grad_norm: float
    optimizer: Optimizer | None
    answer = Answer[StepResult]

    def do(self, trainer: RankTrainer) -> StepResult:
        return trainer.optim_step(self.slot, self.lr, self.max_grad_norm, self.optimizer)


class DiscardGrads(Call, frozen=True):
    slot: str

    def do(self, trainer: RankTrainer) -> None:
        trainer.discard_grads(self.slot)


class Predict(Call, frozen=True):
    policy: Policy
    batch: Batch
    temperature: float
    answer = Answer[Predictions]

    def do(self, trainer: RankTrainer) -> Predictions:
        return trainer.predictions(self.policy, self.batch, self.temperature)


class UnmetExperts(Call, frozen=True):
    batch: Batch
    answer = Answer[list[str] | None]

    def do(self, trainer: RankTrainer) -> list[str] | None:
        return trainer.unmet_experts(self.batch)


class Values(Call, frozen=True):
    slot: str
    batch: Batch
    answer = Answer[np.ndarray]

    def do(self, trainer: RankTrainer) -> np.ndarray:
        return trainer.values(self.slot, self.batch)


class ValueBackward(Call, frozen=True):
    slot: str
    batch: Batch
    targets: ValueTargets
    loss: ValueLoss
    normaliser: float
    answer = Answer[LossStats]

    def do(self, trainer: RankTrainer) -> LossStats:
        return trainer.value_backward(self.slot, self.batch, self.targets, self.loss, self.normaliser)


class Export(Call, frozen=True):
    slot: str
    answer = Answer[Adapter]

    def do(self, trainer: RankTrainer) -> Adapter:
        return trainer.export(self.slot)


class Save(Call, frozen=True):
    slot: str
    directory: str
    answer = Answer[list[str]]

    def do(self, trainer: RankTrainer) -> list[str]:
        return trainer.save(self.slot, Path(self.directory))


class Load(Call, frozen=True):
    slot: str
    directory: str

    def do(self, trainer: RankTrainer) -> None:
        trainer.load(self.slot, Path(self.directory))


class Offload(Call, frozen=True):
    def do(self, trainer: RankTrainer) -> None:
        trainer.offload()


class Onload(Call, frozen=True):
    def do(self, trainer: RankTrainer) -> None:
        trainer.onload()


class Close(Call, frozen=True):
    slot: str

    def do(self, trainer: RankTrainer) -> None:
        trainer.close(self.slot)


class End(Call, frozen=True):
    """Sent by rank 0 to the others when the pool has closed the connection; it has no answer."""


class Request(Struct, frozen=True):
    call: (
        BaseChecksum
        | Open
        | ForwardBackward
        | OptimStep
        | DiscardGrads
        | Predict
        | UnmetExperts
        | Values
        | ValueBackward
        | Export
        | Save
        | Load
        | Offload
        | Onload
        | Close
        | End
    )
