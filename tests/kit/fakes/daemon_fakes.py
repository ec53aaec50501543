"""Small stand-ins for a run's driver, the preflight and the gateway, run as processes by the tests of the
daemon.

They do what `LORAD_HOME/behaviour.json` says: {"driver": {...}, "pool": {...}}; see `drive`, `check` and
`tests.kit.fakes.fake_pool`.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from lorad.startup import quick_imports

with quick_imports():
    import lorad
    from lorad.adapters.directory import write_directory
    from lorad.box.paths import AttemptDir, Home, RunDir
    from lorad.errors import PoolLost
    from lorad.protocol import heartbeat
    from lorad.protocol.heartbeat import HEART
    from lorad.protocol.journal import (
        AttemptFact,
        CheckpointFact,
        EndFact,
        JournalWriter,
        StepFact,
        VersionFact,
        lineage,
        read,
    )
    from tests.kit.fakes.fake_pool import behaviour, serve
    from tests.kit.fakes.fake_wire import MODULE, Wire, ask_status, connected, digest, write_adapter

FACTS: dict[str, Any] = {
    "model_path": str(Path(lorad.__file__).parent / "models" / "tiny"),
    "model_dtype": "float32",
    "parameters": 1000,
    "warnings": [],
    "modules": [MODULE],
    "linears": ["q_proj", "o_proj"],
    "max_positions": 2048,
}
heartbeat.BEAT_SECONDS = 0.1
HELD = "held"  # a file in LORAD_HOME: a driver begins no step while it names its run, or run@step; empty, all
METRICS = {"reward": 0.5, "loss": 0.1, "tokens_per_second": 100.0, "seconds": 0.02}


class Driver:
    """A driver without a model, whose steps last `seconds` each.

    crash_at, fails_at: the step at which it exits with 3, or ends by itself, and `says` why.
    lost_at: its pool is up, but loses its trainer.
    hang, deaf: it does not react to its pool, to SIGTERM.
    stuck_at: the step that never ends.
    silent: it has no heartbeat.
    prints: bytes that it prints at each step.
    rewards: by run, where they are not 0.5.
    """

    def __init__(self, attempt_dir: Path) -> None:
        self.attempt = AttemptDir(attempt_dir)
        self.params = json.loads((attempt_dir / "params.json").read_text())
        self.run_dir = RunDir(Path(self.params["run_dir"]))
        self.spec = json.loads(Path(self.params.get("spec") or self.run_dir.spec).read_text())
        self.how = behaviour("driver")
        self.home = Path(os.environ["LORAD_HOME"])
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
        attempt = AttemptFact(
            os.getpid(), self.params["steps"], self.params["pool"], "", self.step if found else None, 1
        )
        self.journal.append("attempt", self.step, attempt)
        if facts:
            self.journal.append("rewind", self.step, {"to": self.step if found else -1})

    def loop(self, pool: Wire) -> str:
        while self.step < self.params["steps"] and not self.stopped:
            HEART.work("step")
            HEART.tell(self.how.get("tells", ""))
            while self.is_held():
                time.sleep(0.02)
            while self.step + 1 == self.how.get("stuck_at"):
                time.sleep(0.1)
            print("x" * self.how.get("prints", 0), flush=True)
            time.sleep(self.how.get("seconds", 0.02))
            if not self.how.get("hang"):
                ask_status(pool)
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

    def is_held(self) -> bool:
        try:
            names = (self.home / HELD).read_text().split()
        except FileNotFoundError:
            return False
        run = self.params["run"]
        return not names or run in names or f"{run}@{self.step}" in names

    def facts(self) -> None:
        samples = self.run_dir.samples / f"{self.step:06d}.jsonl"
        samples.parent.mkdir(exist_ok=True)
        samples.write_text("")
        relative, empty = str(samples.relative_to(self.run_dir.root)), hashlib.sha256().hexdigest()
        self.journal.append(
            "step", self.step, StepFact(self.step, ["p"], self.step, relative, empty, self.metrics)
        )
        if self.number not in self.how.get("without_files", ()):
            write_directory(self.run_dir.version(self.number), lambda path: write_adapter(path, self.number))
        path = f"versions/{self.number:06d}"
        version = VersionFact(self.number, digest(self.number), None, path, 1, 2.0, 32, "passed", "")
        self.journal.append("version", self.step, version)
        if self.step % self.spec["checkpoint"]["every"] == 0:
            self.checkpoint()

    @property
    def metrics(self) -> dict[str, Any]:
        rewards: dict[str, float] = self.how.get("rewards", {})
        return METRICS | {"reward": rewards.get(self.params["run"], METRICS["reward"])}

    @property
    def number(self) -> int:
        return int(self.params["attempt"]) * 1000 + self.step

    def checkpoint(self) -> None:
        final = self.run_dir.checkpoint(self.step, self.params["attempt"])
        write_directory(final, lambda path: None)
        fact = CheckpointFact(str(final.relative_to(self.run_dir.root)), self.number, 0)
        self.journal.append("checkpoint", self.step, fact)


def connect(path: Path) -> Wire:
    while True:
        with contextlib.suppress(PoolLost):
            return connected(path)
        time.sleep(0.02)


def check() -> None:
    spec = json.loads(sys.stdin.read())["spec"]
    print("user code may print this")
    for words in behaviour("preflight").get("tells", []):
        print(json.dumps({"doing": words}), flush=True)
        time.sleep(behaviour("preflight")["seconds"])
    refused = behaviour("preflight").get("refuses") if spec["trainer"]["dp"] > 1 else None
    if refused or spec["lora"]["rank"] == 13:
        error = {"kind": "SpecError", "message": refused or "lora.rank: unlucky", "hint": "Take another."}
        print(json.dumps({"error": error}))
    else:
        print(json.dumps({"facts": FACTS}))


def be_gateway(home: Home, role: str) -> None:
    HEART.start(AttemptDir(Path(os.environ["LORAD_ATTEMPT"])).heartbeat)
    with socket.socket(socket.AF_UNIX) as listener:
        path = home.gateway_socket_of(os.getuid()) if role == "owner" else home.gateway_socket
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
            be_gateway(Home(Path(sys.argv[2])), "".join(sys.argv[3:]))
