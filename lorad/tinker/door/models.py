"""Keeps the models of all sessions: each is a run, which is parked when its session is silent."""

import asyncio
import hashlib
import logging
import time
from pathlib import Path

from msgspec.structs import replace

from lorad.errors import DaemonUnreachable, LoradError
from lorad.states import RunState
from lorad.tinker.door.errors import HttpError, unknown
from lorad.tinker.door.lane import LaneClient
from lorad.tinker.door.runs import Runs
from lorad.tinker.door.state import Model, State
from lorad.tinker.records import Arguments, Create, Failed, Outcome

log = logging.getLogger(__name__)

_MOST_AWAKE = 256  # lanes, which have two files open each, and look at a log up to five times a second
_IDLE = 60.0  # seconds after which a lane that nobody asks falls asleep; polls are held for less
_RETRY = 2.0  # seconds between two tries to have a run made
_SOON = 2.0  # seconds of a wait after which the daemon is asked for its reason


class Models:
    """Has the models by their ids.

    Attributes:
        bases: The directory of each base by its name.
    """

    def __init__(self, state: State, runs: Runs, bases: dict[str, Path]) -> None:
        self.state = state
        self.runs = runs
        self.bases = bases
        self._lanes: dict[str, LaneClient] = {}  # asleep or not, of each model that was asked for
        self._opening: dict[str, asyncio.Task[LaneClient]] = {}
        self._making: dict[str, asyncio.Task[None]] = {}
        self._waking: dict[str, asyncio.Task[None]] = {}

    def begin_again(self) -> None:
        """Have the runs made that an earlier door noted, and did not come to."""
        for model in list(self.state.models.values()):
            if not model.made:
                self._begin(model)

    def find(self, owner: str, id: str) -> Model:
        """Return a model of an owner's. Raises HttpError 404, also for another owner's."""
        model = self.state.models.get(id)
        if model is None or model.owner != owner:
            raise unknown("model", id)
        return model

    def create(self, model: Model) -> None:
        """Note a model, once, and have its run made in the background."""
        if model.id not in self.state.models:
            self.state.note(model)
        self._begin(self.state.models[model.id])

    async def lane(self, model: Model) -> LaneClient:
        """Open the logs of a model. Raises HttpError 404 when its run was removed, LoradError, OSError."""
        opening = self._opening.get(model.id)
        if (lane := self._lanes.get(model.id)) is not None:
            lane.touched = time.monotonic()
            if opening is None and not lane.is_asleep:
                return lane
        if not self.runs.home.run(model.run).root.is_dir():
            raise unknown("model", f"{model.id} any more, as its run {model.run} was removed; it was")
        if opening is None:
            opening = self._opening[model.id] = asyncio.create_task(self._open(model))
            opening.add_done_callback(lambda _: self._opening.pop(model.id, None))
        return await asyncio.shield(opening)

    async def results(self, model: Model) -> LaneClient:
        """Return the lane of a model for its results. It stays asleep where no more can come.

        Raises as `lane`.
        """
        lane = self._lanes.get(model.id)
        return lane if lane is not None and lane.is_asleep and not lane.waiting else await self.lane(model)

    async def _open(self, model: Model) -> LaneClient:
        await self.rest(_MOST_AWAKE - 1)
        if (lane := self._lanes.get(model.id)) is None:
            lane = LaneClient(self.runs.home.run(model.run).tinker)
            await asyncio.to_thread(lane.directory.mkdir, mode=0o700, exist_ok=True)
        await lane.wake()
        self._lanes[model.id] = lane
        return lane

    async def rest(self, most: int | None = None) -> None:
        """Let lanes sleep until `most` are awake, the longest unused first; by default all that are idle."""
        awake = [lane for id, lane in self._lanes.items() if not (lane.is_asleep or id in self._opening)]
        awake.sort(key=lambda lane: lane.touched)
        recent = time.monotonic() - _IDLE
        most = sum(lane.touched > recent for lane in awake) if most is None else most
        for lane in awake[: max(len(awake) - most, 0)]:
            await lane.sleep()

    async def submit(self, model: Model, seq: int, digest: str, arguments: Arguments) -> None:
        """Write a request to the log of a model, and wake its run.

        Raises HttpError, 429 while too many bytes of this owner wait, LoradError, OSError.
        """
        lane = await self.lane(model)
        if not lane.knows(seq):
            owned = (lane for id, lane in self._lanes.items() if self.state.models[id].owner == model.owner)
            waiting = sum(lane.bytes for lane in owned)
            most = self.runs.settings.log_bytes
            if waiting >= most:
                text = f"{waiting} bytes of your requests wait already (tinker.log_bytes: {most}); ask later"
                raise HttpError(429, text)
        await lane.submit(seq, digest, arguments)
        self._wake(model.id)

    async def result(self, model: Model, seq: int, seconds: float) -> tuple[Outcome | None, str]:
        """Wait so long for a result; without one, say why. Raises HttpError 404 for an unknown request."""
        if model.failed:
            return Failed(model.failed), ""
        if (making := self._making.get(model.id)) is not None and not making.done():
            await asyncio.wait([making], timeout=seconds)
            if not making.done():
                return None, f"run {model.run} is being checked"
            return await self.result(self.state.models[model.id], seq, 0.01)
        lane = await self.lane(model)
        if not lane.knows(seq):
            raise unknown("request", f"{model.id}:{seq}")
        soon = min(_SOON, seconds)
        if (outcome := await lane.result(seq, soon)) is not None:
            return outcome, ""
        self._wake(model.id)
        reason, is_final = await self.runs.reason(model.run)
        if is_final and (outcome := await lane.result(seq, 0.0)) is None:
            return Failed(reason), ""  # nowhere written: the lane does it if somebody resumes the run
        if outcome is None:
            outcome = await lane.result(seq, seconds - soon)
        return outcome, "" if outcome is not None else (reason or lane.reason())

    async def park_silent(self, silent: float) -> None:
        """Park the models of sessions that ended, or were silent for so many seconds.

        A model is noted as parked first, so that a later door wakes it.
        """
        now = time.monotonic()
        for session in list(self.state.sessions.values()):
            heard_at = self.state.heard_at.get(session.id)
            if heard_at is None or (not session.finished and now - heard_at < silent):
                continue
            del self.state.heard_at[session.id]
            log.info("session %s is silent: its models are parked", session.id)
            for model in self.state.of_session(session.id):
                try:
                    run = await self.runs.find(model.run)
                    newest = self.state.models[model.id]
                    if not newest.failed and run is not None and not RunState(run.state).is_over:
                        self.state.note(replace(newest, parked=True))
                        await self.runs.park(model.run)
                except (LoradError, OSError) as error:
                    log.warning("run %s is not parked: %s", model.run, error)
                    self.state.heard_at.setdefault(session.id, heard_at)  # so that it is tried again

    def _wake(self, id: str) -> None:
        """Have a run resumed that the door paused; a run that somebody else paused stays."""
        task = self._waking.get(id)
        if self.state.models[id].parked and (task is None or task.done()):
            self._waking[id] = asyncio.create_task(self._unpark(id))

    async def _unpark(self, id: str) -> None:
        while True:
            try:
                if await self.runs.unpark(self.state.models[id].run):
                    self.state.note(replace(self.state.models[id], parked=False))
                    return
            except LoradError as error:
                log.info("model %s is not resumed: %s", id, error)
            await asyncio.sleep(_SOON)

    async def close(self) -> None:
        for task in [*self._making.values(), *self._opening.values(), *self._waking.values()]:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for lane in self._lanes.values():
            await lane.sleep()

    def _begin(self, model: Model) -> None:
        making = self._making.get(model.id)
        if not model.failed and (making is None or (making.done() and making.exception() is not None)):
            self._making[model.id] = asyncio.create_task(self._make(model))

    async def _make(self, model: Model) -> None:
        while True:
            try:
                await self.runs.create(model, str(self.bases[model.base]))
                lane = await self.lane(model)
                asked = Create(model.directory, model.optimizer)
                digest = hashlib.sha256(repr(asked).encode()).hexdigest()
                await lane.submit(0, digest, asked)
                self.state.note(replace(self.state.models[model.id], made=True))
                return
            except DaemonUnreachable as error:
                log.warning("run %s waits for the daemon: %s", model.run, error)
                await asyncio.sleep(_RETRY)
            except LoradError as error:
                self.state.note(replace(model, failed=error.in_full))
                return
            except (OSError, HttpError, KeyError) as error:
                log.exception("run %s cannot be made", model.run)
                self.state.note(replace(model, failed=f"the run cannot be made: {error}"))
                return
