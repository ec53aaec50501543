"""Deletes the files of checkpoints that were deleted or have expired, and of samplers whose session is over.

It looks again later at files that something still needs.
"""

import asyncio
import logging
import time
from pathlib import Path

from msgspec.structs import replace

from lorad.adapters.directory import discard
from lorad.errors import LoradError
from lorad.tinker.door.checkpoints import Checkpoints
from lorad.tinker.door.errors import HttpError
from lorad.tinker.door.lane import LaneClient
from lorad.tinker.door.models import Models
from lorad.tinker.door.state import Model, Session
from lorad.tinker.records import Published, Saved

log = logging.getLogger(__name__)

_SILENT = 86400.0  # seconds without a request after which samplers of a session that did not end go


class Cleaning:
    """Deletes what nobody can ask for any more.

    Attributes:
        deleted: Versions, as run@number, whose files were deleted since the door began.
    """

    def __init__(self, models: Models, checkpoints: Checkpoints) -> None:
        self.deleted: set[str] = set()
        self._models = models
        self._state = models.state
        self._checkpoints = checkpoints

    async def look(self) -> None:
        """Look at all sessions that may have files left."""
        for session in [session for session in self._state.sessions.values() if not session.cleaned]:
            try:
                await self._look_at(session)
            except (LoradError, OSError) as error:
                log.warning("files of session %s stay: %s", session.id, error)

    async def _look_at(self, session: Session) -> None:
        left = 0  # checkpoints that stay, and versions that could not be deleted
        lanes = list[tuple[Model, LaneClient]]()
        for model in self._state.of_session(session.id):
            try:
                lanes += [(model, await self._models.results(model))] if model.made else []
            except HttpError:  # its run was removed
                continue
        used = max((lane.used for _, lane in lanes), default=0.0)
        is_silent = (
            session.id not in self._state.heard_at and time.time() - max(used, session.created) > _SILENT
        )
        is_over = bool(session.finished) or is_silent
        for model, lane in lanes:
            named = [checkpoint.outcome for checkpoint in await self._checkpoints.of(model)]
            left += len(named)
            for result in lane.saved:
                outcome = result.outcome
                if outcome in named:
                    continue
                if isinstance(outcome, Published) and (is_over or not outcome.sampler):
                    left += not await self._is_discarded(model, outcome.version)
                if isinstance(outcome, Saved) and all(
                    outcome.directory != other.directory for other in named
                ):
                    await asyncio.to_thread(_remove, self._models.runs.home.run(model.run).root, outcome)
        if is_over and not left:
            self._state.note(replace(self._state.sessions[session.id], cleaned=True))

    async def _is_discarded(self, model: Model, version: int) -> bool:
        """Delete the files of a version, unless a sampler of a session that is not over has it."""
        name = f"{model.run}@{version}"
        runs = self._models.runs
        users = (sampler.session for sampler in self._state.samplers.values() if sampler.version == name)
        if any(user != model.session and user in self._state.heard_at for user in users):
            return False
        if name not in self.deleted and runs.home.run(model.run).version(version).is_dir():
            try:
                await runs.ask(runs.client.discard, name)
            except LoradError as error:
                log.debug("%s stays: %s", name, error)
                return False
        self.deleted.add(name)
        return True


def _remove(run: Path, weights: Saved) -> None:
    """Delete the directory of weights that no name means any more. Raises OSError."""
    directory = (run / weights.directory).resolve()
    if directory.is_dir() and directory.is_relative_to((run / "tinker").resolve()):
        discard(directory)
