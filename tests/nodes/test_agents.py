"""An agent obeys one pool, whose end is its own; nothing of either is left behind."""

import asyncio
import contextlib
import hashlib
import os
import signal
import ssl
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from lorad.box import gpu_locks
from lorad.children.identity import start_time
from lorad.errors import Conflict, IntegrityError, NotAllowed, PoolLost, SpecError, StorageError
from lorad.nodes import agent, remote
from lorad.nodes.certificates import Credentials
from lorad.nodes.child import RemoteChild
from lorad.nodes.devices import interface_of
from lorad.nodes.messages import Done, FileEntry, Hello
from lorad.nodes.remote import Node
from lorad.nodes.streams import Broken, answer_of, drop, inside, write
from lorad.protocol.nodes import GrantedNode
from tests.nodes.kit import LIFE, Agents, nodes, setup

shared = pytest.mark.asyncio(loop_scope="module")
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
ECHO = """
import socket, sys
server = socket.socket(socket.AF_UNIX); server.bind(sys.argv[1]); server.listen()
print("up", flush=True)
while True:
    peer, _ = server.accept()
    while data := peer.recv(4096): peer.sendall(data.upper())
    peer.close()
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    """One for all tests that leave it alive."""
    async with nodes(tmp_path_factory.mktemp("agents")) as (_, hosts):
        yield hosts[0]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path, lease=1.0)
    yield agents
    agents.end()


def child(node: Node, log: Path, code: str, *arguments: str, name: str = "child") -> RemoteChild:
    return node.child(name, [sys.executable, "-c", code, *arguments], {}, log=log, files={})


async def logged(log: Path, words: str) -> None:
    async with asyncio.timeout(20):
        while not log.exists() or words not in log.read_text():  # noqa: ASYNC110, ASYNC240 (a file is polled)
            await asyncio.sleep(0.02)


def is_there(told: GrantedNode) -> bool:
    return Path(told.directory).exists()


async def ends(*pids: int) -> None:
    async with asyncio.timeout(20):
        while any(start_time(pid) is not None for pid in pids):  # noqa: ASYNC110 (it is polled)
            await asyncio.sleep(0.02)


@shared
async def test_a_remote_child_looks_like_a_child(node: Node, tmp_path: Path) -> None:
    code = "import sys; print('one'); print('two', end=''); sys.exit(3)"
    process = child(node, tmp_path / "log", code)
    await process.start()
    assert await process.ended() == "exited with code 3" and not process.is_alive
    assert process.output.tail() == f"{node.name}: one\n{node.name}: two"
    await process.stop()


@shared
async def test_a_character_that_is_cut_arrives(node: Node, tmp_path: Path) -> None:
    code = r"import os, time; os.write(1, b'caf\xc3'); time.sleep(0.6); os.write(1, b'\xa9\n')"
    process = child(node, tmp_path / "log", code)
    await process.start()
    await process.ended()
    assert process.output.tail() == f"{node.name}: café"


@shared
async def test_an_endless_line_is_not_kept(node: Node, tmp_path: Path) -> None:
    """It shows while it grows, in pieces."""
    code = "import time; print('x' * 200_000, end='', flush=True); time.sleep(600)"
    process = child(node, tmp_path / "log", code)
    await process.start()
    await logged(tmp_path / "log", "x" * 60_000)
    await process.stop()
    assert (tmp_path / "log").read_text().count("x") == 200_000


@shared
async def test_a_start_that_is_cancelled_ends_it(node: Node, tmp_path: Path) -> None:
    os.kill(node.granted.pid, signal.SIGSTOP)
    mark = f"cancelled {uuid.uuid4()}"
    starting = asyncio.create_task(child(node, tmp_path / "log", STUBBORN, mark).start())
    await asyncio.sleep(0.05)
    starting.cancel()
    await asyncio.sleep(0.05)
    os.kill(node.granted.pid, signal.SIGCONT)
    with pytest.raises(asyncio.CancelledError):
        await starting
    await node.digest("absent")  # the agent has taken up what was asked before
    assert not [p for p in psutil.process_iter() if mark in " ".join(_command(p))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@shared
async def test_a_child_may_remove_its_directory(node: Node, tmp_path: Path) -> None:
    code = "import os, shutil, time; shutil.rmtree(os.getcwd()); time.sleep(0.6)"
    process = child(node, tmp_path / "log", code)
    await process.start()
    async with asyncio.timeout(20):
        assert await process.ended() == "exited with code 0"


@shared
async def test_a_remote_child_is_stopped_or_killed(node: Node, tmp_path: Path) -> None:
    process = child(node, tmp_path / "log", STUBBORN)
    await process.start()
    await logged(tmp_path / "log", "up")
    with pytest.raises(Conflict, match="child runs already on h1"):
        await child(node, tmp_path / "log", STUBBORN).start()
    await process.stop(grace=0.1)
    assert await process.ended() == "was killed by SIGKILL"


@shared
async def test_files_arrive_whole_and_return(node: Node, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    source.mkdir()
    back.mkdir()
    (source / "a.bin").write_bytes(os.urandom(3 << 20))
    (source / "b").write_bytes(b"")
    path = await node.put("adapters/run@1", source)
    assert (path / "a.bin").read_bytes() == (source / "a.bin").read_bytes()
    digest = hashlib.sha256((source / "a.bin").read_bytes()).hexdigest()
    assert await node.digest("adapters/run@1/a.bin") == digest
    await node.fetch("adapters/run@1", back)
    assert {file.name: file.read_bytes() for file in back.iterdir()} == {
        file.name: file.read_bytes() for file in source.iterdir()
    }
    await node.remove("adapters/run@1")
    assert not path.exists() and await node.digest("adapters/run@1/a.bin") == ""


async def half_put(node: Node, data: bytes, said: FileEntry) -> None:
    """Put a directory whose only file is announced as `said`."""
    reader, writer = await asyncio.open_connection(node.address, node.granted.port, ssl=node._context)
    await write(writer, Hello(kind="put", life=LIFE, name="adapters/odd", files=(said,)))
    await answer_of(reader, Done)
    writer.write(data)
    await writer.drain()
    try:
        if len(data) >= said.size:
            await answer_of(reader, Done)
    finally:
        writer.close()


@shared
async def test_a_flipped_byte_leaves_nothing(node: Node) -> None:
    said = FileEntry("a", 3, hashlib.sha256(b"abc").hexdigest())
    with pytest.raises(IntegrityError, match="a: other bytes arrived than were sent"):
        await half_put(node, b"abd", said)
    assert list((node.directory / "adapters").iterdir()) == []


@shared
async def test_a_cut_put_leaves_nothing(node: Node) -> None:
    await half_put(node, b"ab", FileEntry("a", 3, ""))
    async with asyncio.timeout(10):
        while list((node.directory / "adapters").iterdir()):  # noqa: ASYNC110 (it is polled)
            await asyncio.sleep(0.02)


@shared
async def test_a_full_place_is_named(node: Node, tmp_path: Path) -> None:
    tmp_path.joinpath("a").write_bytes(b"x")
    with pytest.raises(StorageError, match=r"^h1: /.*absent/x could not be written: No such file"):
        await node.put("absent/x", tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc", "a/../../b", "", "a//b", "..", "a\nb"])
def test_paths_stay_in_the_directory(name: str) -> None:
    with pytest.raises(Broken, match="is no path in a node's directory"):
        inside(Path("/place"), name)


@shared
async def test_a_server_is_reached_by_its_tunnel(node: Node, tmp_path: Path) -> None:
    server = child(node, tmp_path / "log", ECHO, str(node.directory / "echo.sock"), name="echo")
    await server.start()
    await logged(tmp_path / "log", "up")
    async with node.outward("echo.sock", node.directory / "here.sock"):
        for text in (b"one", b"two"):
            reader, writer = await asyncio.open_unix_connection(str(node.directory / "here.sock"))
            writer.write(text)
            assert await reader.readexactly(3) == text.upper()
            writer.close()
    await server.stop(0.1)


@shared
async def test_nobody_behind_a_tunnel_ends_it(node: Node) -> None:
    async with node.outward("nobody.sock", node.directory / "here.sock"):
        reader, writer = await asyncio.open_unix_connection(str(node.directory / "here.sock"))
        assert await reader.read() == b""
        writer.close()


@shared
async def test_another_life_or_head_is_refused(node: Node) -> None:
    reader, writer = await asyncio.open_connection(node.address, node.granted.port, ssl=node._context)
    await write(writer, Hello(kind="put", life="pool@2"))
    with pytest.raises(NotAllowed, match="this agent is of pool@1, not of pool@2"):
        await answer_of(reader, Done)
    writer.close()
    reader, writer = await asyncio.open_connection(node.address, node.granted.port, ssl=node._context)
    await write(writer, Hello(kind="control", life=LIFE))
    with pytest.raises(Conflict, match="pool@1 leads this agent already"):
        await answer_of(reader, Done)
    writer.close()


@shared
async def test_connections_may_be_dropped_when_closed(node: Node) -> None:
    _, writer = await asyncio.open_connection(node.address, node.granted.port, ssl=node._context)
    for _ in range(2):
        writer.close()
    drop(writer)
    assert writer.is_closing()


async def attempt(told: GrantedNode, context: ssl.SSLContext | None) -> bytes:
    reader, writer = await asyncio.open_connection(told.ip, told.port, ssl=context)
    try:
        await write(writer, Hello(kind="control", life=LIFE))
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.transport.abort()


async def test_only_the_pools_certificate_opens(agents: Agents, tmp_path: Path) -> None:
    told = await agents.granted("h1")
    stranger = Credentials("stranger", tmp_path)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(cadata=told.certificate)
    for context in (stranger.context(told.certificate), bare, None):
        with contextlib.suppress(OSError):
            assert await attempt(told, context) == b""
    impostor = msgspec.structs.replace(told, certificate=stranger.pem)
    with pytest.raises(PoolLost, match="CERTIFICATE_VERIFY_FAILED"):
        async with Node.connected(impostor, agents.credentials, LIFE, setup()):
            pass
    async with Node.connected(told, agents.credentials, LIFE, setup()):
        pass


async def test_another_version_is_refused(agents: Agents) -> None:
    told = msgspec.structs.replace(await agents.granted("h1"), lorad="0.0.0")
    with pytest.raises(SpecError, match=r"h1 has lorad 0\.0\.0, and this machine"):
        async with Node.connected(told, agents.credentials, LIFE, setup()):
            pass


@pytest.mark.parametrize("link", ["silence", "connection", "starter", "SIGTERM twice"])
async def test_an_agent_ends_with_its_pool(agents: Agents, tmp_path: Path, link: str) -> None:
    agents.lease = 1.0 if link == "silence" else 60.0
    told = await agents.granted("h1")
    process = agents.processes["h1"]
    assert process.stdin is not None
    async with Node.connected(told, agents.credentials, LIFE, setup(lease=60.0)) as node:
        stubborn = child(node, tmp_path / "log", STUBBORN)
        await stubborn.start()
        assert stubborn.pid is not None
        if link == "silence":
            node._tasks[1].cancel()
        elif link == "connection":
            node._writer.transport.abort()
        elif link == "starter":
            process.stdin.close()
        else:
            process.send_signal(signal.SIGTERM)
            await node.leaving
            process.send_signal(signal.SIGTERM)
        await ends(stubborn.pid, told.pid)
        await stubborn.ended()
        assert process.wait(10) == 0 and not is_there(told)


async def test_an_agent_asks_to_be_let_go(agents: Agents, tmp_path: Path) -> None:
    """At SIGTERM; what runs there runs on until then."""
    agents.lease = 60.0
    told = await agents.granted("h1")
    async with Node.connected(told, agents.credentials, LIFE, setup(lease=60.0)) as node:
        stubborn = child(node, tmp_path / "log", STUBBORN)
        await stubborn.start()
        agents.processes["h1"].send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            await node.leaving
        assert await node.digest("absent") == "" and stubborn.is_alive and stubborn.pid is not None
    await ends(stubborn.pid, told.pid)
    assert agents.processes["h1"].wait(10) == 0


@pytest.mark.system
@pytest.mark.parametrize("asks", ["SIGTERM", "pool"])
async def test_a_leaving_agent_outlives_its_starter(agents: Agents, tmp_path: Path, asks: str) -> None:
    """`ray stop` ends the actor that holds its stdin at once; the pool lets it go after its step."""
    agents.lease = 60.0
    told = await agents.granted("h1")
    process = agents.processes["h1"]
    assert process.stdin is not None
    async with Node.connected(told, agents.credentials, LIFE, setup(lease=60.0)) as node:
        stubborn = child(node, tmp_path / "log", STUBBORN)
        await stubborn.start()
        if asks == "SIGTERM":
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(node.leaving, 10)
            process.stdin.close()
        else:
            process.stdin.close()
            await node.leave()
        await asyncio.sleep(agent._WORD_SECONDS + 0.5)
        assert await node.digest("absent") == "" and stubborn.is_alive and stubborn.pid is not None
    await ends(stubborn.pid, told.pid)
    assert process.wait(10) == 0


async def test_an_agent_without_a_pool_ends_at_once(agents: Agents) -> None:
    told = await agents.granted("h1")
    agents.processes["h1"].send_signal(signal.SIGTERM)
    await ends(told.pid)


async def test_a_busy_pool_keeps_its_lease(agents: Agents, tmp_path: Path) -> None:
    told = await agents.granted("h1")
    async with Node.connected(told, agents.credentials, LIFE, setup(lease=1.0)) as node:
        await asyncio.sleep(1.5)
        assert await node.digest("absent") == ""


@pytest.mark.parametrize("line", [b"nonsense\n", b'{"type": "Failed", "id": 7, "error": {"kind": []}}\n'])
async def test_an_agent_that_talks_nonsense_is_lost(agents: Agents, line: bytes) -> None:
    agents.lease = 60.0
    told = await agents.granted("h1")
    async with Node.connected(told, agents.credentials, LIFE, setup()) as node:
        node._waiting[7] = asyncio.get_running_loop().create_future()
        node._reader.feed_data(line)
        async with asyncio.timeout(10):
            await node.lost
        with pytest.raises(PoolLost, match="was lost with its node h1"):
            await node._waiting[7]


async def test_a_silent_agent_is_given_up(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 0.5)
    told = await agents.granted("h1")
    async with Node.connected(told, agents.credentials, LIFE, setup(lease=1.0)) as node:
        os.kill(told.pid, signal.SIGSTOP)
        async with asyncio.timeout(10):
            assert "it has said nothing for" in await node.lost
        with pytest.raises(PoolLost, match="was lost with its node h1"):
            await node.digest("x")


async def test_agents_give_up_before_their_pool(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was on the node has ended by the time that the pool believes it to be lost."""
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 6.0)
    told = await agents.granted("h1")
    async with (
        wire(told) as (through, cut),
        Node.connected(through, agents.credentials, LIFE, setup(lease=1.0)) as node,
    ):
        cut.set()
        await ends(told.pid)
        assert not node.lost.done()
        async with asyncio.timeout(20):
            assert "it has said nothing for" in await node.lost


