"""Checkpoints by their paths, `tinker://MODEL/weights/NAME` and `tinker://MODEL/sampler_weights/NAME`: what
the logs of the models say that was made, with what was marked since.
"""

import re
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from lorad.tinker.door.errors import HttpError, unknown
from lorad.tinker.door.models import Models
from lorad.tinker.door.state import Marks, Model
from lorad.tinker.records import Published, Saved

WEIGHTS, SAMPLER = "weights", "sampler_weights"
_PATH = re.compile(r"tinker://([^/]{1,200})/(weights|sampler_weights)/([A-Za-z0-9_.-]{1,128})")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


def path_of(model: str, kind: str, name: str) -> str:
    return f"tinker://{model}/{kind}/{name}"


class Checkpoint(NamedTuple):
    """A named checkpoint that is there."""

    model: Model
    kind: str
    made: Saved | Published
    at: float
    marks: Marks

    @property
    def path(self) -> str:
        return path_of(self.model.id, self.kind, self.made.name)

    @property
    def expires(self) -> float | None:
        """Return the Unix time at which it goes; None is never."""
        return self.made.expires if self.marks.expires is None else self.marks.expires or None

    @property
    def is_there(self) -> bool:
        expires = self.expires
        return not self.marks.gone and (expires is None or expires > time.time())


def name_of(path: str | None) -> str:
    """Check the name that a client gives to a checkpoint. Raises ValueError."""
    if path is None or not _NAME.fullmatch(path):
        raise ValueError(f"{path!r} is no name for a checkpoint: up to 128 letters, digits and _ . - are")
    return path


class Checkpoints:
    """Answers from the logs of the models, which are opened for it."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def of(self, model: Model) -> list[Checkpoint]:
        """List those of a model, oldest first. A model whose run was removed has none."""
        try:
            lane = await self._models.results(model)
        except HttpError:
            return []
        newest = dict[tuple[str, str], Checkpoint]()
        for result in lane.made:
            if isinstance(made := result.outcome, Saved | Published) and made.name:
                one = self._checkpoint(model, made, result.at)
                newest[one.kind, made.name] = one
        return [one for one in newest.values() if one.is_there]

    async def of_owner(self, owner: str) -> AsyncIterator[Checkpoint]:
        for model in list(self._models.state.models.values()):
            if model.owner == owner:
                for one in await self.of(model):
                    yield one

    async def find(self, owner: str, path: str, *, to_change: bool = False) -> Checkpoint:
        """Find one's own or a published one. Raises HttpError 404."""
        parsed = _PATH.fullmatch(path)
        model = self._models.state.models.get(parsed[1]) if parsed else None
        if parsed is None or model is None:
            raise unknown("checkpoint", path)
        for one in await self.of(model):
            is_readable = model.owner == owner or (one.marks.public and not to_change)
            if one.path == path and is_readable:
                return one
        raise unknown("checkpoint", path)

    def _checkpoint(self, model: Model, made: Saved | Published, at: float) -> Checkpoint:
        kind = WEIGHTS if isinstance(made, Saved) else SAMPLER
        path = path_of(model.id, kind, made.name)
        marks = self._models.state.marks.get(path) or Marks(path, 0.0)
        if marks.gone and at > marks.at:  # another one of that name was made since
            marks = Marks(path, 0.0)
        return Checkpoint(model, kind, made, at, marks)


def listed(one: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint as the client's lists have it."""
    kinds = {WEIGHTS: "training", SAMPLER: "sampler"}
    return {
        "checkpoint_id": f"{one.kind}/{one.made.name}",
        "checkpoint_type": kinds[one.kind],
        "time": iso(one.at),
        "tinker_path": one.path,
        "size_bytes": one.made.bytes,
        "public": one.marks.public,
        "user_metadata": one.made.metadata or None,
        "expires_at": None if one.expires is None else iso(one.expires),
    }


def iso(at: float) -> str:
    """Write Unix seconds as a time in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
