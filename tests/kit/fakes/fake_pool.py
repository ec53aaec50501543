"""The stand-in for a pool: it answers what the daemon asks, and keeps in a file what it was asked to load."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from lorad.box.paths import AttemptDir
from lorad.errors import AttestationFailed, LoradError, to_wire
from lorad.pool.config import log_directory
from lorad.protocol.heartbeat import HEART
from lorad.protocol.status import Capacity, PoolInfo, PoolStatus
from tests.kit.fakes.fake_wire import Wire


def behaviour(of: str) -> dict[str, Any]:
    path = Path(os.environ["LORAD_HOME"]) / "behaviour.json"
    found: dict[str, Any] = json.loads(path.read_text()).get(of, {}) if path.exists() else {}
    return found


def serve(pool_dir: Path) -> None:
    """Answers what the daemon asks, a thread for each connection; `crash`: exits with 1 instead, in the
    life of that number, or in all; `waits`: does neither as long as that is so.

    `capacity`: what it says of it; it has no tenants, so that runs count as placed and not yet there.
    `deaf`: to `shutdown`; `refuses`: versions that fail their attestation; `load_seconds`: what each load
        takes.
    """
    setup = json.loads((pool_dir / "pool.json").read_text())
    while behaviour("pool").get("waits"):
        time.sleep(0.02)
    if behaviour("pool").get("crash") in (True, os.path.basename(os.environ["LORAD_ATTEMPT"])):
        sys.exit("the base does not fit into memory")
    if setup["nodes"]:
        HEART.start(AttemptDir(log_directory(pool_dir)).heartbeat)
        from tests.kit.fakes.fake_cluster import grant  # with psutil, which few pools need

        grant(pool_dir, setup)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(setup["socket"])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(setup["socket"])
    listener.listen()
    engine = Engine(pool_dir / "loaded.json")
    if not setup["nodes"]:
        HEART.start(AttemptDir(log_directory(pool_dir)).heartbeat)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection, setup, engine), daemon=True).start()


class Engine:
    """What is loaded, and whether it is kept: in a file, where tests find it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("{}")

    def do(self, call: dict[str, Any]) -> tuple[list[str], list[str]]:
        """What is loaded and what is kept, after the call."""
        with self.path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            loaded: dict[str, bool] = json.loads(file.read())
            self.change(loaded, call)
            file.seek(0)
            file.truncate()
            file.write(json.dumps(loaded))
        return sorted(loaded), sorted(name for name, kept in loaded.items() if kept)

    def change(self, loaded: dict[str, bool], call: dict[str, Any]) -> None:
        if call["verb"] in ("load_version", "attest_again"):
            name = call["args"]["version"]
            time.sleep(behaviour("pool").get("load_seconds", 0))
            if name in behaviour("pool").get("refuses", ()):
                raise AttestationFailed(f"{name} is not what it should be", hint="Use another one.")
        if call["verb"] == "load_version":
            loaded[name] = loaded.get(name, False) or call["args"]["keep"]
        elif call["verb"] == "let_go":
            loaded.pop(call["args"]["version"], None)


def answer(connection: socket.socket, setup: dict[str, Any], engine: Engine) -> None:
    wire = Wire(connection)
    names = ("pool", "model", "model_path", "trainer", "engine", "mode", "device", "dtype", "threads")
    about = {name: setup[name] for name in names}
    info = PoolInfo(**about, pid=os.getpid(), base_checksum="", max_tokens=64, versions={})
    info = msgspec.structs.replace(info, model_sha256=behaviour("pool").get("model_sha256", ""))
    capacity = Capacity(**told) if (told := behaviour("pool").get("capacity")) else None
    while True:
        try:
            call = wire.hear()
        except EOFError:
            connection.close()
            return
        try:
            loaded, kept = engine.do(call)
            body = PoolStatus(info, [], loaded, 0.0, 0.0, 1, 1.0, kept=kept, capacity=capacity)
            passed = {"attestation": {"verdict": "passed", "detail": "as its files say"}}
            results: dict[str, Any] = {"status": body, "load_version": passed, "attest_again": passed}
            reply = {"id": call["id"], "kind": "result", "body": results.get(call["verb"], {})}
        except LoradError as error:
            reply = {"id": call["id"], "kind": "error", "body": to_wire(error)}
        wire.tell(reply)
        if call["verb"] == "shutdown" and not behaviour("pool").get("deaf"):
            os.kill(os.getpid(), signal.SIGTERM)