@contextlib.asynccontextmanager
async def wire(told: GrantedNode) -> AsyncIterator[tuple[GrantedNode, asyncio.Event]]:
    """An agent behind a network that is cut, in silence, when the event is set."""
    cut, ends = asyncio.Event(), list[asyncio.StreamWriter]()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if not cut.is_set():
                    writer.write(data)

    async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, here = await asyncio.open_connection(told.ip, told.port)
        ends.extend([writer, here])
        await asyncio.gather(pump(reader, here), pump(there, writer))

    server = await asyncio.start_server(called, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield msgspec.structs.replace(told, ip="127.0.0.1", port=port), cut
    server.close()
    for end in ends:
        end.transport.abort()
    await asyncio.sleep(0)


@pytest.mark.system
async def test_a_held_gpu_is_not_granted_twice(agents: Agents) -> None:
    """Whatever is left of a killed agent's children holds it too; and each of these has another TMPDIR."""
    gpu, locks = f"GPU-{uuid.uuid4()}", gpu_locks.DIRECTORY
    held = gpu_locks.take_lock(locks, gpu)
    try:
        said = await agents.said(agents.begin("h1", "127.0.0.1", [gpu]))
        assert said["kind"] == "Refused" and f"{gpu} is held by another process" in said["words"]
        os.close(held)
        told = await agents.said(agents.begin("h1", "127.0.0.1", [gpu]))
        assert told["devices"] == [gpu]
        said = await agents.said(agents.begin("h2", "127.0.0.2", [gpu]))
        assert said["kind"] == "Refused" and f"{gpu} is held by another process" in said["words"]
    finally:
        gpu_locks.make_lock(locks, gpu).unlink()


async def test_odd_devices_are_refused(agents: Agents) -> None:
    said = await agents.said(agents.begin("h1", "127.0.0.1", ["../x"]))
    assert said["kind"] == "Refused" and "is no GPU" in said["words"]


def test_the_interface_is_that_of_the_address() -> None:
    assert interface_of("127.0.0.2") == "lo" and interface_of("203.0.113.7") == ""


@pytest.mark.system
async def test_a_new_agent_clears_what_is_left(agents: Agents, tmp_path: Path) -> None:
    told = await agents.granted("h1")
    async with Node.connected(told, agents.credentials, LIFE, setup()) as node:
        process = child(node, tmp_path / "log", STUBBORN)
        await process.start()
        agents.processes["h1"].kill()
        assert process.pid is not None
        await ends(process.pid)
    assert is_there(told)
    await agents.granted("h1", "127.0.0.2")
    assert not is_there(told)
