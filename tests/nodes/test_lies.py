"""A node that lies: what it says is refused in words, and costs its pool neither disk nor for ever."""

import asyncio
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lorad
from lorad.errors import LoradError, NotAllowed, PoolLost, StorageError
from lorad.grants import static
from lorad.grants.grant import Grant
from lorad.nodes import remote, streams
from lorad.nodes.certificates import Credentials
from lorad.nodes.messages import LINE, Digest, Done, FileEntry, Files, Hello, Renew, Spawn
from lorad.nodes.remote import Node
from lorad.nodes.streams import Pair, read, write
from lorad.protocol.nodes import GrantedNode, GrantRequest, StaticNode
from tests.nodes.kit import LIFE, setup

DEEP = b'{"type": "Failed", "error": {"message": ' + b"[" * 50_000 + b"]" * 50_000 + b"}}\n"
Greets = Callable[[Hello, Pair], Any]


@contextlib.asynccontextmanager
async def leading(directory: Path, greets: Greets) -> AsyncIterator[Node]:
    """Lead a node whose agent says to each connection what `greets` does."""
    pool, own = Credentials("pool", directory), Credentials("node", directory)

    async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await greets(await read(reader, Hello), (reader, writer))
            await reader.read()
        writer.close()

    server = await asyncio.start_server(
        called, "127.0.0.1", 0, ssl=own.context(pool.pem, is_server=True), limit=LINE
    )
    port = server.sockets[0].getsockname()[1]
    told = msgspec.structs.replace(TOLD, port=port, certificate=own.pem)
    try:
        async with Node.connected(told, pool, LIFE, setup()) as node:
            yield node
    finally:
        server.close()


TOLD = GrantedNode(
    node="h1",
    ip="127.0.0.1",
    port=1,
    certificate="",
    boot_id="",
    directory="/",
    pid=1,
    lorad=lorad.__version__,
    uid=os.getuid(),
)


async def obeys(pair: Pair, pid: str = "1") -> None:
    """Answer all that is asked by the control connection."""
    await write(pair[1], Done())
    while True:
        asked = await read(pair[0], Spawn | Renew)  # type: ignore[arg-type]
        await write(pair[1], Done(id=asked.id, value=pid))


@pytest.mark.parametrize("pid", ["", "-1", "one", "9" * 5000])
async def test_what_is_no_pid_is_no_child(tmp_path: Path, pid: str) -> None:
    async def greets(_: Hello, pair: Pair) -> None:
        await obeys(pair, pid)

    async with leading(tmp_path, greets) as node:
        with pytest.raises(PoolLost, match="h1 started x, and told no pid"):
            await node.child("x", ["x"], {}, log=tmp_path / "log", files={}).start()


async def test_an_answer_comes_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_ANSWER_SECONDS", 0.3)

    async def greets(_: Hello, pair: Pair) -> None:
        await write(pair[1], Done())
        while True:
            await read(pair[0], Digest | Renew)  # type: ignore[arg-type]
            await write(pair[1], Done(id=0))

    async with asyncio.timeout(20), leading(tmp_path, greets) as node:
        with pytest.raises(PoolLost, match="node h1 does not answer"):
            await node.digest("x")


@pytest.mark.parametrize("says", [DEEP, b""], ids=["deep", "nothing"])
async def test_a_greeting_ends_in_time(tmp_path: Path, says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_CONNECT_SECONDS", 1.0)

    async def greets(_: Hello, pair: Pair) -> None:
        pair[1].write(says)

    with pytest.raises(PoolLost, match="node h1 does not answer"):
        async with asyncio.timeout(20), leading(tmp_path, greets):
            pass


@pytest.mark.parametrize(
    ("size", "refuses", "words"),
    [(1 << 60, StorageError, "would have .* bytes"), (2, PoolLost, "node h1 does not answer: a stopped")],
    ids=["endless", "silent"],
)
async def test_a_fetch_is_bounded(
    tmp_path: Path, size: int, refuses: type[LoradError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_SILENT_SECONDS", 0.3)
    said = FileEntry("a", size, hashlib.sha256(b"aa").hexdigest())

    async def greets(hello: Hello, pair: Pair) -> None:
        if hello.kind == "control":
            await obeys(pair)
        await write(pair[1], Files(files=(said,)))
        pair[1].write(b"a")

    async with asyncio.timeout(20), leading(tmp_path, greets) as node:
        with pytest.raises(refuses, match=words):
            await node.fetch("x", tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp")]


@pytest.mark.parametrize("lie", [{"node": "h2"}, {"ip": "127.0.0.9"}, {"port": 70_000}, {"node": "\x1b[31m"}])
async def test_an_agent_is_who_was_asked(tmp_path: Path, lie: dict[str, Any]) -> None:
    line = json.dumps(msgspec.to_builtins(TOLD) | lie)
    node = StaticNode(name="h1", address="127.0.0.1", command=("sh", "-c", f"echo '{line}'; cat >/dev/null"))
    request = GrantRequest(setup=setup(python=sys.executable), life=LIFE, socket="", certificate="", agent=())
    refused = await static._try(node, request)
    assert isinstance(refused, str) and refused.startswith("h1: ") and refused.isprintable()


@pytest.mark.parametrize(
    "lie", [{"node": "h1"}, {"node": "h\n2"}, {"node": "h" * 300}, {"devices": ("GPU-a",)}], ids=str
)
def test_a_grant_is_what_was_asked(tmp_path: Path, lie: dict[str, Any]) -> None:
    grant = Grant(setup(), LIFE, tmp_path, tmp_path)
    grant._check(TOLD)
    grant._nodes["h1"] = Node.__new__(Node)
    with pytest.raises(NotAllowed, match=r"a node says|says that it has 1 devices"):
        grant._check(msgspec.structs.replace(TOLD, **{"node": "h2"} | lie))
