"""Serve a pool on a node: `python -P -m lorad.nodes.agent --life POOL@LIFE --address IP --lease S`.

It starts children under guards for the pool of that life, and for nobody else. The first line of stdin is
`AgentStart`, the only line of stdout `GrantedNode`, or `Refused`. It ends everything and itself when stdin or
the pool's connection does, and when the pool has said nothing for `--lease` seconds. SIGTERM asks the pool to
let it go, after the step of its runs, and `Leave` does the same, for which it outlives its stdin; a second
SIGTERM ends it at once.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

import lorad
from lorad.box.ran_out import RanOut
from lorad.children.identity import boot_id
from lorad.errors import Conflict, LoradError, NotAllowed, StorageError, to_wire
from lorad.nodes import streams
from lorad.nodes.certificates import Credentials, check_peer, is_peer
from lorad.nodes.control import Control
from lorad.nodes.devices import interface_of, memory_of, take_devices
from lorad.nodes.messages import LINE, Done, Failed, Files, Hello
from lorad.nodes.places import Places
from lorad.nodes.relay import Relay
from lorad.protocol.nodes import AgentStart, GrantedNode, Refused

log = logging.getLogger(__name__)
_FIRST_SECONDS = 60.0  # for the pool's first word: other nodes may come later
_HELLO_SECONDS = 10.0
_GRACE_SECONDS = 3.0  # of children, once the agent ends
_WORD_SECONDS = 8.0  # without a starter, for the pool to say that it takes its runs away
_LEAVE_SECONDS = 120.0  # for doing so
_START_BYTES = 1 << 20


class Agent:
    """Serves the one pool whose life has this name, and ends when that is silent for `lease` seconds."""

    def __init__(self, life: str, lease: float, start: AgentStart, places: Places, name: str) -> None:
        self.life = life
        self.lease = lease
        self.start = start
        self.places = places
        self._name = name
        self.credentials = Credentials(f"lorad node {name}", places.directory)
        self.context = self.credentials.context(start.certificate, is_server=True)
        self.control = Control(places.directory, self._trust, self.outlive_starter)
        self._peers: set[str] = set()
        self.ending: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._renewed = asyncio.Event()
        self._is_led = self._is_leaving = False
        self._last: asyncio.TimerHandle | None = None

    def leave(self) -> None:
        """Ask the pool to let the agent go; end at the second time, and where there is no pool."""
        if self._is_leaving or not self.control.leave():
            self.end("it was ended by SIGTERM")
        self._is_leaving = True

    def orphaned(self) -> None:
        """End soon, unless the pool says that it takes its runs away; at once where there is no pool."""
        seconds = (_LEAVE_SECONDS if self._is_leaving else _WORD_SECONDS) if self._is_led else 0.0
        self._last = asyncio.get_running_loop().call_later(seconds, self.end, "whoever started it is gone")

    def outlive_starter(self) -> None:
        """Live until the pool lets the agent go."""
        if not self._is_leaving:
            self.leave()
        if self._last:
            self._last.cancel()
            self.orphaned()

    def end(self, why: str) -> None:
        if not self.ending.done():
            self.ending.set_result(why)

    async def watch(self) -> None:
        """End when the pool says nothing for too long."""
        patience = max(_FIRST_SECONDS, self.lease)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._renewed.wait()
            if not self._renewed.is_set():
                self.end(f"the pool has said nothing for {patience:.0f} s")
                return
            self._renewed.clear()
            patience = self.lease

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = reader, writer
        try:
            if not (passes_on := is_peer(writer, *self._peers)):
                check_peer(writer, self.start.certificate)
            streams.never_hangs(writer, self.lease)
            async with asyncio.timeout(_HELLO_SECONDS):
                hello = await streams.read(reader, Hello)
            if passes_on and hello.kind != "put":
                raise NotAllowed(f"another agent asked for {hello.kind}")
            try:
                await self._serve(hello, pair)
            except (LoradError, OSError) as error:
                await streams.write(writer, Failed(error=to_wire(streams.as_error(error))))
        except (OSError, NotAllowed) as error:
            log.debug("a connection ended: %s", error)
        except asyncio.CancelledError:  # at the end of the agent; asyncio of Python 3.11 would print it
            pass
        finally:
            writer.close()

    async def _serve(self, hello: Hello, pair: streams.Pair) -> None:
        """Do what a connection is for. Raises LoradError for what is refused."""
        if hello.life != self.life:
            raise NotAllowed(
                f"this agent is of {self.life}, not of {hello.life}", hint="Ask for a node again."
            )
        if hello.kind == "control":
            if self._is_led:
                raise Conflict(
                    f"{self.life} leads this agent already",
                    hint="An agent has one pool; ask for a node again.",
                )
            self._is_led = True
            try:
                await streams.write(pair[1], Done())
                self._renewed.set()
                await self.control.serve(pair, self._renewed)
            finally:
                self.end("the pool has closed its connection")
            return
        path = streams.inside(self.places.directory, hello.name)
        if hello.kind == "tunnel":
            server = await asyncio.open_unix_connection(str(path))
            await streams.write(pair[1], Done())
            await streams.splice(pair, server)
        elif hello.kind == "serve":
            await self._listen(path, pair)
        elif hello.kind == "put":
            await self._put(hello, path, pair)
        else:
            files = await asyncio.to_thread(streams.list_files, path)
            await streams.write(pair[1], Files(files=files))
            await streams.send_files(pair[1], path, files)

    def _trust(self, certificates: Iterable[str]) -> None:
        for certificate in set(certificates) - self._peers - {self.credentials.pem}:
            self._peers.add(certificate)
            self.context.load_verify_locations(cadata=certificate)

    async def _put(self, hello: Hello, path: Path, pair: streams.Pair) -> None:
        relay = Relay(self.credentials, self.life, self.lease, hello.to)
        await streams.write(pair[1], Done())
        try:
            await relay.open(hello.name, hello.files)
            try:
                await streams.receive_files(pair[0], path, hello.files, relay.send)
            except StorageError as error:
                raise StorageError(f"{self._name}: {error.message}", hint=error.hint) from error
            failed = await relay.close()
        finally:
            relay.abort()
        await streams.write(pair[1], Done(value=str(path), failed=failed))

    async def _listen(self, path: Path, pair: streams.Pair) -> None:
        """Join the first caller to the pool; the others are sent away."""
        caller: asyncio.Future[streams.Pair] = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if caller.done():
                writer.close()
            else:
                caller.set_result((reader, writer))

        async with streams.listening(path, accept):
            gone = asyncio.create_task(pair[0].read(1))  # the pool says nothing before
            try:
                await streams.write(pair[1], Done())
                awaited: set[asyncio.Future[Any]] = {caller, gone}
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                await asyncio.wait({gone})
        if caller.done():
            await streams.write(pair[1], Done())
            await streams.splice(pair, caller.result())


async def _run(arguments: argparse.Namespace, start: AgentStart) -> None:
    with Places.make() as places:
        agent = Agent(arguments.life, arguments.lease, start, places, arguments.name)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(RanOut())
        server = await asyncio.start_server(
            agent.connected, arguments.address, 0, ssl=agent.context, limit=LINE
        )
        _print(
            GrantedNode(
                node=arguments.name,
                ip=arguments.address,
                port=server.sockets[0].getsockname()[1],
                certificate=agent.credentials.pem,
                boot_id=boot_id(),
                directory=str(places.directory),
                devices=start.devices,
                pid=os.getpid(),
                lorad=lorad.__version__,
                uid=os.getuid(),
                interface=interface_of(arguments.address),
                memory=memory_of(start.devices),
            )
        )

        def stdin_changed() -> None:
            """End with whoever holds stdin open."""
            if not os.read(0, 4096):
                loop.remove_reader(0)
                agent.orphaned()

        loop.add_reader(0, stdin_changed)
        loop.add_signal_handler(signal.SIGTERM, agent.leave)
        loop.add_signal_handler(signal.SIGINT, agent.end, "it was ended by SIGINT")
        watch = asyncio.create_task(agent.watch())
        why = await agent.ending
        watch.cancel()
        print(f"lorad node {arguments.name}: {why}; it ends", file=sys.stderr, flush=True)
        server.close()
        await agent.control.stop(_GRACE_SECONDS)


def _print(message: msgspec.Struct) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="lorad.nodes.agent", description=__doc__)
    parser.add_argument("--life", required=True)
    parser.add_argument("--address", required=True, help="the IP to listen at")
    parser.add_argument("--lease", type=float, required=True, help="seconds")
    parser.add_argument("--name", default=socket.gethostname(), help="of the node")
    arguments = parser.parse_args()
    try:
        data = b""
        while not data.endswith(b"\n") and len(data) < _START_BYTES and (more := os.read(0, 1)):
            data += more
        start = msgspec.json.decode(data, type=AgentStart)
        start = msgspec.structs.replace(start, devices=take_devices(start.devices))
        asyncio.run(_run(arguments, start))
    except (LoradError, OSError, ValueError) as error:
        hint = error.hint if isinstance(error, LoradError) else ""
        _print(Refused(f"{arguments.name}: {error}", hint))
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
