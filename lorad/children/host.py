"""What a pool needs of a machine on which its children run: this one, or a node (`lorad/nodes`)."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from lorad.errors import SpecError

_LINGER_SECONDS = 0.5  # for the others to say why one has ended
_STAR = 8
"""So many machines are given a directory directly; more pass it on."""
LOST = "was lost with its node"
"""How a child ended whose machine does not answer: the cause, whatever others say about their peers."""


class Process(Protocol):
    """A child, or several that live and end together; see `Child`, which is one."""

    pid: int | None

    async def start(self) -> None: ...

    @property
    def is_alive(self) -> bool: ...

    async def ended(self) -> str: ...

    async def stop(self, grace: float = 30.0) -> None: ...

    async def dump(self) -> None: ...

    def logged(self) -> int: ...

    def tail(self, lines: int = 15, since: int = 0) -> str: ...


class Host(Protocol):
    """Is another machine, where paths are in the directory of its agent.

    Attributes:
        name: what people call it.
        address: the IP that other nodes reach it by.
        interface: the network interface that ranks use; "" for the one that has the address.
        directory: the agent's, absolute.
        python: lorad's interpreter on it.
        devices: the pool's, as CUDA_VISIBLE_DEVICES names them.
        lost: why, once the machine is given up, with all that runs on it.
    """

    name: str
    address: str
    interface: str
    directory: Path
    python: str
    devices: tuple[str, ...]
    lost: asyncio.Future[str]

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
        """Make a child that runs in the directory `name` there, with `files` in it.

        log: at home.
        follow: patterns of files in its directory, whose content is kept the same in `shadows`.
        """
        ...

    async def write(self, name: str, text: str) -> None:
        """Put a file in place there."""
        ...

    async def make(self, name: str) -> Path:
        """Make a directory there; returns its path."""
        ...

    async def put(self, name: str, source: Path) -> Path:
        """Copy a directory of files there, whole or not at all; returns its path there.

        Raises IntegrityError, StorageError, PoolLost.
        """
        ...

    async def relay(self, name: str, source: Path, others: Sequence["Host"]) -> dict[str, BaseException]:
        """Copy a directory to this machine and others, which pass it on. Returns, by name, why machines have
        nothing.
        """
        ...

    async def fetch(self, name: str, into: Path) -> None:
        """Copy the files of a directory there into one of this machine, each put in place whole."""
        ...

    async def remove(self, name: str) -> None: ...

    async def digest(self, name: str) -> str:
        """Return the sha256 of a file as it is there now; "" when it is gone."""
        ...

    async def weights(self, directory: Path, quantize: str | None) -> str:
        """Return what `weights_sha256` finds there. Raises SpecError when there is no such model."""
        ...

    def inward(self, name: str, local: Path) -> AbstractAsyncContextManager[None]:
        """Listen on a Unix socket there, whose first caller is joined to the Unix socket `local`."""
        ...

    def outward(self, name: str, local: Path) -> AbstractAsyncContextManager[None]:
        """Listen on the Unix socket `local`, whose callers are joined to one there."""
        ...


async def check_weights(hosts: Sequence[Host], model: Path, sha256: str) -> None:
    """Raise SpecError unless every machine has the weights of this sha256 there, as this one has."""
    digests = await asyncio.gather(*(host.weights(model, None) for host in hosts))
    for host, digest in zip(hosts, digests, strict=True):
        if digest != sha256:
            raise SpecError(
                f"{model} has other weights on {host.name} (sha256 {digest[:12]}…) than at home "
                f"({sha256[:12]}…)",
                key="model.name",
                hint="Copy the model there again.",
            )


async def put_on_all(hosts: Sequence[Host], name: str, source: Path) -> list[BaseException | None]:
    """Copy a directory to machines side by side; returns why it is not on each, or None.

    Beyond `_STAR` machines they pass it on among themselves, and who has nothing then is given it directly.
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


class Team:
    """Children on several machines that live and end together; looks like one.

    The first one's end is the end of all: `ended` returns when nothing of any of them is left.
    """

    def __init__(self, children: Sequence[Process]) -> None:
        self._children = children
        self.pid: int | None = None
        self._end: asyncio.Task[str] | None = None

    async def start(self) -> None:
        """Start all or none."""
        try:
            async with asyncio.TaskGroup() as group:
                for child in self._children:
                    group.create_task(child.start())
        except BaseExceptionGroup as errors:
            await self.stop(0.0)
            raise errors.exceptions[0] from None
        except BaseException:
            await self.stop(0.0)
            raise
        self.pid = self._children[0].pid
        self._end = asyncio.create_task(self._first())

    @property
    def is_alive(self) -> bool:
        return self._end is not None and not self._end.done()

    async def ended(self) -> str:
        if self._end is None:
            raise RuntimeError("the children were never started")
        return await asyncio.shield(self._end)

    async def stop(self, grace: float = 30.0) -> None:
        await asyncio.gather(*(child.stop(grace) for child in self._children), return_exceptions=True)
        if self._end is not None:
            await self._end

    async def dump(self) -> None:
        await asyncio.gather(*(child.dump() for child in self._children), return_exceptions=True)

    def logged(self) -> int:
        return self._children[0].logged()

    def tail(self, lines: int = 15, since: int = 0) -> str:
        """All write to one log."""
        return self._children[0].tail(lines, since)

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
