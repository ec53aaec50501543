"""Deletes the files of checkpoints that were deleted or have expired, and of versions that were samplers of a
session that is over. What something needs yet is looked at again.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
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
    """gone: versions, as run@number, whose files were deleted since the door began."""

    def __init__(self, models: Models, checkpoints: Checkpoints) -> None:
        self.gone: set[str] = set()
        self._models, self._state, self._checkpoints = models, models.state, checkpoints

    async def look(self) -> None:
        """Look at all sessions of which something may be left."""
        for session in [one for one in self._state.sessions.values() if not one.cleaned]:
            try:
                await self._look_at(session)
            except (LoradError, OSError) as error:
                log.warning("files of session %s stay: %s", session.id, error)

    async def _look_at(self, session: Session) -> None:
        left, lanes = 0, list[tuple[Model, LaneClient]]()
        for model in self._state.of_session(session.id):
            try:
                lanes += [(model, await self._models.results(model))] if model.made else []
            except HttpError:  # its run was removed
                continue
        is_over = self._is_over(session, max((lane.used for _, lane in lanes), default=0.0))
        for model, lane in lanes:
            kept = [one.made for one in await self._checkpoints.of(model)]
            left += len(kept)
            for made in _made(lane):
                if made in kept or (isinstance(made, Published) and made.sampler and not is_over):
                    continue
                if isinstance(made, Published):
                    left += not await self._is_discarded(model, made)
                elif all(made.directory != one.directory for one in kept):
                    await asyncio.to_thread(_remove, self._models.runs.home.run(model.run).root, made)
        if is_over and not left:
            self._state.note(replace(self._state.sessions[session.id], cleaned=True))

    def _is_over(self, session: Session, used: float) -> bool:
        is_silent = session.id not in self._state.seen and time.time() - max(used, session.created) > _SILENT
        return bool(session.finished) or is_silent

    async def _is_discarded(self, model: Model, made: Published) -> bool:
        """Delete the files of a version, unless a sampler of a session that is not over has it."""
        name, runs = f"{model.run}@{made.version}", self._models.runs
        users = (one.session for one in self._state.samplers.values() if one.version == name)
        if any(user != model.session and user in self._state.seen for user in users):
            return False
        if name not in self.gone and runs.home.run(model.run).version(made.version).is_dir():
            try:
                await runs.ask(runs.client.discard, name)
            except LoradError as error:
                log.debug("%s stays: %s", name, error)
                return False
        self.gone.add(name)
        return True


def _made(lane: LaneClient) -> Iterator[Saved | Published]:
    for result in lane.made:
        if isinstance(made := result.outcome, Saved | Published):
            yield made


def _remove(run: Path, made: Saved) -> None:
    """Delete the directory of weights that have a name no more. Raises OSError."""
    directory = (run / made.directory).resolve()
    if directory.is_dir() and directory.is_relative_to((run / "tinker").resolve()):
        discard(directory)
