"""The directories that servers on nodes read adapters from: the same on every node that has servers."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from lorad.adapters.peft import WEIGHTS
from lorad.children.host import Host, put_on_all
from lorad.errors import IntegrityError, LoradError, PoolLost, StorageError

PLACE = "adapters"  # in an agent's directory; in memory, where there is room
_LOST_SECONDS = 10.0  # for a node to be given up whose connection broke


class Copies:
    """The copies of versions on the nodes that have servers now: `hosts` lists these."""

    def __init__(self, hosts: Callable[[], Sequence[Host]]) -> None:
        self._hosts = hosts

    async def put(self, directory: Path) -> None:
        """Copy a directory to all nodes, side by side; one that is lost meanwhile does not count.

        Raises StorageError, IntegrityError, PoolLost where a node does not get it; the caller removes the
        others.
        """
        hosts = list(self._hosts())
        outcomes = await put_on_all(hosts, _name(directory), directory)
        for host, outcome in zip(hosts, outcomes, strict=True):
            if outcome is not None and not await _is_lost(host, outcome):
                raise _with_name(host, outcome)

    async def fill(self, host: Host, directory: Path, digest: str) -> None:
        """Have a node hold a version whose weights have this sha256, whatever is there now."""
        if await host.digest(_weights(directory)) == digest:
            return
        await host.remove(_name(directory))
        try:
            await host.put(_name(directory), directory)
        except LoradError as error:
            raise _with_name(host, error) from error
        if (actual := await host.digest(_weights(directory))) != digest:
            raise IntegrityError(
                f"{host.name} has other weights of {directory.name} (sha256 {actual[:12]}…) than were given "
                f"out ({digest[:12]}…)",
                hint="Resume the run.",
            )

    async def digests(self, directory: Path) -> list[str]:
        """Return the sha256 of a version's weights on each node that is not lost; "" where they are gone."""
        hosts = list(self._hosts())
        work = (host.digest(_weights(directory)) for host in hosts)
        outcomes = await asyncio.gather(*work, return_exceptions=True)
        for host, outcome in zip(hosts, outcomes, strict=True):
            if isinstance(outcome, BaseException) and not await _is_lost(host, outcome):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def remove(self, directory: Path) -> None:
        """Remove it from all nodes that answer; what is left goes with the agent."""
        work = (host.remove(_name(directory)) for host in self._hosts())
        await asyncio.gather(*work, return_exceptions=True)


def _name(directory: Path) -> str:
    return f"{PLACE}/{directory.name}"


def _weights(directory: Path) -> str:
    return f"{_name(directory)}/{WEIGHTS}"


async def _is_lost(host: Host, error: BaseException) -> bool:
    """Return whether the error is that the node is given up; its connections may break one by one."""
    if not isinstance(error, PoolLost):
        return False
    await asyncio.wait({host.lost}, timeout=_LOST_SECONDS)
    return host.lost.done()


def _with_name(host: Host, error: BaseException) -> BaseException:
    """Name the node in what it refused with."""
    if isinstance(error, StorageError | IntegrityError):
        return type(error)(f"{host.name}: {error.message}", hint=error.hint)
    return error
