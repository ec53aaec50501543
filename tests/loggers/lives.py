"""`python -m tests.loggers.lives LOGGER DIRECTORY KILLS SEED`: a follower that is killed again and again.

The journal of DIRECTORY grows between its lives, cut at any byte. Each life is a fork that a thread kills
with SIGKILL at a random moment; the last one is left alone. Prints how many were killed, and what they wrote.
`--once LOGGER DIRECTORY` is one life that nobody kills.
"""

import importlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lorad.loggers.choose import LoggerChoice, make
from lorad.loggers.cursor import CursorFile
from lorad.loggers.follow import Follower
from lorad.loggers.logger import LoggedRun
from tests.loggers.readers import READERS

BORN = 1000.0
SECONDS = {"tensorboard": 0.04, "mlflow": 0.8, "wandb": 1.5}  # that a life may take, at most, before its kill
PRELOAD = {
    "tensorboard": ("tensorboard.summary.writer.record_writer", "tensorboard.compat.proto.event_pb2"),
    "mlflow": ("mlflow.tracking", "mlflow.store.tracking.sqlalchemy_store"),
    "wandb": ("wandb",),
}


def settings_of(name: str, directory: Path) -> dict[str, Any]:
    return {
        "tensorboard": {"dir": str(directory / "tb")},
        "mlflow": {"uri": f"sqlite:///{directory}/mlflow.db"},
        "wandb": {"mode": "offline", "dir": str(directory / "wb")},
    }[name]


def follower(name: str, directory: Path) -> Follower:
    run, choice = LoggedRun("r", BORN, directory), LoggerChoice(name, settings_of(name, directory))
    file = CursorFile(directory / "loggers" / f"{name}.json")
    return Follower(directory / "grown.jsonl", lambda: make(choice, run), file, flush_every=16)


def life(name: str, directory: Path, seconds: float, *, is_over: bool) -> int:
    """One life in a fork: its wait status."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    if seconds:
        threading.Thread(target=_kill_after, args=(seconds,), daemon=True).start()
    follower(name, directory).catch_up(is_over=is_over)
    if not is_over:
        time.sleep(seconds)
    os._exit(0)


def _kill_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def _make_tables(uri: str) -> None:
    """A kill while MLflow makes its tables is its own affair. In a fork, as no connection survives one."""
    if not os.fork():
        from mlflow.tracking import MlflowClient

        MlflowClient(uri).search_experiments()
        os._exit(0)
    os.wait()


def once(name: str, directory: Path) -> None:
    """Bring the logger up to date in this process; say what failed."""
    try:
        (found := follower(name, directory)).catch_up(is_over=True)
    except Exception as error:
        print(error)
        found.drop()
    else:
        print("written")


def main() -> None:
    if sys.argv[1] == "--once":
        once(sys.argv[2], Path(sys.argv[3]))
        return
    name, directory, kills, chance = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    for module in PRELOAD[name]:
        importlib.import_module(module)
    if name == "mlflow":
        _make_tables(settings_of(name, directory)["uri"])
    dice, whole, size, killed = random.Random(chance), (directory / "journal.jsonl").read_bytes(), 0, 0
    for count in range(kills):
        size = max(size, int(len(whole) * (count + dice.random()) / kills))
        (directory / "grown.jsonl").write_bytes(whole[:size])
        status = life(name, directory, dice.uniform(0.0, SECONDS[name]), is_over=False)
        killed += os.WIFSIGNALED(status)
    (directory / "grown.jsonl").write_bytes(whole)
    assert life(name, directory, 0.0, is_over=True) == 0
    print(json.dumps([killed, READERS[name](directory)]))


if __name__ == "__main__":
    main()
