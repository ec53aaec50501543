"""The interface of loggers: TensorBoard, MLflow, W&B, and loggers that other packages bring.

A package brings a logger by an entry point of the group `lorad.loggers`, whose name is the logger's:

    [project.entry-points."lorad.loggers"]
    mine = "my_package:MyLogger"

The follower (`follow.py`) calls it from one thread, in this order, as often as lives and segments need:

    begin (put* flush)* close

A logger is a function of the journal: after any death the follower begins again at its cursor, and repeats
what it put since then.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from msgspec import Struct


class LoggedRun(Struct, frozen=True):
    """The run whose figures are written.

    Attributes:
        born: Unix time of the journal's first record. With the name it identifies a run: the name of a
            removed run may be used again.
        directory: The directory for files of loggers whose settings name none.
        spec: The resolved spec.
    """

    name: str
    born: float
    directory: Path
    spec: dict[str, Any] = {}


class Segment(Struct, frozen=True):
    """A part of the journal within which steps only grow. A resume from an earlier step begins another."""

    number: int  # from 0
    after: int  # the step from which it continues; -1: before everything


class Point(Struct, frozen=True):
    """The figures of one record."""

    step: int  # optimizer steps done
    at: float  # in Unix seconds
    values: dict[str, float]  # by name, `train/reward` or `eval/score`; NaN for one that was not finite
    texts: dict[str, str] = {}  # samples as Markdown, `samples/1`, as many as the logger takes


class Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys of a logger in `loggers`. A key that ends in `key_file` names a file with a secret, which only
    its owner may read; it is checked before a run starts."""


class Logger(ABC):
    """Writes the figures of one run to one place.

    Any exception but SpecError counts as a fault outside (network, disk): the logger is closed, and after a
    while a new one begins at the cursor. No run notices.

    Attributes:
        settings_type: The struct of its settings.
        modules: The modules that have to be importable.
        extra: The extra of lorad that installs these.
        place: The setting with its directory or address, for `lorad log-metrics RUN PLACE`.
        whole_segments: Whether a life begins with a segment, not with the last step that was written.
        samples: How many samples of each step it takes as text.
    """

    settings_type: ClassVar[type[Settings]] = Settings
    modules: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""
    place: ClassVar[str] = ""
    whole_segments: ClassVar[bool] = False
    samples: int = 0

    def __init__(self, run: LoggedRun, settings: Any) -> None:
        """Open nothing yet. The settings are a `settings_type`."""
        self.run = run
        self.settings = settings

    @abstractmethod
    def begin(self, segment: Segment, after: int) -> None:
        """Open a segment, maybe again. Figures after step `after` are void: they are put again or never."""

    @abstractmethod
    def put(self, point: Point) -> None:
        """Take the figures of a record. Steps never fall within a segment; a step may have several points."""

    @abstractmethod
    def flush(self) -> None:
        """Make all points survive the end of this process; the cursor moves after it."""

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """Let go, also when `begin` failed.

        Args:
            reason: How the run ended (`completed`, `failed`), `superseded` when a later segment replaces this
                one, "" when only this life is over. Unless it is "", nothing was put since `flush`.
        """


def flattened(name: str, value: Any, separator: str) -> list[tuple[str, Any]]:
    """List the values in a mapping, however deep, by their joined keys."""
    if not isinstance(value, dict):
        return [(name, value)]
    named = {f"{name}{separator}{key}".removeprefix(separator): inner for key, inner in value.items()}
    return [pair for key, inner in named.items() for pair in flattened(key, inner, separator)]
