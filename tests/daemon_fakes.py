"""Small stand-ins for a run's driver, a pool and the preflight, run as processes by the tests of the daemon.

They do what `LORAD_HOME/behaviour.json` says: {"driver": {...}, "pool": {...}}; see `drive`, `serve` and `check`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lorad.adapters.adapter import Adapter, AdapterConfig
from lorad.adapters.directory import write_directory
from lorad.adapters.peft import write_peft
from lorad.errors import AttestationFailed, LoradError, PoolLost, to_wire
from lorad.models.directory import resolve
from lorad.paths import AttemptDir, Home, RunDir
from lorad.pool.config import log_directory
from lorad.protocol import frames, heartbeat
from lorad.protocol.calls import Answer, Attestation, Call, Loaded, Nothing
from lorad.protocol.connection import Connection
from lorad.protocol.heartbeat import HEART
from lorad.protocol.journal import (
    Attempt,
    CheckpointFact,
    EndFact,
    JournalWriter,
    StepFact,
    VersionFact,
    lineage,
    read,
)
from lorad.protocol.status import Capacity, PoolInfo, PoolStatus

FACTS: dict[str, Any] = {
    "model_path": str(resolve("builtin:tiny")),
    "model_dtype": "float32",
    "parameters": 1000,
    "warnings": [],
    "modules": ["model.layers.0.self_attn.q_proj"],
    "linears": ["q_proj", "o_proj"],
    "max_positions": 2048,
}
heartbeat.BEAT_SECONDS = 0.1
METRICS = {"reward": 0.5, "loss": 0.1, "tokens_per_second": 100.0, "seconds": 0.02}


def behaviour(of: str) -> dict[str, Any]:
    path = Path(os.environ["LORAD_HOME"]) / "behaviour.json"
    found: dict[str, Any] = json.loads(path.read_text()).get(of, {}) if path.exists() else {}
    return found


class Driver:
    """Steps of `seconds` each; `crash_at`, `fails_at`: exits with 3 at that step, or ends by itself, and `says` why;
    `lost_at`: its pool is up, but loses its trainer; `hang`, `deaf`: to its pool, to SIGTERM; `stuck_at`: goes on for
    ever at that step; `silent`: without a heartbeat; `prints`: so many bytes at each step.
    """

    def __init__(self, attempt_dir: Path) -> None:
        self.attempt = AttemptDir(attempt_dir)
        self.params = json.loads((attempt_dir / "params.json").read_text())
        self.run_dir = RunDir(Path(self.params["run_dir"]))
        self.spec = json.loads(Path(self.params.get("spec") or self.run_dir.spec).read_text())
        self.how = behaviour("driver")
        self.stopped = False
        self.step = 0

    def drive(self) -> None:
        pool = connect(Path(self.params["pool_socket"]))
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopped", not self.how.get("deaf")))
        if not self.how.get("silent"):
            HEART.start(self.attempt.heartbeat)
        with JournalWriter(self.run_dir.journal, self.params["run"], self.params["attempt"]) as self.journal:
            self.begin()
            try:
                reason = self.loop(pool)
            except PoolLost as error:
                reason = "lost"
                print(error, flush=True)
            said = f"{self.step} steps" if reason != "failed" else self.how["says"]
            self.journal.append("end", self.step, EndFact(reason, said))

    def begin(self) -> None:
        facts = lineage([record for record, _ in read(self.run_dir.journal)])
        wanted = self.params["resume_step"]
        found = [f for f in facts if f.kind == "checkpoint" and (self.run_dir.root / f.data["path"]).exists()]
        found = [f for f in found if wanted is None or f.step == wanted]
        self.step = found[-1].step if found else 0
        attempt = Attempt(os.getpid(), self.params["steps"], self.params["pool"], "", self.step if found else None, 1)
        self.journal.append("attempt", self.step, attempt)
        if facts:
            self.journal.append("rewind", self.step, {"to": self.step if found else -1})

    def loop(self, pool: Connection) -> str:
        while self.step < self.params["steps"] and not self.stopped:
            HEART.work("step")
            while self.step + 1 == self.how.get("stuck_at"):
                time.sleep(0.1)
            print("x" * self.how.get("prints", 0), flush=True)
            time.sleep(self.how.get("seconds", 0.02))
            if not self.how.get("hang"):
                pool.call("status", Nothing())
            self.step += 1
            if self.step == self.how.get("crash_at"):
                print(self.how.get("says", "the driver is out of luck"), flush=True)
                os._exit(3)
            if self.step == self.how.get("fails_at"):
                return "failed"
            if self.step == self.how.get("lost_at"):
                raise PoolLost("the trainer is gone")
            self.facts()
        if self.step % self.spec["checkpoint"]["every"]:
            self.checkpoint()
        return "completed" if self.step >= self.params["steps"] else "stopped"

    def facts(self) -> None:
        samples = self.run_dir.samples / f"{self.step:06d}.jsonl"
        samples.parent.mkdir(exist_ok=True)
        samples.write_text("")
        relative, empty = str(samples.relative_to(self.run_dir.root)), hashlib.sha256().hexdigest()
        self.journal.append("step", self.step, StepFact(self.step, ["p"], self.step, relative, empty, METRICS))
        adapter = adapter_of(self.number)
        if self.number not in self.how.get("without_files", ()):
            write_directory(self.run_dir.version(self.number), lambda path: write_peft(adapter, path, "tiny"))
        path, size = f"versions/{self.number:06d}", adapter.bytes
        version = VersionFact(self.number, adapter.digest(), None, path, 1, 2.0, size, "passed", "")
        self.journal.append("version", self.step, version)
        if self.step % self.spec["checkpoint"]["every"] == 0:
            self.checkpoint()

    @property
    def number(self) -> int:
        return int(self.params["attempt"]) * 1000 + self.step

    def checkpoint(self) -> None:
        final = self.run_dir.checkpoint(self.step, self.params["attempt"])
        write_directory(final, lambda path: None)
        fact = CheckpointFact(str(final.relative_to(self.run_dir.root)), self.number, 0)
        self.journal.append("checkpoint", self.step, fact)


def adapter_of(number: int) -> Adapter:
    """Small, and another one for each version."""
    name, half = "model.layers.0.self_attn.q_proj", np.full((1, 4), number, np.float32)
    tensors = {f"{name}.lora_A.weight": half, f"{name}.lora_B.weight": half.T.copy()}
    return Adapter(AdapterConfig(1, 2.0, (name,)), tensors)


def connect(path: Path) -> Connection:
    while True:
        with contextlib.suppress(PoolLost):
            return Connection(path)
        time.sleep(0.02)


def serve(pool_dir: Path) -> None:
    """Answers what the daemon asks, a process for each connection; `crash`: exits with 1 instead.

    `capacity`: what it says of it; it has no tenants, so that runs count as placed and not yet there.
    `deaf`: to `shutdown`; `refuses`: versions that fail their attestation; `load_seconds`: what each load takes.
    """
    setup = json.loads((pool_dir / "pool.json").read_text())
    if behaviour("pool").get("crash"):
        sys.exit("the base does not fit into memory")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(setup["socket"])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(setup["socket"])
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.getpid()
    engine = Engine(pool_dir / "loaded.json")
    HEART.start(AttemptDir(log_directory(pool_dir)).heartbeat)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            answer(connection, setup, parent, engine)
            os._exit(0)
        connection.close()


class Engine:
    """What is loaded, and whether it is kept: in a file, as each connection has a process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("{}")

    def do(self, call: Call) -> tuple[list[str], list[str]]:
        """What is loaded and what is kept, after the call."""
        with self.path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            loaded: dict[str, bool] = json.loads(file.read())
            self.change(loaded, call)
            file.seek(0)
            file.truncate()
            file.write(json.dumps(loaded))
        return sorted(loaded), sorted(name for name, kept in loaded.items() if kept)

    def change(self, loaded: dict[str, bool], call: Call) -> None:
        if call.verb in ("load_version", "attest_again"):
            name = call.args["version"]
            time.sleep(behaviour("pool").get("load_seconds", 0))
            if name in behaviour("pool").get("refuses", ()):
                raise AttestationFailed(f"{name} is not what it should be", hint="Use another one.")
        if call.verb == "load_version":
            loaded[name] = loaded.get(name, False) or call.args["keep"]
        elif call.verb == "let_go":
            loaded.pop(call.args["version"], None)


