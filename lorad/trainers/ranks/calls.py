"""What the pool asks of the ranks: one frame is one verb, the next frame back is its answer."""

from typing import Any, Generic, TypeVar, get_args

from msgspec import Struct
from safetensors import SafetensorError

from lorad.errors import LoradError, from_wire
from lorad.protocol.calls import ForwardBackward, OptimStep, TrainerVerb, ValueBackward, Values
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
    TrainerCapabilities,
    UnmetExperts,
)

T = TypeVar("T")

REFUSALS = (LoradError, ValueError, OSError, SafetensorError)
"""The errors that a call may raise, the last two about files. Any other is a fault, which ends the rank."""


class Refusal(Struct, frozen=True):
    """An error of REFUSALS as it travels. Only an OSError has an `errno`."""

    kind: str
    message: str
    hint: str = ""
    errno: int = 0

    @classmethod
    def of(cls, error: BaseException) -> "Refusal":
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


class Meeting(Struct, frozen=True):
    """The first frame of rank 0 where ranks are on several machines, which meet at this port of its own."""

    port: int


class RanksReady(Struct, frozen=True):
    """The next frame of rank 0, once every rank is there, with the versions of its software by name."""

    capabilities: TrainerCapabilities
    modules: dict[str, tuple[int, int]]
    software: dict[str, str]


class Answer(Struct, Generic[T], frozen=True):
    """What the ranks answer a verb with."""

    result: T | None = None
    refusal: Refusal | None = None
    memory: tuple[int, int] | None = None  # bytes on all GPUs, now and the most since the answer before


class End(TrainerVerb[None], frozen=True):
    """Sent by rank 0 to the others when the pool has closed the connection; it has no answer."""


class Request(Struct, frozen=True):
    verb: (
        BaseChecksum
        | OpenSlot
        | ForwardBackward
        | OptimStep
        | DiscardGrads
        | Predict
        | UnmetExperts
        | Values
        | ValueBackward
        | ExportSlot
        | SaveSlot
        | LoadSlot
        | Offload
        | Onload
        | CloseSlot
        | End
    )


def answer_to(verb: TrainerVerb[T]) -> type[Answer[T]]:
    """Return the type of the ranks' answer to a verb."""
    generic: Any = Answer
    (base,) = type(verb).__orig_bases__  # type: ignore[attr-defined]
    answer: type[Answer[T]] = generic[get_args(base)[0]]
    return answer
