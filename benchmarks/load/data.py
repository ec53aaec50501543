"""`make bench-data`: time and memory of `lorad check`, of the same again, and of a first step on large data.

    python -m benchmarks.load.data [--rows 10000 100000 1000000] [--turns 10000] [--lorad PROGRAM]

Rows are chats of two turns of 40 words for sft; --turns is one chat of so many, which is only checked. Each
size has a home of its own. The memory of a process is the most that was resident (VmHWM).
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from lorad.models.directory import resolve

WORDS = ["count", "sort", "the", "words", "of", "a", "line", "and", "say", "which", "is", "longest", "today"]
ROLES = {"lorad.preflight": "check", "lorad.driver": "driver"}
SPEC = """
model: {path: model}
data: {train: rows.jsonl, prompts_per_step: 8, max_sample_tokens: 400000}
algorithm: sft
trainer: {steps: 1}
eval: {every: 0}
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--turns", type=int, nargs="*", default=[10_000])
    parser.add_argument("--lorad", default=shutil.which("lorad", path=str(Path(sys.executable).parent)))
    options = parser.parse_args()
    for rows, turns in [*((rows, 2) for rows in options.rows), *((1, turns) for turns in options.turns)]:
        with tempfile.TemporaryDirectory(prefix="lr-") as place:
            measure(options.lorad, Path(place), rows, turns)
    return 0


def measure(lorad: str, place: Path, rows: int, turns: int) -> None:
    shutil.copytree(resolve("builtin:tiny"), place / "model")
    config = json.loads((place / "model/config.json").read_text()) | {"max_position_embeddings": 1 << 20}
    (place / "model/config.json").write_text(json.dumps(config))
    (place / "spec.yaml").write_text(SPEC)
    of = random.Random(0)
    with (place / "rows.jsonl").open("w") as file:
        for _ in range(rows):
            said = [" ".join(of.choices(WORDS, k=40 if turns == 2 else 8)) for _ in range(turns)]
            roles = ["user", "assistant"] * (turns // 2)
            chat = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
            file.write(json.dumps({"messages": chat}) + "\n")
    commands = [("check", []), ("check again", []), ("first step", ["--name", "first"])]
    for what, more in commands if turns == 2 else commands[:2]:
        command = [lorad, what.split()[0].replace("first", "run"), "spec.yaml", *more]
        watched = Watched(place / "home")
        began = time.monotonic()
        done = subprocess.run(command, cwd=place, env=watched.env, capture_output=True, text=True)
        seconds, most = time.monotonic() - began, watched.ended()
        error = next((line for line in done.stderr.splitlines() if "error" in line), "")
        print(f"{rows} chats of {turns} turns: {what}: {seconds:.0f} s, {most} {error}", flush=True)
    subprocess.run([lorad, "daemon", "stop", "--pools", "--gateway"], env=watched.env, capture_output=True)


class Watched:
    """Sees how much memory, and processor time, the processes of a home take."""

    def __init__(self, home: Path) -> None:
        self.env = {**os.environ, "LORAD_HOME": str(home), "HF_HUB_OFFLINE": "1"}
        self._home, self._most = str(home), dict[str, str]()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def ended(self) -> str:
        self._is_over.set()
        self._thread.join()
        return ", ".join(f"{role} {most}" for role, most in self._most.items())

    def _look(self) -> None:
        while not self._is_over.wait(0.1):
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, OSError):
                    command = process.cmdline()
                    role = next((ROLES[name] for name in command[3:4] if name in ROLES), "")
                    if role and process.environ().get("LORAD_HOME") == self._home:
                        status = Path(f"/proc/{process.pid}/status").read_text()
                        size = int(status.partition("VmHWM:")[2].split()[0]) >> 10
                        spent = process.cpu_times()
                        self._most[role] = f"{size} MB, {spent.user + spent.system:.0f} s of processors"


if __name__ == "__main__":
    sys.exit(main())
