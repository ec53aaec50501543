"""Scoring samples. User code runs in a child process that can be killed; builtins run here."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from lorad.box.machine import read_machine
from lorad.children.user_process import Lost, UserProcess, code_of, environment
from lorad.driver.user.reward_child import Reply, Setup
from lorad.errors import SpecError
from lorad.protocol.heartbeat import HEART
from lorad.rl.reward import RewardInput, builtin
from lorad.spec.model import RewardSpec


class Score(Struct, frozen=True):
    """The reward of one sample; `value` is None and `error` says why when its function failed."""

    value: float | None
    error: str = ""
    seconds: float = 0.0


class Rewarder:
    """The reward of a spec. A context manager: nothing of it is left running after `close`.

    A sample fails alone: by an exception, by a value that is no finite number, by the time limit of its spec,
    by the death of its process; the samples after it are scored as if nothing had been. It is scored again,
    `retries` times at most, when all the others have been.
    """

    def __init__(self, spec: RewardSpec, cwd: Path) -> None:
        """`cwd`: where a relative path starts. Raises SpecError for an unknown builtin, pattern or file."""
        self._timeout, self._retries = spec.timeout, spec.retries
        self._setup = _setup(spec, cwd)
        self.file = Path(self._setup.file) if self._setup.file else None
        self.source = self._setup.source  # what runs, whatever becomes of the file
        self._environment = environment(os.environ, spec.env)
        # `regex` runs in the child: a pattern can take for ever, and does so without letting anything else
        # run.
        self._builtin = builtin(spec.name) if self._setup.name and self._setup.name != "regex" else None
        self._child: UserProcess | None = None
        self._closed = False
        self._busy = threading.Lock()
        self._broken = ""  # why no child can be started; not tried again for the rest of a call of `score`

    def start(self) -> list[str]:
        """Load the function now; returns the keywords that it requires.

        Raises SpecError when it can not be loaded.
        """
        if self._builtin is not None:
            return []
        self._stop()
        self._child = UserProcess("lorad.driver.user.reward_child", "reward", self._environment)
        if self._closed:  # by another thread, which may not have seen the child
            self._child.signal()
        try:
            return self._child.load(self._setup, "reward").required
        except SpecError:
            self._stop()
            raise

    def score(self, samples: Sequence[RewardInput]) -> list[Score]:
        """One Score for each sample, in order. Blocks; never raises for what user code does."""
        if self._builtin is not None:
            return [Score(self._builtin(sample)) for sample in samples]
        with HEART.waits(), self._busy:  # for a child, each time for no longer than its time limit
            self._broken = ""
            scores = [self._score(sample) for sample in samples]
            for _ in range(self._retries):
                again = {i: samples[i] for i, score in enumerate(scores) if score.value is None}
                for i, sample in again.items():
                    scores[i] = self._score(sample)
            return scores

    def close(self) -> None:
        """Kill the child, also under a `score` in another thread, whose remaining samples then fail."""
        self._closed = True
        if (child := self._child) is not None:
            child.signal()
        with self._busy:
            self._stop()

    def __enter__(self) -> "Rewarder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _score(self, sample: RewardInput) -> Score:
        if self._closed or self._broken:
            return Score(None, self._broken or "the rewarder is closed")
        started = time.monotonic()
        try:
            if self._child is None or not self._child.alive:
                self.start()
            assert self._child is not None
            reply = self._child.ask(sample, Reply, self._timeout)
            return Score(reply.value, reply.error, reply.seconds)
        except (SpecError, Lost) as error:
            self._stop()
            self._broken = str(error) if isinstance(error, SpecError) else ""
            return Score(None, str(error), time.monotonic() - started)

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def _setup(spec: RewardSpec, cwd: Path) -> Setup:
    if ":" in spec.name:
        code = code_of(spec.name, cwd, "reward", spec.memory_bytes)
        return Setup(**asdict(code) | {"memory_key": "reward.memory"})
    builtin(spec.name, spec.pattern)
    memory = spec.memory_bytes or read_machine().memory // 2
    return Setup(name=spec.name, pattern=spec.pattern, memory=memory, memory_key="reward.memory")
