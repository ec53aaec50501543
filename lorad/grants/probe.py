"""Tries out the nodes of a cluster for `lorad doctor --cluster`: `python -m lorad.grants.probe QUESTION`.

It takes a grant of processors alone, looks around on every node, and gives it back. Findings are JSON lines.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lorad.children.interpreter import InterpreterFinding
from lorad.errors import LoradError
from lorad.grants.grant import hold_nodes
from lorad.models.directory import resolve
from lorad.models.facts import weights_sha256
from lorad.nodes.remote import Node
from lorad.protocol.nodes import GRANT, GrantStatus, NodesSetup
from lorad.text import size

_PUT_BYTES = 10 << 20
_LOOK = """
import json, os, platform, shutil, subprocess, sys
def asked(*argv):
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        return done.stdout.strip() if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired):
        return None
wanted = json.loads(sys.argv[1])
gpus = asked("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader") or ""
version = "import platform; print(platform.python_version())"
print(json.dumps({
    "python": platform.python_version(), "free": shutil.disk_usage(".").free, "gpus": gpus.split(),
    "interpreters": {path: asked(path, "-I", "-c", version) for path in wanted["interpreters"]},
    "bases": {path: os.path.isdir(path) for path in wanted["bases"]},
}))
"""


class Asked(Struct, frozen=True, kw_only=True):
    """Says which nodes to try out, and what they should have.

    setup: what the grant is asked for.
    devices: how many GPUs config.yaml says of a node, by its name.
    interpreters: the backend of each interpreter, by its path.
    bases: directories of base models.
    seconds: how long to wait for the grant.
    """

    setup: NodesSetup
    devices: dict[str, int] = {}
    interpreters: dict[str, str] = {}
    bases: tuple[str, ...] = ()
    seconds: float = 90.0


class _ProbedNode(Struct, frozen=True):
    python: str
    free: int
    gpus: list[str]
    interpreters: dict[str, str | None]
    bases: dict[str, bool]


async def _probe(asked: Asked, work: Path) -> None:
    waiting = asyncio.timeout(asked.seconds)
    began = time.monotonic()
    try:
        async with waiting, hold_nodes(asked.setup, "doctor", work, work) as grant:
            waiting.reschedule(None)
            words = ", ".join(node.name for node in grant.hosts)
            _say(InterpreterFinding("grant", True, f"{words} after {time.monotonic() - began:.1f} s"))
            for node in grant.hosts:
                await _look_at(node, asked, work)
    except TimeoutError:
        said = msgspec.json.decode((work / GRANT).read_bytes(), type=GrantStatus).words
        hint = "What is lacking stands there; an agent that cannot start says so as well."
        words = f"nothing in {asked.seconds:.0f} s: {said or 'no word'}"
        _say(InterpreterFinding("grant", False, words, hint))
    except LoradError as error:
        _say(InterpreterFinding("grant", False, error.message, error.hint))


async def _look_at(node: Node, asked: Asked, work: Path) -> None:
    """Print what is found on a node. Raises PoolLost when the node is lost meanwhile."""
    log = work / f"{node.name}.log"
    places = json.dumps({"interpreters": [*asked.interpreters], "bases": asked.bases})
    child = node.child("look", [node.python, "-c", _LOOK, places], {}, log=log, files={})
    await child.start()
    how = await child.ended()
    lines = [line.removeprefix(f"{node.name}: ") for line in log.read_text().splitlines()]
    try:
        answer = msgspec.json.decode(lines[-1] if lines else "", type=_ProbedNode)
    except msgspec.MsgspecError:
        words = f"the look {how}: {lines[-1] if lines else 'it said nothing'}"
        _say(InterpreterFinding(node.name, False, words))
        return
    for finding in _findings(node, asked, answer):
        _say(finding)
    source = work / "put"
    source.mkdir(exist_ok=True)
    (source / "random").write_bytes(os.urandom(_PUT_BYTES))
    began = time.monotonic()
    await node.put("put", source)  # whose digest is taken on arrival
    seconds = time.monotonic() - began
    await node.remove("put")
    words = f"{size(_PUT_BYTES)} arrived whole in {seconds:.2f} s"
    _say(InterpreterFinding(node.name, True, words))
    tiny = resolve("builtin:tiny")
    is_same = await node.weights(tiny) == weights_sha256(tiny)
    hint = "Install the same lorad there, at the same path: cluster.node_python."
    _say(InterpreterFinding(node.name, is_same, "builtin:tiny has the weights of this machine's", hint))


def _findings(node: Node, asked: Asked, seen: _ProbedNode) -> Iterator[InterpreterFinding]:
    agent = f"lorad {node.granted.lorad}, Python {seen.python}, uid {node.granted.uid}"
    hint = "Versions and checkpoints are staged there."
    yield InterpreterFinding(node.name, seen.free > 2 << 30, f"{agent}, {size(seen.free)} free", hint)
    devices = asked.devices.get(node.name, 0)
    hint = f"cluster.nodes says {devices} for {node.name}: correct it, or look at `nvidia-smi` there."
    yield InterpreterFinding(node.name, len(seen.gpus) >= devices, f"{len(seen.gpus)} GPUs seen", hint)
    for path, version in seen.interpreters.items():
        name = asked.interpreters[path]
        hint = f"Install {name} there, or correct backends.{name}.python."
        words = f"{path} is Python {version}" if version else f"{path} is no Python that works"
        yield InterpreterFinding(node.name, version is not None, words, hint)
    for path, is_there in seen.bases.items():
        words = f"{path} is {'there' if is_there else 'missing'}"
        hint = "Runs on that base need it on every node, at this path."
        yield InterpreterFinding(node.name, is_there, words, hint)


def _say(finding: InterpreterFinding) -> None:
    print(msgspec.json.encode({"check": finding}).decode(), flush=True)


def main(arguments: list[Any]) -> None:
    asked = msgspec.json.decode(arguments[0], type=Asked)
    with tempfile.TemporaryDirectory(prefix="lorad-doctor-") as work:
        asyncio.run(_probe(asked, Path(work)))


if __name__ == "__main__":
    main(sys.argv[1:])
