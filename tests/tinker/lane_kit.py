"""A model of Tinker in a real pool: the door's side of its logs, and lanes in this process or in one that is
killed.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import load_file

from lorad.box.paths import RunDir
from lorad.driver.attempt.main import StopFlag
from lorad.protocol.driver_params import DriverParams, write_params
from lorad.protocol.journal import EndFact, JournalWriter, Record, lineage, read
from lorad.spec.model import to_json
from lorad.spec.text import load_spec
from lorad.tinker.lane.__main__ import attempt
from lorad.tinker.lane.state import REQUESTS, RESULTS
from lorad.tinker.log import LogWriter
from lorad.tinker.log import read as read_log
from lorad.tinker.records import (
    Arguments,
    Create,
    Outcome,
    Pass,
    Request,
    Result,
    SaveWeights,
    Snapshot,
    Step,
    Waiting,
)
from tests.kit.pool_kit import Running, until

SPEC = """
seed: 3
lora: {rank: 4}
algorithm: tinker
trainer: {steps: 1000000}
checkpoint: {every: 3, keep: 2, keep_versions: 0}
"""
STEP = Step(learning_rate=1e-3)


def pass_of(seed: int, loss: str = "cross_entropy", *, backward: bool = True, datums: int = 3) -> Pass:
    """Something to learn from; the same for the same seed."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, datums).astype(np.int32)
    size = int(lengths.sum())
    tokens, targets = rng.integers(4, 100, (2, size)).astype(np.int32)
    floats = {key: rng.normal(-1, 1, size).astype(np.float32) for key in ("logprobs", "advantages")}
    arrays = floats if loss != "cross_entropy" else {"weights": np.abs(floats["advantages"])}
    return Pass(tokens, lengths, targets, loss, arrays, backward=backward)  # type: ignore[arg-type]


def script(steps: int) -> Iterator[Arguments]:
    """What a client asks for: two passes a step, losses in turn, and the weights at the end."""
    yield Create()
    for step in range(steps):
        yield pass_of(step, ("cross_entropy", "ppo", "importance_sampling")[step % 3])
        yield pass_of(step + 1000, "cross_entropy")
        yield STEP
    yield SaveWeights("end")


class LaneRun:
    """A model whose attempts are driven here or in a process."""

    def __init__(self, running: Running, home: Path, name: str, text: str = SPEC) -> None:
        self.run = RunDir(home / name)
        self.run.root.mkdir()
        (self.run.root / REQUESTS).parent.mkdir()
        spec = load_spec(text)
        self.run.spec.write_bytes(to_json(spec))
        self.params = DriverParams(
            run=name, run_dir=str(self.run.root), attempt=0, steps=spec.trainer.steps,
            pool="p", pool_socket=running.config.socket, cwd=str(home),
        )  # fmt: skip

    def ask(self, *wanted: Arguments, first: int = 0) -> None:
        """Write requests as the door does, with numbers from `first` on."""
        with LogWriter(self.run.root / REQUESTS) as log:
            for seq, arguments in enumerate(wanted, first):
                log.append(Request(seq, time.time(), str(seq), arguments))

    def next(self) -> DriverParams:
        self.params = msgspec.structs.replace(self.params, attempt=self.params.attempt + 1)
        self.run.attempt(self.params.attempt).root.mkdir(parents=True)
        return self.params

    def told(self) -> dict[int, Outcome]:
        return results_in(self.run.root)

    @contextmanager
    def lane(self) -> Iterator[list[EndFact]]:
        """A lane in a thread, parked at the end; its end is in the list then."""
        params, stop, ends = self.next(), StopFlag(), list[EndFact]()

        def live() -> None:
            with JournalWriter(self.run.journal, params.run, params.attempt) as journal:
                end, step = attempt(params, self.run, journal, stop)
                journal.append("end", step, end)
            ends.append(end)

        thread = threading.Thread(target=live)
        thread.start()
        try:
            yield ends
        finally:
            stop.wanted = True
            thread.join(120)

    def serve(self, last: int) -> EndFact:
        """Have all requests done up to the number `last`."""
        with self.lane() as ends:
            until(lambda: last in self.told() or bool(ends))
        return ends[0]

    def struck(self, last: int) -> None:
        """Start a lane in a process that is killed once it has written the result of `last`."""
        directory = self.run.attempt(self.next().attempt).root
        write_params(directory, self.params)
        child = subprocess.Popen(
            [sys.executable, "-m", "lorad.tinker.lane", str(directory)], stdout=subprocess.DEVNULL
        )
        until(lambda: last in self.told() or child.poll() is not None)
        child.send_signal(signal.SIGKILL)
        child.wait()

    def facts(self, kind: str) -> list[Record]:
        return [r for r in lineage([r for r, _ in read(self.run.journal)]) if r.kind == kind]

    def tensors(self) -> dict[str, np.ndarray]:
        return tensors_in(self.run.root)


def results_in(root: Path) -> dict[int, Outcome]:
    """The result of each request, of which there is one."""
    found: dict[int, Outcome] = {}
    for result, _ in read_log(root / RESULTS, Result):
        if not isinstance(result.outcome, Snapshot | Waiting):
            assert result.seq not in found, f"request {result.seq} has two results"
            found[result.seq] = result.outcome
    return found


def tensors_in(root: Path, name: str = "end") -> dict[str, np.ndarray]:
    """Weights and optimizer state of a named checkpoint."""
    files = sorted((root / "tinker" / "weights" / name).glob("*.safetensors"))
    return {f"{file.name} {key}": tensor for file in files for key, tensor in load_file(file).items()}


def same(left: Any, right: Any) -> bool:
    """Bit for bit, where records have arrays."""
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, msgspec.Struct):
        fields = left.__struct_fields__
        return type(left) is type(right) and all(same(getattr(left, f), getattr(right, f)) for f in fields)
    return bool(left == right)
