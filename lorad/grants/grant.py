"""A grant, as its pool has it: the process that holds it, and the nodes that came of it."""

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

import lorad
from lorad.box.paths import private_directory
from lorad.children.process import Child, cause, sweep
from lorad.errors import LoradError, NotAllowed, PoolLost, SpecError
from lorad.files import write_whole
from lorad.grants.base import LARGER, too_small
from lorad.nodes.certificates import Credentials
from lorad.nodes.messages import LINE
from lorad.nodes.remote import Node
from lorad.nodes.streams import listening
from lorad.protocol.heartbeat import HEART
from lorad.protocol.nodes import (
    GRANT,
    Granted,
    GrantedNode,
    GrantLine,
    GrantRequest,
    GrantState,
    GrantStatus,
    LostNode,
    NodesSetup,
    PlacedNode,
    Refused,
    WaitingGrant,
)

log = logging.getLogger(__name__)
_END_SECONDS = 25.0  # of the process, to end its agents
_LAST_WORDS_SECONDS = 1.0  # for what a process said before its end to be read
_WORDS = 4096  # characters of what is said in a status
_NAME = 253  # characters of a node's
_HINT = "Resume the runs; a new pool asks for other nodes."


class Grant:
    """Holds the nodes that a pool was granted; `hold_nodes` makes it.

    hosts: the nodes with ranks.
    rollout: further nodes, which have only servers.
    returned: the lost and the new node, for each rollout node that another one takes the place of.
    """

    def __init__(self, setup: NodesSetup, life: str, work: Path, logs: Path) -> None:
        self._setup = setup
        self._life = life
        self._logs = logs
        self._private = private_directory(work / "grant")
        self._socket = self._private / "grant.sock"
        self._record = work / "granter.json"
        self._nodes: dict[str, Node] = {}
        self._gone: list[Node] = []  # rollout nodes
        self.returned: asyncio.Queue[tuple[Node, Node]] = asyncio.Queue()
        self._status = GrantStatus(state="asked")
        self._ending = False
        self._has_said_all = asyncio.Event()

    @property
    def hosts(self) -> list[Node]:
        return list(self._nodes.values())[: self._setup.nodes]

    @property
    def rollout(self) -> list[Node]:
        return list(self._nodes.values())[self._setup.nodes :]

    def placed(self, software: Mapping[str, str]) -> tuple[PlacedNode, ...]:
        """Describe the nodes with ranks, for journals. All have the same `software`: versions by name."""
        versions = {"lorad": lorad.__version__, **software}
        digest = hashlib.sha256(json.dumps(versions, sort_keys=True).encode()).hexdigest()
        return tuple(
            PlacedNode(node=node.name, boot_id=node.granted.boot_id, devices=node.devices, software=digest)
            for node in self.hosts
        )

    @asynccontextmanager
    async def lead(self) -> AsyncIterator[None]:
        """Ask for nodes, wait until they are granted, and lead their agents until the end of the block.

        Raises SpecError for what will never be granted, PoolLost when the process or a node fails.
        """
        await asyncio.to_thread(self._prepare)
        async with AsyncExitStack() as stack:
            stack.callback(shutil.rmtree, self._private, ignore_errors=True)
            credentials = Credentials(f"lorad pool {self._life}", self._private)
            lines: asyncio.Queue[GrantLine | None] = asyncio.Queue()
            await stack.enter_async_context(self._listening(lines))
            child = self._child(credentials)
            await child.start()
            stack.push_async_callback(child.stop, _END_SECONDS)

            async def watch() -> None:
                """Put None into `lines` once the process has ended and its last words, if any, are read."""
                await child.ended()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_WORDS_SECONDS):
                        await self._has_said_all.wait()
                lines.put_nowait(None)

            ended = asyncio.create_task(watch())
            stack.callback(ended.cancel)
            self._tell("asked")
            granted = await self._answer(lines, child)
            connect = functools.partial(self._connect, stack, credentials)
            for granted_node in granted.nodes:
                await connect(granted_node)
            self._tell("granted", nodes=granted.nodes)
            follow = asyncio.create_task(self._follow(lines, connect))
            stack.callback(follow.cancel)
            try:
                yield
            finally:
                self._ending = True

    async def _connect(
        self, stack: AsyncExitStack, credentials: Credentials, granted_node: GrantedNode
    ) -> Node:
        self._check(granted_node)
        connection = Node.connected(granted_node, credentials, self._life, self._setup)
        node = self._nodes[granted_node.node] = await stack.enter_async_context(connection)

        def leave(_: object) -> None:
            if node in self.rollout:
                self._lose(LostNode(node.name, "it was asked to end"))
            elif node in self.hosts:  # whose runs the daemon takes first
                self._tell("granted", f"{node.name} was asked to end", nodes=self._status.nodes)

        node.leaving.add_done_callback(leave)
        return node

    def _prepare(self) -> None:
        sweep(self._record)
        shutil.rmtree(self._private, ignore_errors=True)
        (self._private / "python").mkdir(mode=0o700, parents=True)
        self._private.chmod(0o700)
        (self._private / "python" / "lorad").symlink_to(Path(lorad.__file__).parent)

    @asynccontextmanager
    async def _listening(self, lines: "asyncio.Queue[GrantLine | None]") -> AsyncIterator[None]:
        """Put what the process says into `lines`; None at the end of it."""
        writers: list[asyncio.StreamWriter] = []

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)  # its end is the end of the grant
            try:
                while line := await reader.readline():
                    lines.put_nowait(msgspec.json.decode(line, type=GrantLine))
            except (OSError, ValueError) as error:
                log.error("the grant process said what it cannot mean: %s", error)
            except asyncio.CancelledError:  # asyncio of Python 3.11 would print it
                pass
            lines.put_nowait(None)
            self._has_said_all.set()

        async with listening(self._socket, accept, LINE):
            try:
                yield
            finally:
                for writer in writers:
                    writer.close()

    def _child(self, credentials: Credentials) -> Child:
        setup = msgspec.structs.replace(self._setup, python=self._setup.python or sys.executable)
        request = GrantRequest(
            setup=setup,
            life=self._life,
            socket=str(self._socket),
            certificate=credentials.pem,
            agent=("-P", "-m", "lorad.nodes.agent", "--life", self._life, "--lease", str(setup.lease)),
        )
        path = self._private / "request.json"
        write_whole(path, msgspec.json.encode(request), durable=False)
        env = {"PYTHONPATH": str(self._private / "python")} if setup.cluster_python else {}
        argv = [setup.cluster_python or sys.executable, "-P", "-m", f"lorad.grants.{setup.kind}", str(path)]
        return Child(argv, env, self._logs / "grant.log", self._record, self._private)

    async def _answer(self, lines: "asyncio.Queue[GrantLine | None]", child: Child) -> Granted:
        HEART.work("")  # others decide for how long
        while True:
            match await lines.get():
                case WaitingGrant(words):
                    log.info("waiting for nodes: %s", words)
                    self._tell("asked", words)
                case Granted() as granted:
                    return granted
                case Refused(words, hint):
                    self._tell("refused", words, hint)
                    raise SpecError(words, key="resources.nodes", hint=hint)
                case _:
                    words = f"the grant process {await child.ended()}; {cause(child.output.tail(200))}"
                    self._tell("lost", words)
                    raise PoolLost(words, hint="`lorad doctor --cluster` tries it alone.")

    def _check(self, granted: GrantedNode) -> None:
        """Raise NotAllowed for another user's agent or other devices, SpecError for a GPU too small."""
        name = granted.node
        if granted.uid != os.getuid():
            raise NotAllowed(
                f"{name} runs lorad as user {granted.uid}, and this pool is of user {os.getuid()}",
                hint="A cluster has one user: ask its administrator for one of your own.",
            )
        if words := too_small(granted, self._setup.memory):
            self._tell("refused", words, LARGER)
            raise SpecError(words, key="resources.devices", hint=LARGER)
        if name in self._nodes or not name.isprintable() or len(name) > _NAME:
            raise NotAllowed(f"a node says that its name is {name[:80]!r}, which is another's or none")
        if not len(granted.devices) == len({*granted.devices}) == self._setup.devices:
            words = f"{name} says that it has {len(granted.devices)} devices"
            raise NotAllowed(f"{words}, and {self._setup.devices} different ones were asked for")

    async def _follow(
        self, lines: "asyncio.Queue[GrantLine | None]", connect: Callable[[GrantedNode], Awaitable[Node]]
    ) -> None:
        """Give up nodes that the grant lost, and all with the grant; leaving ones may stay longer."""
        while not self._ending:
            line = await lines.get()
            if isinstance(line, LostNode):
                # a node with ranks, whose scheduler was asked to go, stays for their step
                host = self._nodes.get(line.node)
                host = host if host in self.hosts else None
                if host is not None and line.is_asked and not host.leaving.done():
                    with contextlib.suppress(LoradError):
                        await host.leave()
                if host is None or not host.leaving.done() or host.lost.done():
                    self._lose(line)
            elif isinstance(line, Granted):
                for granted in line.nodes:  # in the places of those that were lost
                    try:
                        node = await connect(granted)
                    except LoradError as error:  # which is lost again
                        log.error("%s was granted again, but: %s", granted.node, error)
                        continue
                    self._tell("granted", nodes=(*self._status.nodes, granted))
                    if self._gone:
                        self.returned.put_nowait((self._gone.pop(0), node))
            elif line is None and not self._ending:
                if stay := [node for node in self._nodes.values() if not node.leaving.done()]:
                    self._tell("lost", "the grant process has ended", nodes=self._status.nodes)
                for left in stay:
                    left.lose("the grant process has ended")
                return

    def _lose(self, line: LostNode) -> None:
        """Give up a node. Without a rollout node the others go on."""
        if (node := self._nodes.get(line.node)) is None:
            return
        words = f"{line.node}: {line.how}"
        if node in self.rollout:
            self._gone.append(self._nodes.pop(line.node))
            others = tuple(other for other in self._status.nodes if other.node != line.node)
            self._tell("granted", words, nodes=others)
        else:
            self._tell("lost", words, nodes=self._status.nodes)
        node.lose(line.how)

    def _tell(
        self, state: GrantState, words: str = "", hint: str = "", nodes: tuple[GrantedNode, ...] = ()
    ) -> None:
        """Write the state of the grant down for the daemon."""
        self._status = GrantStatus(
            state=state,
            words=words[:_WORDS],
            hint=hint[:_WORDS],
            since=time.time(),
            nodes=nodes,
            leaving=tuple(node.name for node in self.hosts if node.leaving.done()),
        )
        with contextlib.suppress(OSError):
            write_whole(self._logs / GRANT, msgspec.json.encode(self._status), durable=False)


@asynccontextmanager
async def hold_nodes(setup: NodesSetup, pool: str, work: Path, logs: Path) -> AsyncIterator[Grant]:
    """Hold nodes for the present life of a pool; see `Grant.lead`. work: the pool's directory. logs: where
    `grant.json` and `grant.log` go.
    """
    grant = Grant(setup, f"{pool}@{uuid.uuid4().hex[:8]}", work, logs)
    async with grant.lead():
        yield grant
