"""Holds the state that all requests of the door share."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from lorad.box.config import TinkerSettings
from lorad.box.models import downloaded
from lorad.box.paths import Home
from lorad.client.client import Client
from lorad.errors import LoradError
from lorad.gateway.own.resolve import Resolver
from lorad.models.directory import resolve
from lorad.models.facts import read_facts
from lorad.protocol import served
from lorad.tinker.door.checkpoints import Checkpoints
from lorad.tinker.door.cleaning import Cleaning
from lorad.tinker.door.errors import HttpError, unknown
from lorad.tinker.door.models import Models
from lorad.tinker.door.runs import Runs
from lorad.tinker.door.sampling import SampleRequests, SamplingPools
from lorad.tinker.door.state import Sampler, Session, State
from lorad.tinker.door.wire import Limits
from lorad.tinker.records import Published

log = logging.getLogger(__name__)

_HOLD = 25.0  # seconds that a poll waits; the client leaves after 45
_PERIOD = 5.0  # seconds between two looks at what is silent
_CLEANING = 300.0  # seconds between two looks at files


class ClientRequest(NamedTuple):
    """A request of an owner, with its body."""

    owner: str
    http: web.Request
    data: bytes


@dataclass
class Door:
    """The door of a home.

    Attributes:
        hold: Seconds that a poll waits.
        idempotent: Sessions by owner and idempotency key.
    """

    home: Home
    settings: TinkerSettings
    state: State
    models: Models
    samples: SampleRequests
    pools: SamplingPools
    checkpoints: Checkpoints
    cleaning: Cleaning
    hold: float = _HOLD
    idempotent: dict[tuple[str, str], str] = field(default_factory=dict)

    def session(self, owner: str, id: str) -> Session:
        """Return a session of an owner's. Raises HttpError 404, also for another owner's."""
        session = self.state.sessions.get(id)
        if session is None or session.owner != owner:
            raise unknown("session", id)
        return session

    def renew_lease(self, session: str) -> None:
        """Begin the lease of a session anew."""
        if session in self.state.sessions and not self.state.sessions[session].finished:
            self.state.heard_at[session] = time.monotonic()

    async def sampler(self, owner: str, id: str) -> Sampler:
        """Find a sampler that was made of a path or base, or of a model's weights at some time.

        Raises HttpError 404, also for another owner's.
        """
        if (sampler := self.state.samplers.get(id)) is not None and sampler.owner == owner:
            return sampler
        session, _, _ = id.partition(":")
        for model in self.state.of_session(session):
            results = (await self.models.results(model)).saved if model.owner == owner else []
            for outcome in (result.outcome for result in results):
                if isinstance(outcome, Published) and outcome.sampler == id:
                    if id not in self.state.samplers:  # two may have asked at a time
                        version = f"{model.run}@{outcome.version}"
                        self.state.note(Sampler(id, session, owner, model.base, version))
                    return self.state.samplers[id]
        raise unknown("sampler", id)

    async def limits(self, base: str) -> Limits:
        """Return what a base takes. Raises HttpError 400 for a base that is not served here."""
        directory = self.models.bases.get(base)
        if directory is None:
            names = ", ".join(self.models.bases) or "none; `tinker: bases` of lorad's config.yaml names them"
            raise HttpError(400, f"base_model {base!r} is not served here. There are: {names}")
        facts = await self.pools.bases.get(str(directory))
        return Limits(facts.vocab, min(facts.max_positions, self.settings.context))

    async def look_around(self) -> None:
        """Park silent models and forget what is old, until cancelled."""
        cleaned = time.monotonic()
        while True:
            await asyncio.sleep(_PERIOD)
            try:
                self.samples.forget_old()
                await self.models.park_silent(self.settings.park_after)
                self.state.forget_empty()
                await self.models.rest()
                if time.monotonic() - cleaned > _CLEANING:
                    await self.cleaning.look()
                    self.state.shorten()
                    cleaned = time.monotonic()
            except Exception:  # else nothing would be parked any more
                log.exception("looking around")


@contextlib.asynccontextmanager
async def opened(
    home: Home,
    root: Path,
    settings: TinkerSettings,
    *,
    table: Path | None = None,
    client: Client | None = None,
    hold: float = _HOLD,
) -> AsyncIterator[Door]:
    """Yield the door's state. Raises Conflict when another door has its directory.

    Args:
        root: The directory of the door's notes.
        table: The file that lists what the gateway serves.
    """
    state = State.open(root / "notes")
    runs = Runs(home, settings, client)
    models = Models(state, runs, await asyncio.to_thread(_bases_of, settings, home))
    pools = SamplingPools(Resolver(home, table or home.gateway / served.FILE), runs)
    checkpoints = Checkpoints(models)
    cleaning = Cleaning(models, checkpoints)
    door = Door(home, settings, state, models, SampleRequests(pools), pools, checkpoints, cleaning, hold)
    models.begin_again()
    looking = asyncio.create_task(door.look_around())
    try:
        yield door
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await door.samples.close()
        await models.close()
        runs.close()
        state.log.close()


def _bases_of(settings: TinkerSettings, home: Home) -> dict[str, Path]:
    """Return the directory of each base; a base that cannot be read is left out, and logged."""
    directories = {}
    for name, base in settings.bases.items():
        try:
            directory = resolve(str(downloaded(base, home.models) or base), any_architecture=True)
            read_facts(directory)
            directories[name] = directory
        except (LoradError, OSError) as error:
            log.error("tinker.bases of config.yaml: %s is not served: %s", name, error)
    return directories
