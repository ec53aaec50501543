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
        born: Unix time of the journal's first record. Name and `born` together identify a run: the name of a
            removed run may be used again.
        directory: Where loggers put files whose place nobody chose.
        spec: The resolved spec.
    """

    name: str
    born: float
    directory: Path
    spec: dict[str, Any] = {}


class Segment(Struct, frozen=True):
    """A part of the journal within which steps only grow. A resume from an earlier step begins another one.

    Attributes:
        number: 0 for the first.
        after: The step that the run was taken back to when the segment began; -1 is before everything.
    """

    number: int
    after: int


class Point(Struct, frozen=True):
    """The figures of one record.

    Attributes:
        step: The number of optimizer steps done.
        at: Unix time of the record.
        values: Figures by name, `train/reward` or `eval/score`. A figure that was not finite is NaN.
        texts: Samples by name, `samples/1`, as Markdown; as many as the logger takes.
    """

    step: int
    at: float
    values: dict[str, float]
    texts: dict[str, str] = {}


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
        place: The setting that says where, for `lorad log-metrics RUN PLACE`.
        whole_segments: A life begins with the first step of a segment, not with the last step that was
            written.
    """

    settings_type: ClassVar[type[Settings]] = Settings
    modules: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""
    place: ClassVar[str] = ""
    whole_segments: ClassVar[bool] = False

    def __init__(self, run: LoggedRun, settings: Any) -> None:
        """Open nothing yet. The settings are a `settings_type`."""
        self.run = run
        self.settings = settings

    @property
    def samples(self) -> int:
        """How many samples of each step it takes as text."""
        return 0

    @abstractmethod
    def begin(self, segment: Segment, after: int) -> None:
        """Open a segment, for the first time or again.

        Figures of steps later than `after` are void: they are put again, or were taken back.
        """

    @abstractmethod
    def put(self, point: Point) -> None:
        """Take the figures of a record. Steps never fall within a segment; a step may have several points."""

    @abstractmethod
    def flush(self) -> None:
        """Have all points that were put survive the end of this process: the cursor moves after it."""

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """Let go, also when `begin` failed.

        Args:
            reason: How the run ended (`completed`, `failed`), `superseded` when a later segment replaces this
                one, "" when only this life is over. Unless it is "", nothing was put since `flush`.
        """
