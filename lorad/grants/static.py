"""Grant nodes that the configuration names: `python -P -m lorad.grants.static grant.json`.

Nobody hands these nodes out but the locks of their GPUs: all that are asked for are taken, or none. Agents
are started by each node's command, whose stdin is held open as long as the pool lives. A node without ranks
that is lost is taken again, or another in its place.
"""

import asyncio
import contextlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lorad.grants.base import LARGER, Pool, too_small
from lorad.protocol.nodes import (
    AgentStart,
    Granted,
    GrantedNode,
    GrantRequest,
    LostNode,
    Refused,
    StaticNode,
    WaitingGrant,
)

_START_SECONDS = 60.0  # for an agent to say where it listens
_AGAIN_SECONDS = 5.0  # between two tries
_END_SECONDS = 20.0  # for an agent to end its children
_LINE = 1 << 20


class _Never(str):
    """Says why a node, or a grant, will never do."""


@dataclass(eq=False)
class _RunningAgent:
    """Holds an agent, and the process that carries its stdin and stdout."""

    node: StaticNode
    process: asyncio.subprocess.Process
    granted: GrantedNode | None = None

    async def ask(self, start: AgentStart) -> str:
        """Tell the agent whose it is, and fill in `granted`; else return why there is no node."""
        assert self.process.stdin and self.process.stdout
        try:
            async with asyncio.timeout(_START_SECONDS):
                self.process.stdin.write(msgspec.json.encode(start) + b"\n")
                await self.process.stdin.drain()
                line = await self.process.stdout.readline()
            if not line:
                return f"its agent exited with code {await self.process.wait()}"
            said = msgspec.json.decode(line)
            if said.get("kind") == "Refused":
                return str(said.get("words"))
            granted = msgspec.convert(said, GrantedNode)
            if (granted.node, granted.ip) != (self.node.name, self.node.address):
                return f"its agent says that it is {granted.node[:80]!r} at {granted.ip[:80]!r}"
            self.granted = granted
            return ""
        except TimeoutError:
            return f"its agent said nothing for {_START_SECONDS:.0f} s"
        except (OSError, ValueError, AttributeError) as error:
            return str(error) or type(error).__name__

    async def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await self.process.wait()
                return
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


async def _try(node: StaticNode, request: GrantRequest) -> _RunningAgent | str:
    """Return a node whose agent runs, or why there is none."""
    argv = [request.setup.python, *request.agent, "--address", node.address, "--name", node.name]
    if node.command and Path(node.command[0]).name == "ssh":  # whose other end is a shell
        argv = [shlex.quote(part) for part in argv]
    try:
        process = await asyncio.create_subprocess_exec(
            *node.command, *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LINE
        )
    except OSError as error:
        return f"{node.name}: {error}"
    started = _RunningAgent(node, process)
    devices = tuple(map(str, range(request.setup.devices)))
    try:
        why = await started.ask(AgentStart(certificate=request.certificate, devices=devices))
    except BaseException:
        await started.end()
        raise
    if started.granted is not None and (small := too_small(started.granted, request.setup.memory)):
        why = _Never(small)
    if not why:
        return started
    await started.end()
    return why if why.startswith(f"{node.name}: ") else f"{node.name}: {why}"


async def _all_or_none(request: GrantRequest, hosts: Sequence[StaticNode]) -> list[_RunningAgent] | str:
    """Take all nodes that are asked for, sorted by name; or take none, and say what is lacking."""
    taken: list[_RunningAgent] = []
    lacking: list[str] = []
    try:
        for node in hosts:
            if len(taken) == request.setup.bundles:
                break
            started = await _try(node, request)
            if isinstance(started, str):
                lacking.append(started)
            else:
                taken.append(started)
        if len(taken) == request.setup.bundles:
            return sorted(taken, key=lambda started: started.node.name)
    except BaseException:
        await _end(taken)
        raise
    await _end(taken)
    words = f"{len(taken)} of {request.setup.bundles} nodes are free; " + "; ".join(lacking)
    possible = len(taken) + sum(not isinstance(why, _Never) for why in lacking)
    return words if possible >= request.setup.bundles else _Never(words)


async def _end(taken: Sequence[_RunningAgent]) -> None:
    await asyncio.gather(*(started.end() for started in taken))


class _Holding:
    """Holds the nodes of one grant, which it tries in the order of the request."""

    def __init__(self, request: GrantRequest, pool: Pool) -> None:
        self._request = request
        self._pool = pool
        self._hosts = [host for host in request.setup.hosts if host.devices >= request.setup.devices]
        self._taken: list[_RunningAgent] = []
        self._choosing = asyncio.Lock()

    async def hold(self) -> None:
        """Take nodes, and hold them for ever; returns at once where too few of them are large enough."""
        setup = self._request.setup
        if len(self._hosts) < setup.bundles:
            each = f" with {setup.devices} GPUs each" if setup.devices else ""
            words = f"{setup.bundles} nodes{each} are asked for, but cluster.nodes has {len(self._hosts)}"
            advice = "Name more nodes there, or ask for fewer: resources.nodes."
            await self._pool.say(Refused(words, advice))
            return
        while isinstance(taken := await _all_or_none(self._request, self._hosts), str):
            if isinstance(taken, _Never):
                await self._pool.say(Refused(str(taken), LARGER))
                return
            await self._pool.say(WaitingGrant(taken))
            await asyncio.sleep(_AGAIN_SECONDS)
        self._taken = taken
        try:
            await self._pool.say(Granted(tuple(started.granted for started in taken if started.granted)))
            async with asyncio.TaskGroup() as group:
                for place, started in enumerate(taken):
                    group.create_task(self._follow(started, is_elastic=place >= setup.nodes))
        finally:
            await _end(self._taken)

    async def _follow(self, started: _RunningAgent, *, is_elastic: bool) -> None:
        """Say when a node is lost; an elastic one has no ranks, and another may take its place."""
        while True:
            code = await started.process.wait()
            self._taken.remove(started)
            await self._pool.say(LostNode(started.node.name, f"its agent exited with code {code}"))
            if not is_elastic:
                return
            started = await self._take_another()
            if started.granted is not None:
                await self._pool.say(Granted((started.granted,)))

    async def _take_another(self) -> _RunningAgent:
        """Take any node that is not taken, the same one included."""
        while True:
            async with self._choosing:
                names = {started.node.name for started in self._taken}
                for node in self._hosts:
                    started = None if node.name in names else await _try(node, self._request)
                    if isinstance(started, _RunningAgent):
                        self._taken.append(started)
                        return started
            await asyncio.sleep(_AGAIN_SECONDS)


async def main(request: GrantRequest) -> int:
    pool = await Pool.connect(request)
    holding = asyncio.create_task(_Holding(request, pool).hold())
    gone = asyncio.create_task(pool.gone())
    await asyncio.wait({holding, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not gone.done():
        holding.result()  # what went wrong
    holding.cancel()
    await asyncio.wait({holding})
    gone.cancel()
    return 0


if __name__ == "__main__":
    request = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=GrantRequest)
    sys.exit(asyncio.run(main(request)))
