"""What the door knows beside the logs of the models: sessions, models, samplers, and marks of checkpoints.

Each change is a record in `HOME/tinker/notes`, which a door reads when it starts. Records that later ones
replace are dropped.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from lorad.tinker.log import LogWriter, read

_SEGMENT = 1 << 20  # bytes of a segment of notes
_SPARE = 4096  # notes beyond twice the current ones, before old ones are dropped
_EMPTY = 256  # sessions of each owner that are kept although they are over and had no model
Integer = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
"""A client's number that fits into a log and an array; JSON knows longer ones."""


class Session(Struct, frozen=True, tag="session"):
    """A session of a client.

    Attributes:
        finished: success, errored or interrupted; "" before its end.
        cleaned: No files of it are left.
    """

    id: str
    owner: str
    created: float
    metadata: dict[str, Any] = {}
    tags: list[str] = []
    name: str | None = None
    project: str | None = None
    finished: str = ""
    cleaned: bool = False


class RequestedLora(Struct, frozen=True):
    """The adapter that a client asks for."""

    rank: Integer = 32
    seed: Integer | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class Model(Struct, frozen=True, tag="model"):
    """A model in training: a run.

    Attributes:
        source: The path of the checkpoint that it began with; "" for none.
        directory: The checkpoint's directory, see `Create`.
        optimizer: Whether it began with the optimizer's state, see `Create`.
        made: The daemon has its run.
        failed: Why it will never have a run; "" otherwise.
        parked: The door had its run paused, and resumes it for the next request.
    """

    id: str
    session: str
    owner: str
    run: str
    base: str
    lora: RequestedLora
    created: float
    metadata: dict[str, str] = {}
    source: str = ""
    directory: str = ""
    optimizer: bool = False
    made: bool = False
    failed: str = ""
    parked: bool = False


class Sampler(Struct, frozen=True, tag="sampler"):
    """A name under which clients ask for samples.

    Attributes:
        version: The version, as run@number; "" is the base.
        path: The checkpoint that it was made from; "" for none.
        copies: How many copies other processes made of it.
    """

    id: str
    session: str
    owner: str
    base: str
    version: str = ""
    path: str = ""
    copies: int = 0


class Marks(Struct, frozen=True, tag="marks"):
    """How a checkpoint was marked since it was saved.

    Attributes:
        expires: When it expires, in Unix seconds; 0 is never, None is as it was saved.
    """

    path: str
    at: float
    public: bool = False
    gone: bool = False
    expires: float | None = None


_Subject = Session | Model | Sampler | Marks


class _Note(Struct, frozen=True):
    seq: int
    about: _Subject


@dataclass
class State:
    """Keeps what was noted. Only the event loop uses it."""

    log: LogWriter
    sessions: dict[str, Session] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    marks: dict[str, Marks] = field(default_factory=dict)
    heard_at: dict[str, float] = field(default_factory=dict)
    """When a session was heard last, by time.monotonic()."""
    _seq: int = 0
    _written: int = 0  # notes in the log

    @classmethod
    def open(cls, directory: Path) -> "State":
        """Read the notes. Raises Conflict when another door has this home."""
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        state = cls(LogWriter(directory, segment=_SEGMENT))
        for note, _ in read(directory, _Note):
            state._seq = max(state._seq, note.seq)
            state._written += 1
            state._take(note.about)
        waiting = {model.session for model in state.models.values() if not (model.parked or model.failed)}
        now = time.monotonic()
        for session in state.sessions.values():
            if not session.finished or session.id in waiting:
                state.heard_at[session.id] = now
        state.forget_empty()
        return state

    def note(self, about: _Subject) -> None:
        """Keep a change, which is on disk before this returns. Raises OSError."""
        self.log.append(_Note(self._seq + 1, about))
        self._seq += 1
        self._written += 1
        self._take(about)

    def shorten(self) -> None:
        """Drop notes that do not count any more, once they are most of the log. Raises OSError.

        A sampler goes where its session has no files left, and will not ask for it again or could not use it.
        """
        if self._written <= 2 * self._count() + _SPARE:
            return
        for sampler in list(self.samplers.values()):
            session = self.sessions.get(sampler.session)
            is_unnamed = bool(sampler.version) and not sampler.path
            if session is not None and session.cleaned and (session.finished or is_unnamed):
                del self.samplers[sampler.id]
        self._written = self._count()
        written = set[tuple[type, str]]()

        def is_current(note: _Note) -> bool:
            subjects, key = self._place(note.about)
            if subjects.get(key) != note.about or (type(note.about), key) in written:
                return False
            written.add((type(note.about), key))
            return True

        self.log.drop(self._seq + 1, _Note, is_current)

    def forget_empty(self) -> None:
        """Forget the sessions that are over and never had a model, except each owner's newest."""
        used = {model.session for model in self.models.values()} | self.heard_at.keys()
        left = Counter[str]()
        gone = set[str]()
        for session in reversed(self.sessions.values()):
            left[session.owner] += session.id not in used
            if session.id not in used and left[session.owner] > _EMPTY:
                gone.add(session.id)
        for subjects in (self.sessions, self.samplers):
            for id in [id for id in subjects if id.partition(":")[0] in gone]:
                del subjects[id]

    def _count(self) -> int:
        return len(self.sessions) + len(self.models) + len(self.samplers) + len(self.marks)

    def _take(self, about: _Subject) -> None:
        subjects, key = self._place(about)
        subjects[key] = about

    def _place(self, about: _Subject) -> tuple[dict[str, Any], str]:
        """Return the dictionary that keeps a subject, and its key there."""
        if isinstance(about, Marks):
            return self.marks, about.path
        tables: dict[type, dict[str, Any]] = {
            Session: self.sessions,
            Model: self.models,
            Sampler: self.samplers,
        }
        return tables[type(about)], about.id

    def mark(self, path: str, **changes: Any) -> None:
        before = self.marks.get(path) or Marks(path, time.time())
        self.note(replace(before, at=time.time(), **changes))

    def of_session(self, session: str) -> list[Model]:
        return [model for model in self.models.values() if model.session == session]
