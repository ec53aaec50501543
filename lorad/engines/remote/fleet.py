"""The servers of an engine live and sleep together; each prompt goes where its keys and values are."""

import asyncio
import contextlib
import hashlib
import logging
import math
import shutil
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lorad.children.host import Host, check_weights
from lorad.children.process import sweep
from lorad.engines.remote.dialect import Abilities, Dialect, ServerSettings
from lorad.engines.remote.http import Address, ServerGone, ServerRefused, ServerSilent
from lorad.engines.remote.server import Server
from lorad.engines.remote.settings import addresses
from lorad.engines.remote.starts import Directories, Starts
from lorad.errors import AdapterRefused, AttestationFailed, EngineGone, LoradError, PoolLost
from lorad.models.facts import weights_sha256
from lorad.protocol.pool_setup import ServerSetup

log = logging.getLogger(__name__)

_DEATHS = 5  # a server that died so often within `_DEATH_SECONDS` is not started again
_DEATH_SECONDS = 1800.0
_BACK_OFF = (0.0, 1.0, 5.0, 20.0, 60.0)  # seconds before each of these starts
_REFUSED = "Nothing was changed; the version before serves. The log of the engine may say more."
_SILENT = (
    "The version before serves. Is the machine overloaded, or the disk of the adapters slow? Then "
    "resume the run."
)
_DIED = "The server is started again; its log may say why it died. Then resume the run."
_LOGPROBS = "Start it with the --logprobs-mode that the preflight asks for, or let lorad start it."
_NO_LORA = "Start it with LoRA enabled, or let lorad start it (leave rollout.url out)."
_LOOK_SECONDS = 1.0  # between two looks whether a lost node is still waited for
SURPLUS = 1.25  # times the average load


class _Restore(Protocol):
    """Bring a started server to hold what it must hold, and make it `up`."""

    async def __call__(self, server: Server, *, first: bool) -> None: ...


