"""The pool's end of an agent: a `Host`, whose children look like those of this machine."""

import asyncio
import contextlib
import itertools
import logging
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import msgspec

import lorad
from lorad.children.host import LOST, Host
from lorad.errors import Conflict, PoolLost, SpecError, from_wire
from lorad.nodes import messages, streams
from lorad.nodes.certificates import Credentials, check_peer
from lorad.nodes.child import RemoteChild
from lorad.nodes.messages import LINE, AnyMessage, ChildNews, Done, Failed, Files, Hello, Leaving, Request
from lorad.nodes.relay import Relay
from lorad.protocol.nodes import GrantedNode, NodesSetup

log = logging.getLogger(__name__)
_RENEW_SECONDS = 1.0
PATIENCE_SECONDS = 5.0  # beyond the lease: the node has ended everything by itself when it is given up here
_CONNECT_SECONDS = 30.0  # for a connection, and for its first answer
_ANSWER_SECONDS = 7200.0  # for the sha256 of a large base model
_HINT = "Resume the runs; a new pool starts, on other nodes if need be."


class Node:
    """Leads the agent of a node; `connected` makes it.

    lost: why, once the node is given up.
    leaving: done once its agent was asked to end, which it does when the node is given up.
    """

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, granted: GrantedNode, credentials: Credentials, life: str, setup: NodesSetup
    ) -> AsyncIterator[Self]:
        """Lead the agent of a node until the end of the block, which is its end.

        Raises PoolLost when it does not answer, and what it refuses with.
        """
        if granted.lorad != lorad.__version__:
            raise SpecError(
                f"{granted.node} has lorad {granted.lorad}, and this machine {lorad.__version__}",
                key="cluster.node_python",
                hint="Install the same version on all machines.",
            )
        node = cls(granted, credentials, life, setup)
        async with node._opened(Hello(kind="control", life=life)) as (node._reader, node._writer):
            node._heard = time.monotonic()
            node._tasks = [asyncio.create_task(node._listen()), asyncio.create_task(node._renew())]
            try:
                yield node
            finally:
                node.lose("the pool has ended")
                for task in node._tasks:
                    task.cancel()
                await asyncio.gather(*node._tasks, return_exceptions=True)

    def __init__(self, granted: GrantedNode, credentials: Credentials, life: str, setup: NodesSetup) -> None:
        self.granted = granted
        self.name = granted.node
        self.address = granted.ip
        self.interface = setup.interface or granted.interface
        self.python = setup.python or sys.executable
        self.directory = Path(granted.directory)
        self.devices = granted.devices
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.leaving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = credentials.context(granted.certificate)
        self._life = life
        self._lease = setup.lease
        self._credentials = credentials
        self._trusts: frozenset[str] = frozenset()
        self._open: set[asyncio.StreamWriter] = set()
        self._reader: asyncio.StreamReader  # of the control connection
        self._writer: asyncio.StreamWriter
        self._children: dict[str, RemoteChild] = {}
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._heard = time.monotonic()
        self._saying = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

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
    ) -> RemoteChild:
        asked = messages.Spawn(name=name, argv=tuple(argv), env=dict(env), files=dict(files), follow=follow)
        return RemoteChild(self, asked, log, shadows)

    def register(self, name: str, child: RemoteChild) -> None:
        """Have `child` hear from now on what is said of `name`. Raises Conflict while another one lives."""
        if (earlier := self._children.get(name)) is not None and earlier.is_alive:
            raise Conflict(f"{name} runs already on {self.name}")
        self._children[name] = child

    async def write(self, name: str, text: str) -> None:
        await self.ask(messages.Write(name=name, text=text))

    async def make(self, name: str) -> Path:
        await self.ask(messages.Make(name=name))
        return self.directory / name

    async def remove(self, name: str) -> None:
        await self.ask(messages.Remove(name=name))

    async def digest(self, name: str) -> str:
        return await self.ask(messages.Digest(name=name))

    async def weights(self, directory: Path) -> str:
        return await self.ask(messages.Weights(directory=str(directory)))

    async def put(self, name: str, source: Path) -> Path:
        files = await asyncio.to_thread(streams.list_files, source)
        hello = Hello(kind="put", life=self._life, name=name, files=files)
        async with self._opened(hello) as (reader, writer):
            with self._as_lost(), contextlib.suppress(ConnectionResetError, BrokenPipeError):
                await streams.send_files(writer, source, files)
            with self._as_lost():
                return Path((await streams.answer_of(reader, Done)).value)

    async def relay(self, name: str, source: Path, others: Sequence[Host]) -> dict[str, BaseException]:
        nodes = [self, *(other for other in others if isinstance(other, Node))]
        everybody = frozenset(node.granted.certificate for node in nodes)
        trusted = await asyncio.gather(*(node.trust(everybody) for node in nodes), return_exceptions=True)
        to = [
            messages.Peer(node.name, node.address, node.granted.port, node.granted.certificate)
            for node, error in zip(nodes, trusted, strict=True)
            if error is None
        ]
        files = await asyncio.to_thread(streams.list_files, source)
        relay = Relay(self._credentials, self._life, self._lease, to)
        try:
            await relay.open(name, files)
            for data in streams.read_files(source, files):
                await relay.send(data)
            failed = await relay.close()
        finally:
            relay.abort()
        lost = {node.name: error for node, error in zip(nodes, trusted, strict=True) if error is not None}
        return lost | {node: from_wire(error) for node, error in failed.items()}

    async def trust(self, certificates: frozenset[str]) -> None:
        """Have the agent take what the agents with these certificates pass on."""
        if new := certificates - self._trusts:
            await self.ask(messages.Trust(certificates=tuple(new)))
            self._trusts |= new

    async def fetch(self, name: str, into: Path) -> None:
        hello = Hello(kind="fetch", life=self._life, name=name)
        async with self._opened(hello, is_done=False) as (reader, _):
            draft = into / f".tmp-{name.rpartition('/')[2]}"
            with self._as_lost():
                answer = await streams.answer_of(reader, Files)
                await streams.receive_files(reader, draft, answer.files)
            await asyncio.to_thread(_move, draft, into)

    @asynccontextmanager
    async def inward(self, name: str, local: Path) -> AsyncIterator[None]:
        async with self._opened(Hello(kind="serve", life=self._life, name=name)) as pair:

            async def join() -> None:
                """Join whoever calls over there to a socket of this machine."""
                with contextlib.suppress(OSError):
                    await streams.answer_of(pair[0], Done)
                    await streams.splice(pair, await asyncio.open_unix_connection(str(local)))

            joining = asyncio.create_task(join())
            try:
                yield
            finally:
                joining.cancel()
                await asyncio.wait({joining})

    @asynccontextmanager
    async def outward(self, name: str, local: Path) -> AsyncIterator[None]:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async with self._opened(Hello(kind="tunnel", life=self._life, name=name)) as tunnel:
                    await streams.splice((reader, writer), tunnel)
            except Exception as error:
                log.debug("%s: no tunnel to %s: %s", self.name, name, error)
            finally:
                writer.close()

        async with streams.listening(local, accept):
            yield

    async def ask(self, request: Request) -> str:
        """Return the agent's answer. Raises what it refused with, or PoolLost."""
        if self.lost.done():
            raise PoolLost(self._last_words(), hint=_HINT)
        number = next(self._ids)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._say(request, number)
            with self._as_lost():
                async with asyncio.timeout(_ANSWER_SECONDS):
                    answered: str = await future
            return answered
        finally:
            self._waiting.pop(number, None)

    async def leave(self) -> None:
        """Have the agent live until it is let go, though its scheduler goes first. Raises PoolLost."""
        await self.ask(messages.Leave())
        with contextlib.suppress(asyncio.InvalidStateError):  # it said so, too
            self.leaving.set_result(None)

    def lose(self, why: str) -> None:
        """Give the node up, and all that runs there."""
        if self.lost.done():
            return
        self.lost.set_result(why)
        for child in self._children.values():
            child.finish(self._last_words())
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PoolLost(self._last_words(), hint=_HINT))
        for writer in self._open:  # whoever waits there would wait for ever
            streams.drop(writer)

    def _last_words(self) -> str:
        return f"{LOST} {self.name}: {self.lost.result()}"

    @asynccontextmanager
    async def _opened(self, hello: Hello, *, is_done: bool = True) -> AsyncIterator[streams.Pair]:
        """Connect, and say hello; wait for the answer unless `is_done` is false."""
        opening = asyncio.open_connection(self.address, self.granted.port, ssl=self._context, limit=LINE)
        connecting = asyncio.create_task(opening)
        awaited: set[asyncio.Future[Any]] = {connecting, self.lost}  # it may be given up meanwhile
        try:
            with self._as_lost():
                await asyncio.wait(awaited, timeout=_CONNECT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if not connecting.done():
                    raise TimeoutError(self.lost.result() if self.lost.done() else "no connection came to be")
                reader, writer = connecting.result()
        finally:
            connecting.cancel()
        self._open.add(writer)
        try:
            with self._as_lost():
                check_peer(writer, self.granted.certificate)
                streams.never_hangs(writer, self._lease)
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await streams.write(writer, hello)
                    if is_done:
                        await streams.answer_of(reader, Done)
            yield reader, writer
        finally:
            self._open.discard(writer)
            streams.drop(writer)

    @contextlib.contextmanager
    def _as_lost(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = str(error) or type(error).__name__
            raise PoolLost(f"node {self.name} does not answer: {why}", hint=_HINT) from error

    async def _say(self, request: Request, number: int = 0) -> None:
        try:
            async with self._saying:
                await streams.write(self._writer, msgspec.structs.replace(request, id=number))
        except OSError as error:
            self.lose(str(error) or type(error).__name__)
            raise PoolLost(self._last_words(), hint=_HINT) from error

    async def _listen(self) -> None:
        try:
            while True:
                message: AnyMessage = await streams.read(self._reader, AnyMessage)  # type: ignore[arg-type]
                self._heard = time.monotonic()
                if isinstance(message, Done | Failed):
                    future = self._waiting.get(message.id)
                    if future is None or future.done():
                        continue
                    if isinstance(message, Done):
                        future.set_result(message.value)
                    else:
                        future.set_exception(from_wire(message.error))
                elif isinstance(message, Leaving):
                    with contextlib.suppress(asyncio.InvalidStateError):  # it was asked to, too
                        self.leaving.set_result(None)
                elif isinstance(message, ChildNews) and (child := self._children.get(message.name)):
                    child.take(message)
        except OSError as error:
            self.lose(f"its agent has gone ({error})")
        except Exception as error:  # it may say anything
            self.lose(f"its agent said what it cannot mean ({type(error).__name__}: {error})")

    async def _renew(self) -> None:
        """Tell the agent that the pool is there, and give it up when it says nothing for too long."""
        while not self.lost.done():
            silent = time.monotonic() - self._heard
            if silent > self._lease + PATIENCE_SECONDS:
                self.lose(f"it has said nothing for {silent:.0f} s")
                return
            with contextlib.suppress(PoolLost):
                await self._say(messages.Renew())
            await asyncio.sleep(min(_RENEW_SECONDS, self._lease / 4))


def _move(draft: Path, into: Path) -> None:
    """Put files in place one by one. Blocks."""
    for file in draft.iterdir():
        file.replace(into / file.name)
    draft.rmdir()
