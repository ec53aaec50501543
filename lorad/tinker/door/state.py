"""What the door knows beside the logs of the models: sessions, models, samplers, and what became of
checkpoints. Each change is a record in `HOME/tinker/notes`, from which a door that starts knows all of it;
records that later ones have replaced are dropped from it.
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
_SPARE = 4096  # notes that are more than twice those that count, before others are dropped
_EMPTY = 256  # sessions without a model that are not alive any more and are kept, of each owner
Integer = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
"""A number of a client's, which fits into a log and an array. JSON knows longer ones."""


class Session(Struct, frozen=True, tag="session"):
    """finished: success, errored or interrupted; "" while it is not. cleaned: no files of it are left."""

    id: str
    owner: str
    created: float
    metadata: dict[str, Any] = {}
    tags: list[str] = []
    name: str | None = None
    project: str | None = None
    finished: str = ""
    cleaned: bool = False


class Lora(Struct, frozen=True):
    """The adapter that a client asks for."""

    rank: Integer = 32
    seed: Integer | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class Model(Struct, frozen=True, tag="model"):
    """A model in training: a run.

    source: the checkpoint path that it began with; "" for none. directory, optimizer: see `Create`.
    made: the daemon has its run. failed: why there is none, for ever.
    parked: the door had its run paused, and resumes it for the next request.
    """

    id: str
    session: str
    owner: str
    run: str
    base: str
    lora: Lora
    created: float
    metadata: dict[str, str] = {}
    source: str = ""
    directory: str = ""
    optimizer: bool = False
    made: bool = False
    failed: str = ""
    parked: bool = False


class Sampler(Struct, frozen=True, tag="sampler"):
    """A name under which samples are asked for.

    version: run@number; "" is the base. path: the checkpoint that it was made from; "" for none.
    copies: how many were made of it in other processes.
    """

    id: str
    session: str
    owner: str
    base: str
    version: str = ""
    path: str = ""
    copies: int = 0


class Marks(Struct, frozen=True, tag="marks"):
    """What became of a checkpoint since it was made. expires: Unix time; 0 is never, None as it was made."""

    path: str
    at: float
    public: bool = False
    gone: bool = False
    expires: float | None = None


_Known = Session | Model | Sampler | Marks


class _Note(Struct, frozen=True):
    seq: int
    about: _Known


@dataclass
class State:
    """Keeps what was noted. All use belongs to the event loop."""

    log: LogWriter
    sessions: dict[str, Session] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    marks: dict[str, Marks] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    """When a session was heard last, by time.monotonic()."""
    _seq: int = 0
    _written: int = 0  # notes in the log

    @classmethod
    def open(cls, directory: Path) -> "State":
        """Raises Conflict when another door has this home."""
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        state = cls(LogWriter(directory, segment=_SEGMENT))
        for note, _ in read(directory, _Note):
            state._seq, state._written = max(state._seq, note.seq), state._written + 1
            state._take(note.about)
        waiting = {model.session for model in state.models.values() if not (model.parked or model.failed)}
        now, sessions = time.monotonic(), state.sessions.values()
        state.seen = {one.id: now for one in sessions if not one.finished or one.id in waiting}
        state.forget_empty()
        return state

    def note(self, about: _Known) -> None:
        """Keep it, on disk before it returns. Raises OSError."""
        self.log.append(_Note(self._seq + 1, about))
        self._seq, self._written = self._seq + 1, self._written + 1
        self._take(about)

    def shorten(self) -> None:
        """Drop notes that do not count any more, once they are most of the log. Raises OSError."""
        if self._written <= 2 * self._count() + _SPARE:
            return
        for sampler in list(self.samplers.values()):
            if self._is_over(sampler):
                del self.samplers[sampler.id]
        self._written, kept = self._count(), set[tuple[type, str]]()

        def is_current(note: _Note) -> bool:
            known, key = self._place(note.about)
            if known.get(key) != note.about or (type(note.about), key) in kept:
                return False
            kept.add((type(note.about), key))
            return True

        self.log.drop(self._seq + 1, _Note, is_current)

    def forget_empty(self) -> None:
        """Forget of each owner all but the newest sessions that are not alive and never had a model."""
        used = {model.session for model in self.models.values()} | self.seen.keys()
        left, gone = Counter[str](), set[str]()
        for session in reversed(self.sessions.values()):
            left[session.owner] += session.id not in used
            if session.id not in used and left[session.owner] > _EMPTY:
                gone.add(session.id)
        for known in (self.sessions, self.samplers):
            for id in [id for id in known if id.partition(":")[0] in gone]:
                del known[id]

    def _is_over(self, sampler: Sampler) -> bool:
        """Return whether its session has no files left, and will not ask for it again, or for nothing that is
        there.
        """
        session = self.sessions.get(sampler.session)
        is_made = bool(sampler.version) and not sampler.path
        return session is not None and session.cleaned and (bool(session.finished) or is_made)

    def _count(self) -> int:
        return len(self.sessions) + len(self.models) + len(self.samplers) + len(self.marks)

    def _take(self, about: _Known) -> None:
        known, key = self._place(about)
        known[key] = about

    def _place(self, about: _Known) -> tuple[dict[str, Any], str]:
        """Return where it is kept, and under which key."""
        match about:
            case Session():
                return self.sessions, about.id
            case Model():
                return self.models, about.id
            case Sampler():
                return self.samplers, about.id
            case Marks():
                return self.marks, about.path

    def mark(self, path: str, **changes: Any) -> None:
        before = self.marks.get(path) or Marks(path, time.time())
        self.note(replace(before, at=time.time(), **changes))

    def of_session(self, session: str) -> list[Model]:
        return [model for model in self.models.values() if model.session == session]