class Fleet:
    """The servers of one engine, see `RemoteEngine.open` for `setup` and `hosts`."""

    def __init__(
        self,
        dialect: Dialect,
        settings: ServerSettings,
        setup: ServerSetup,
        places: Directories,
        hosts: Sequence[Host] = (),
    ) -> None:
        self.dialect = dialect
        self.settings = settings
        self.is_attached = bool(setup.urls)
        self.patience = 0.0  # seconds for another node to take the place of the last one
        self._lost_at: dict[int, float] = {}  # by server, whose node was lost
        self.asleep = False
        self._is_closing = False
        self._starts = Starts(dialect, settings, setup, places, () if setup.urls else hosts)
        self._tunnels: dict[int, AsyncExitStack] = {}
        self._news = asyncio.Event()
        self.takes_calls = asyncio.Event()  # new ones wait for it
        self._awake = asyncio.Event()  # servers may be started
        self._keepers: set[asyncio.Task[None]] = set()
        starts = self._starts
        own = [Address(socket=starts.socket(index)) for index in range(setup.servers)]
        self.servers = [
            Server(
                *(index, dialect, settings, address),
                launch=None if setup.urls else partial(starts.child, index),
                changed=self._changed,
                host=starts.host(index),
            )
            for index, address in enumerate(addresses(setup) if setup.urls else own)
        ]

    async def open(self, restore: _Restore) -> None:
        """Return when every server serves. Raises what keeps one from it."""
        self._restore = restore
        if hosts := self.hosts:
            model = self.settings.model
            await check_weights(hosts, model, await asyncio.to_thread(weights_sha256, model))
        for server in self.servers:
            await asyncio.to_thread(sweep, self._starts.record(server.index))
        shutil.rmtree(self._starts.private, ignore_errors=True)
        self._starts.private.mkdir(mode=0o700)
        for server in self.servers:
            await self._lead_to(server)
        self.takes_calls.set()
        self._awake.set()
        await asyncio.gather(*(self._bring_up(server, first=True) for server in self.servers))
        for server in self.servers:
            self._keepers.add(asyncio.create_task(self._keep(server)))

    async def close(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(server.close() for server in self.servers))
        for tunnel in self._tunnels.values():
            await tunnel.aclose()
        shutil.rmtree(self._starts.private, ignore_errors=True)

    @property
    def hosts(self) -> list[Host]:
        """List the nodes of servers that may serve again."""
        hosts = [server.host for server in self.servers if server.host is not None]
        return list({id(host): host for host in hosts if not host.lost.done()}.values())

    def replace(self, lost: Host, host: Host) -> None:
        """Start the servers of a node that was lost on another one; returns before they serve."""
        for server in self.servers:
            if server.host is lost:
                self._spawn(self._moved(server, host))

    async def _lead_to(self, server: Server) -> None:
        """Have a tunnel to a server that is on a node."""
        if server.host is None:
            return
        if (earlier := self._tunnels.pop(server.index, None)) is not None:
            await earlier.aclose()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._starts.tunnel(server.index, server.host))
            self._tunnels[server.index] = stack.pop_all()

    @property
    def serving(self) -> list[Server]:
        return [server for server in self.servers if server.state == "up"]

    @property
    def abilities(self) -> Abilities:
        """Say what all servers can do; a server that has never been ready can do nothing."""
        each = [
            server.abilities or Abilities("", self.settings.context_length, False, False)
            for server in self.servers
        ]
        return Abilities(
            version=", ".join(sorted({its.version for its in each if its.version})),
            max_tokens=min([self.settings.context_length, *(its.max_tokens for its in each)]),
            lora=all(its.lora for its in each),
            sleep=all(its.sleep for its in each),
            formats=all(its.formats for its in each),
        )

    async def wait_for_servers(self) -> list[Server]:
        """Return the serving servers; wait while there are none. Raises the reason when none ever will."""
        while not self.serving:
            if self._is_closing:
                raise PoolLost(
                    "the engine is being closed", hint="Resume the run; the daemon starts another pool."
                )
            if self.is_over:
                raise self.servers[0].error or PoolLost("the engine is closed", hint="Resume the run.")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS if self._lost_at else None):
                    await self._news.wait()
        return self.serving

    @property
    def is_over(self) -> bool:
        """Check whether no server will ever serve again."""
        since = time.monotonic() - self.patience
        return all(
            server.state in ("failed", "closed") and self._lost_at.get(server.index, -math.inf) <= since
            for server in self.servers
        )

    def stop_waiting(self) -> None:
        """Make everybody who waits for a server to return give up, because the engine is being closed."""
        self._is_closing = True
        self._changed()

    async def pick(self, prompt: np.ndarray) -> Server:
        serving = {server.index: server for server in await self.wait_for_servers()}
        return serving[pick(prompt, [(index, server.in_flight) for index, server in serving.items()])]

    async def load(self, name: str, directory: Path) -> None:
        """Load an adapter on every serving server; one that dies meanwhile loads it when it comes back.

        Raises AdapterRefused, upon which the caller unloads it everywhere.
        """
        servers = self.serving
        outcomes = await asyncio.gather(*(s.load(name, directory) for s in servers), return_exceptions=True)
        for place, (server, outcome) in enumerate(zip(servers, outcomes, strict=True)):
            if isinstance(outcome, ServerRefused):
                outcomes[place] = outcome = await server.judge(outcome, None)
            if isinstance(outcome, ServerGone):
                server.lose()
            if isinstance(outcome, ServerRefused):
                raise AdapterRefused(
                    f"{server} does not load {name}: {outcome.text}", hint=_REFUSED
                ) from outcome
            if isinstance(outcome, ServerSilent):
                self._spawn(server.forget(name))
                raise PoolLost(f"{name} was not loaded: {outcome}", hint=_SILENT) from outcome
            if isinstance(outcome, BaseException) and not isinstance(outcome, ServerGone):
                raise outcome
        if all(isinstance(outcome, ServerGone) for outcome in outcomes):
            raise EngineGone(f"{name} was not loaded: {outcomes[0]}", hint=_DIED)

    async def unload(self, name: str) -> None:
        """Unload an adapter from every server that may hold it; one that does not answer is asked again."""
        servers = self.serving
        outcomes = await asyncio.gather(*(s.unload(name) for s in servers), return_exceptions=True)
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, ServerSilent):
                self._spawn(server.forget(name))
            elif isinstance(outcome, BaseException) and not isinstance(outcome, ServerGone):
                raise outcome

    async def holds(self) -> list[tuple[Server, dict[str, str]]]:
        """Ask each serving server what it holds: name -> path, as it reads it.

        A server that has just died is left out, and known to be gone when this returns.
        """
        servers = self.serving
        outcomes = await asyncio.gather(*(server.holds() for server in servers), return_exceptions=True)
        of_each = list(zip(servers, outcomes, strict=True))
        died = [server for server, said in of_each if isinstance(said, ServerGone)]
        await asyncio.gather(*(server.confirm_gone() for server in died))
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if wrong := [error for error in failed if not isinstance(error, ServerGone)]:
            raise wrong[0]
        return [(server, said) for server, said in of_each if not isinstance(said, BaseException)]

    async def sleep(self) -> None:
        """Put the servers to sleep; the caller makes sure that no request is in flight."""
        self.asleep = True
        self._awake.clear()
        servers = self.serving
        outcomes = await asyncio.gather(*(server.sleep() for server in servers), return_exceptions=True)
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, ServerGone | ServerSilent):
                server.lose()  # it is started again when the others wake
            elif isinstance(outcome, BaseException):
                raise outcome

    async def wake(self, verify: Callable[[Server], Awaitable[None]]) -> None:
        """Wake the sleeping servers; one that does not answer as before is restarted in the background."""
        self.asleep = False
        self._awake.set()
        asleep = [server for server in self.servers if server.state == "asleep"]
        await asyncio.gather(*(self._wake(server, verify) for server in asleep))

    async def _wake(self, server: Server, verify: Callable[[Server], Awaitable[None]]) -> None:
        try:
            await server.within(self.dialect.wake(server.http))
            await verify(server)
            server.become("up")
        except Exception as error:
            log.error("%s: not as it was before its sleep: %s; it is started again", server, error)
            server.lose()

    async def _bring_up(self, server: Server, *, first: bool) -> None:
        await server.start()
        assert server.abilities is not None
        for lacking in server.abilities.missing if first else ():
            log.info("%s: %s", server, lacking)
        if not server.abilities.lora:
            raise PoolLost(f"{server} does not take adapters while it runs", hint=_NO_LORA)
        if server.abilities.scaled_logprobs not in (None, self.settings.scaled_logprobs):
            raise PoolLost(
                f"{server} gives log-probabilities at another temperature than it has to", hint=_LOGPROBS
            )
        await self._restore(server, first=first)

    async def _moved(self, server: Server, host: Host) -> None:
        """Have a server on another node from now on, once its keeper has given it up with the lost one."""
        while server.state != "failed":
            await self._news.wait()
        server.host = host
        self._lost_at.pop(server.index, None)
        await self._lead_to(server)
        await self._again(server, deque(maxlen=_DEATHS))
        await self._keep(server)

    async def _keep(self, server: Server) -> None:
        """Bring a server back whenever it is gone, until it has failed for good."""
        deaths: deque[float] = deque(maxlen=_DEATHS)
        while server.state != "failed":
            how = await server.wait_until_gone()
            log.error("%s is gone: %s", server, how)
            await self._again(server, deaths)

    async def _again(self, server: Server, deaths: deque[float]) -> None:
        while True:
            if server.host is not None and server.host.lost.done():
                self._lost_at[server.index] = time.monotonic()
                why = f"node {server.host.name} was lost: {server.host.lost.result()}"
                server.become("failed", PoolLost(why, hint="The servers of other nodes serve on."))
                return
            server.become("down")
            deaths.append(time.monotonic())
            recent = [death for death in deaths if death > time.monotonic() - _DEATH_SECONDS]
            if len(recent) == _DEATHS:
                server.become("failed", server.broken(f"it died {_DEATHS} times"))
                return
            await asyncio.sleep(_BACK_OFF[len(recent) - 1])
            await self._awake.wait()
            try:
                await server.end()
                await self._bring_up(server, first=False)
                return
            except AttestationFailed as error:
                log.error("%s: %s", server, error)
                server.become("failed", error)
                return
            except LoradError as error:
                log.error("%s: %s", server, error)
            except Exception:
                log.exception("%s could not be brought back", server)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._keepers.add(task)
        task.add_done_callback(self._keepers.discard)

    def _changed(self) -> None:
        """Wake everybody who waits for a server's state."""
        self._news.set()
        self._news = asyncio.Event()


def pick(prompt: np.ndarray, loads: Sequence[tuple[int, int]]) -> int:
    """Choose the server of a sample: the one with its prompt's keys and values, unless that is too busy.

    Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup and Zadimoghaddam,
    2016): equal prompts prefer the same server, a server that comes or goes moves no other prompt, and none
    gets more than its share.

    loads: (identity, samples in flight) of each server that serves; at least one.
    """
    limit = math.ceil(SURPLUS * (sum(load for _, load in loads) + 1) / len(loads))
    below = [identity for identity, load in loads if load + 1 <= limit]
    open_to_it = below or [min(loads, key=lambda entry: entry[1])[0]]
    weights = {
        identity: hashlib.blake2b(
            prompt.tobytes(), digest_size=8, salt=identity.to_bytes(8, "little")
        ).digest()
        for identity in open_to_it
    }
    return max(open_to_it, key=weights.__getitem__)
