"""Finds checkpoints by their paths, `tinker://MODEL/weights/NAME` and `tinker://MODEL/sampler_weights/NAME`.

The logs of the models say which checkpoints were saved, and the door's notes how they were marked since.
"""

import re
import time
from typing import Any, NamedTuple

from lorad.tinker.door.errors import HttpError, unknown
from lorad.tinker.door.models import Models
from lorad.tinker.door.state import Marks, Model
from lorad.tinker.records import Published, Saved

WEIGHTS = "weights"
SAMPLER = "sampler_weights"
_PATH = re.compile(r"tinker://([^/]{1,200})/(weights|sampler_weights)/([A-Za-z0-9_.-]{1,128})")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


def path_of(model: str, kind: str, name: str) -> str:
    return f"tinker://{model}/{kind}/{name}"


class Checkpoint(NamedTuple):
    """A named checkpoint.

    Attributes:
        outcome: How the lane saved it.
        at: When the lane saved it, in Unix seconds.
    """

    model: Model
    kind: str
    outcome: Saved | Published
    at: float
    marks: Marks

    @property
    def path(self) -> str:
        return path_of(self.model.id, self.kind, self.outcome.name)

    @property
    def expires(self) -> float | None:
        """The Unix time at which it expires; None is never."""
        return self.outcome.expires if self.marks.expires is None else self.marks.expires or None


def name_of(path: str | None) -> str:
    """Check the name that a client gives to a checkpoint. Raises ValueError."""
    if path is None or not _NAME.fullmatch(path):
        raise ValueError(f"{path!r} is no name for a checkpoint: up to 128 letters, digits and _ . - are")
    return path


class Checkpoints:
    """Answers from the logs of the models, which it opens."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def of(self, model: Model) -> list[Checkpoint]:
        """List the checkpoints of a model that can be used, oldest first; none where its run was removed."""
        try:
            lane = await self._models.results(model)
        except HttpError:
            return []
        newest = dict[str, Checkpoint]()
        for result in lane.saved:
            if isinstance(outcome := result.outcome, Saved | Published) and outcome.name:
                kind = WEIGHTS if isinstance(outcome, Saved) else SAMPLER
                path = path_of(model.id, kind, outcome.name)
                marks = self._models.state.marks.get(path) or Marks(path, 0.0)
                if marks.gone and result.at > marks.at:  # another one of that name was saved since
                    marks = Marks(path, 0.0)
                newest[path] = Checkpoint(model, kind, outcome, result.at, marks)
        now = time.time()
        return [
            checkpoint
            for checkpoint in newest.values()
            if not checkpoint.marks.gone and (checkpoint.expires is None or checkpoint.expires > now)
        ]

    async def find(self, owner: str, path: str, *, to_change: bool = False) -> Checkpoint:
        """Find an owner's checkpoint, or a published one unless it is to change. Raises HttpError 404."""
        parsed = _PATH.fullmatch(path)
        model = self._models.state.models.get(parsed[1]) if parsed else None
        if parsed is None or model is None:
            raise unknown("checkpoint", path)
        for checkpoint in await self.of(model):
            is_readable = model.owner == owner or (checkpoint.marks.public and not to_change)
            if checkpoint.path == path and is_readable:
                return checkpoint
        raise unknown("checkpoint", path)


def listed(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint as the client's lists have it."""
    kinds = {WEIGHTS: "training", SAMPLER: "sampler"}
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.outcome.name}",
        "checkpoint_type": kinds[checkpoint.kind],
        "time": iso(checkpoint.at),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.outcome.bytes,
        "public": checkpoint.marks.public,
        "user_metadata": checkpoint.outcome.metadata or None,
        "expires_at": None if checkpoint.expires is None else iso(checkpoint.expires),
    }


def iso(at: float) -> str:
    """Write Unix seconds as a time in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
