"""The machines on which a pool's children run, this one or a node (`lorad/nodes`), as a pool sees them."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from lorad.children.logs import Log
from lorad.errors import SpecError

_LINGER_SECONDS = 0.5  # for other children to say why the first has ended
_STAR = 8  # machines that get a directory directly; more pass it on
LOST = "was lost with its node"
"""How a child ended whose machine does not answer: the cause, whatever others say about their peers."""


class Process(Protocol):
    """A child, or several that live and end together, with one log as their output."""

    pid: int | None
    output: Log

    async def start(self) -> None:
        """Start the child; call it once."""

    @property
    def is_alive(self) -> bool: ...

    async def ended(self) -> str:
        """Wait, maybe with others, until nothing is left; return how it ended, as "was killed by SIGKILL"."""

    async def stop(self, grace: float = 30.0) -> None:
        """Ask it to end, kill it and all that it started after `grace` seconds, and wait for the end."""

    async def dump(self) -> None:
        """Write the stacks of the ranks that the child has started to its log."""


class WatchedProcess:
    """A process whose end a task waits for, once it is started."""

    _end: asyncio.Task[str] | None = None

    @property
    def is_alive(self) -> bool:
        return self._end is not None and not self._end.done()

    async def ended(self) -> str:
        if self._end is None:
            raise RuntimeError(f"the {type(self).__name__} was never started")
        return await asyncio.shield(self._end)


class Host(Protocol):
    """Another machine. Names of files are paths in its agent's directory."""

    name: str
    address: str  # the IP by which other nodes reach it
    interface: str  # the network interface that ranks use; "": the one that has the address
    directory: Path  # its agent's, absolute
    python: str  # lorad's interpreter on it
    devices: tuple[str, ...]  # the pool's, as CUDA_VISIBLE_DEVICES names them
    lost: asyncio.Future[str]  # why the machine was given up with all that runs on it, once that is so

    def child(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        log: Path,
        files: Mapping[str, str],
        follow: tuple[str, ...] = (),
        shadows: Path | None = None,
    ) -> Process:
        """Make a child that runs in the directory `name`, with `files` in it.

        log: Its file on this machine.
        follow: Patterns of files in its directory, whose content is kept the same in `shadows`.
        """

    async def write(self, name: str, text: str) -> None:
        """Put a file in place."""

    async def make(self, name: str) -> Path:
        """Make a directory, and return its path."""

    async def put(self, name: str, source: Path) -> Path:
        """Copy a directory of files to it, whole or not at all, and return its path on it.

        Raises IntegrityError, StorageError, PoolLost.
        """

    async def relay(self, name: str, source: Path, others: Sequence["Host"]) -> dict[str, BaseException]:
        """Copy a directory to it and on to others; return by name why machines do not have it."""

    async def fetch(self, name: str, into: Path) -> None:
        """Copy the files of a directory into one of this machine, each put in place whole."""

    async def remove(self, name: str) -> None: ...

    async def digest(self, name: str) -> str:
        """Return the present sha256 of a file; "" when it is gone."""

    async def weights(self, directory: Path) -> str:
        """Return the `weights_sha256` of its model. Raises SpecError when there is none."""

    def inward(self, name: str, local: Path) -> AbstractAsyncContextManager[None]:
        """Listen on a Unix socket of its own, and join the first caller to `local`."""

    def outward(self, name: str, local: Path) -> AbstractAsyncContextManager[None]:
        """Listen on the Unix socket `local`, and join callers to a socket of its own."""


async def check_weights(hosts: Sequence[Host], model: Path, sha256: str) -> None:
    """Raise SpecError unless every machine has this machine's weights in the same place."""
    digests = await asyncio.gather(*(host.weights(model) for host in hosts))
    for host, digest in zip(hosts, digests, strict=True):
        if digest != sha256:
            raise SpecError(
                f"{model} has other weights on {host.name} (sha256 {digest[:12]}…) than at home "
                f"({sha256[:12]}…)",
                key="model.name",
                hint="Copy the model there again.",
            )


async def put_on_all(hosts: Sequence[Host], name: str, source: Path) -> list[BaseException | None]:
    """Copy a directory to machines side by side; return for each why it is not on it, or None.

    More than `_STAR` machines pass it on among themselves; those without it then get it directly.
    """
    lacking = {host.name: host for host in hosts}
    if len(hosts) > _STAR:
        failed = await hosts[0].relay(name, source, hosts[1:])
        lacking = {host.name: host for host in hosts if host.name in failed}
        await asyncio.gather(*(host.remove(name) for host in lacking.values()), return_exceptions=True)
    puts = (host.put(name, source) for host in lacking.values())
    said = dict(zip(lacking, await asyncio.gather(*puts, return_exceptions=True), strict=True))
    outcomes = [said.get(host.name) for host in hosts]
    return [each if isinstance(each, BaseException) else None for each in outcomes]


class Team(WatchedProcess):
    """Children on several machines that live and end together, as one `Process`: the first end ends all."""

    def __init__(self, children: Sequence[Process]) -> None:
        self._children = children
        self.pid: int | None = None
        self.output = children[0].output  # all write to one log

    async def start(self) -> None:
        """Start all or none."""
        try:
            async with asyncio.TaskGroup() as group:
                for child in self._children:
                    group.create_task(child.start())
        except BaseException as error:
            await self.stop(0.0)
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        self.pid = self._children[0].pid
        self._end = asyncio.create_task(self._first())

    async def stop(self, grace: float = 30.0) -> None:
        await asyncio.gather(*(child.stop(grace) for child in self._children), return_exceptions=True)
        if self._end is not None:
            await self._end

    async def dump(self) -> None:
        await asyncio.gather(*(child.dump() for child in self._children), return_exceptions=True)

    async def _first(self) -> str:
        ends = [asyncio.create_task(child.ended()) for child in self._children]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        # the others have a moment to say why, then they are stopped
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                await asyncio.wait(ends)
        await asyncio.gather(*(child.stop(0.0) for child in self._children), return_exceptions=True)
        await asyncio.wait(ends)
        lost = [end.result() for end in ends if end.result().startswith(LOST)]
        return lost[0] if lost else next(iter(done)).result()
