"""No other user of the box reaches a server of lorad's, its adapters, or what its processes say to each
other.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from lorad.engines.base import BASE, Engine
from lorad.engines.remote.engine import RemoteEngine
from tests.conformance.engine_suite import CANARY, EngineSuite
from tests.engines.real.places import SECRET, SHAPES
from tests.kit.fakes.random_adapters import random_adapter

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

NOBODY = 65534
STRANGER = Path(__file__).with_name("stranger.py")
HARMLESS = ("GET", "/v1/models")
ROUTES = {
    "sglang": [
        HARMLESS,
        *(("GET", route) for route in ("/health", "/server_info", "/metrics", "/flush_cache")),
        *(
            ("POST", route)
            for route in ("/generate", "/load_lora_adapter", "/unload_lora_adapter", "/flush_cache")
        ),
    ],
    "vllm": [
        HARMLESS,
        *(("GET", route) for route in ("/health", "/server_info", "/metrics")),
        *(
            ("POST", route)
            for route in ("/adapters", "/collective_rpc", "/invocations", "/v1/load_lora_adapter")
        ),
    ],
}


@dataclass
class Found:
    """What there is to attack: of all processes of one server."""

    front: Path  # the socket that it serves on
    processes: list[psutil.Process]
    sockets: list[str]
    ports: list[tuple[str, int]]
    paths: list[str]


@pytest_asyncio.fixture(loop_scope="session")
async def found(engine: Engine, server: RemoteEngine, work: Path, tmp_path: Path) -> Found:
    """Look at what others can see while a version is loaded, so that its directory exists."""
    await EngineSuite().load(engine, "run@1", random_adapter(SHAPES, 1), tmp_path)
    return look(server, work)


def look(server: RemoteEngine, work: Path) -> Found:
    one = server._fleet.servers[0]
    front = one.http.address.socket
    assert front is not None and one.process is not None and one.process.pid is not None
    root = psutil.Process(one.process.pid)
    processes = [root, *root.children(recursive=True)]
    connections = [connection for process in processes for connection in process.net_connections("all")]
    listening = {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
    unix = {str(c.laddr) for c in connections if c.family == socket.AF_UNIX and c.laddr}
    transport = server._holdings._transport.root
    mapped = {
        m.path for process in processes for m in process.memory_maps() if m.path.startswith("/dev/shm/")
    }
    directories = {front.parent, work, transport}
    paths = directories | {path for directory in directories for path in directory.rglob("*")}
    files = {str(path) for path in paths if not path.is_socket()} | {
        path for path in mapped if Path(path).exists()
    }
    return Found(front, processes, sorted(unix), sorted(listening), sorted(files))


def attack(kind: str, found: Found, user: int = NOBODY) -> dict[str, dict[str, str]]:
    plan = {"sockets": found.sockets, "ports": found.ports, "paths": found.paths, "routes": ROUTES[kind]}
    command = [sys.executable, "-I", str(STRANGER), str(user)]
    done = subprocess.run(
        command, input=json.dumps(plan), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.fixture
def web_server() -> Iterator[tuple[str, int]]:
    """A port that answers HTTP."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield ("127.0.0.1", server.server_port)
        server.shutdown()
        thread.join()


def test_the_owner_reaches_what_others_do_not(kind: str, found: Found, web_server: tuple[str, int]) -> None:
    """So that the tests below can fail."""
    found.ports, found.sockets = [web_server], [str(found.front)]
    answers = attack(kind, found, os.getuid())
    assert answers["sockets"] == {str(found.front): "HTTP 200"}
    assert set(answers["ports"].values()) == {"HTTP 501"}
    assert set(answers["paths"].values()) == {"read"}
    assert any(path.endswith("adapter_model.safetensors") for path in answers["paths"])


def test_another_user_reaches_no_socket_and_reads_nothing(kind: str, found: Found) -> None:
    found.ports = []
    answers = attack(kind, found)
    assert str(found.front) in answers["sockets"]
    assert {place: got for place, got in answers["sockets"].items() if got != "EACCES"} == {}
    assert {path: got for path, got in answers["paths"].items() if got != "EACCES"} == {}


def test_no_socket_lacks_a_path_that_guards_it(found: Found) -> None:
    """An abstract one (its name begins with NUL) would be open to everybody."""
    assert [name for name in found.sockets if not name.startswith("/")] == []
    assert found.front.stat().st_mode & 0o077 == 0


async def test_no_port_of_any_process_answers_http(kind: str, found: Found, engine: Engine) -> None:
    found.sockets, found.paths = [], []
    before = await engine.score(BASE, CANARY)
    answers = attack(kind, found)["ports"]
    assert {place: got for place, got in answers.items() if got.startswith("HTTP")} == {}
    assert EngineSuite().same(before, await engine.score(BASE, CANARY), engine)


def test_no_argv_or_log_holds_a_secret(found: Found, work: Path) -> None:
    told = [" ".join(process.cmdline()) for process in found.processes]
    told += [log.read_text(errors="replace") for log in work.glob("*.log")]
    assert len(told) > 3
    assert [text for text in told if SECRET in text or "api-key" in text] == []
