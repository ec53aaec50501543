"""What the door knows beside the logs of the models: sessions, models, samplers, and what became of
checkpoints. Each change is a record in `HOME/tinker/notes`, from which a door that starts knows all of it.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lorad.tinker.log import LogWriter, read


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

    rank: int = 32
    seed: int | None = None
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


class _Note(Struct, frozen=True):
    seq: int
    about: Session | Model | Sampler | Marks


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

    @classmethod
    def open(cls, directory: Path) -> "State":
        """Raises Conflict when another door has this home."""
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        state = cls(LogWriter(directory))
        for note, _ in read(directory, _Note):
            state._seq = note.seq
            state._take(note.about)
        waiting = {model.session for model in state.models.values() if not (model.parked or model.failed)}
        now, sessions = time.monotonic(), state.sessions.values()
        state.seen = {one.id: now for one in sessions if not one.finished or one.id in waiting}
        return state

    def note(self, about: Session | Model | Sampler | Marks) -> None:
        """Keep it, on disk before it returns. Raises OSError."""
        self.log.append(_Note(self._seq + 1, about))
        self._seq += 1
        self._take(about)

    def _take(self, about: Session | Model | Sampler | Marks) -> None:
        match about:
            case Session():
                self.sessions[about.id] = about
            case Model():
                self.models[about.id] = about
            case Sampler():
                self.samplers[about.id] = about
            case Marks():
                self.marks[about.path] = about

    def mark(self, path: str, **changes: Any) -> None:
        before = self.marks.get(path) or Marks(path, time.time())
        self.note(replace(before, at=time.time(), **changes))

    def of_session(self, session: str) -> list[Model]:
        return [model for model in self.models.values() if model.session == session]