def answer(connection: socket.socket, setup: dict[str, Any], parent: int, engine: Engine) -> None:
    def exactly(size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            data += (more := connection.recv(size - len(data)))
            if not more:
                os._exit(0)
        return data

    names = ("pool", "model", "model_path", "trainer", "engine", "mode", "device", "dtype", "threads")
    about = {name: setup[name] for name in names}
    info = PoolInfo(**about, pid=parent, base_checksum="", max_tokens=64, versions={})
    info = msgspec.structs.replace(info, model_sha256=behaviour("pool").get("model_sha256", ""))
    capacity = Capacity(**told) if (told := behaviour("pool").get("capacity")) else None
    while True:
        call = frames.decode(*frames.read(exactly), Call)
        try:
            loaded, kept = engine.do(call)
            body = PoolStatus(info, [], loaded, 0.0, 0.0, 1, 1.0, kept=kept, capacity=capacity)
            passed = Loaded(Attestation("passed", "as its files say"))
            results = {"status": body, "load_version": passed, "attest_again": passed}
            reply = Answer(call.id, "result", results.get(call.verb, Nothing()))
        except LoradError as error:
            reply = Answer(call.id, "error", to_wire(error))
        for part in frames.encode(reply):
            connection.sendall(part)
        if call.verb == "shutdown" and not behaviour("pool").get("deaf"):
            os.kill(parent, signal.SIGTERM)


def check() -> None:
    spec = json.loads(sys.stdin.read())["spec"]
    print("user code may print this")
    refused = behaviour("preflight").get("refuses") if spec["trainer"]["dp"] > 1 else None
    if refused or spec["lora"]["rank"] == 13:
        error = {"kind": "SpecError", "message": refused or "lora.rank: unlucky", "hint": "Take another."}
        print(json.dumps({"ok": False, "error": error}))
    else:
        print(json.dumps({"ok": True, "facts": FACTS}))


def be_gateway(home: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        path = Home(home).gateway_socket
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen()
        while True:
            listener.accept()[0].close()


if __name__ == "__main__":
    match sys.argv[1]:
        case "driver":
            Driver(Path(sys.argv[2])).drive()
        case "pool":
            serve(Path(sys.argv[2]))
        case "preflight":
            check()
        case "gateway":
            be_gateway(Path(sys.argv[2]))
