"""The environments of a run, in processes that may be killed: no episode can harm another."""

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict
from msgspec.structs import replace as changed

from lorad.box.machine import read_machine
from lorad.children.sandbox import sandboxed
from lorad.children.user_process import Lost, UserProcess, code_of, environment, interpreter
from lorad.children.user_serve import Ready
from lorad.envs.builtin import BUILTIN
from lorad.envs.child import Ask, EnvClass, EpisodeAnswer
from lorad.envs.format import Format
from lorad.envs.lending import Lending
from lorad.envs.protocol import Turn
from lorad.errors import SpecError
from lorad.protocol.heartbeat import HEART
from lorad.records.episodes import Task
from lorad.spec.env import EnvSpec


class HostedEpisode(Struct):
    """An episode as its environment sees it.

    turns: The model's turns; the environment may not have answered the last one yet.
    seconds: The time that its environment took for them.
    at_limit: Whether a limit has ended it; the next answer is what it earns by that.
    """

    number: int
    task: Task
    turns: list[Turn] = []
    seconds: float = 0.0
    at_limit: bool = False


class Hosts:
    """The environments of training, and those of evals, which do not wait for each other."""

    def __init__(self, spec: EnvSpec, cwd: Path, format: Format) -> None:
        """Read the spec; relative paths start at `cwd`. Raises SpecError for an unknown name or file."""
        self.format = format
        self.training = EnvironmentHost(spec, cwd)
        self.evals = EnvironmentHost(spec, cwd)

    def close(self) -> None:
        self.training.close()
        self.evals.close()


class EnvironmentHost:
    """Runs `env.workers` processes, among which episodes take turns. Nothing is left after `close`.

    A process that hangs, dies or exceeds its memory is killed. Its present episode is tried again in a new
    process, `env.retry` times, and else fails; its other episodes are restored by their turns.
    """

    def __init__(self, spec: EnvSpec, cwd: Path) -> None:
        """Raises SpecError for an unknown name or file."""
        self._spec = spec
        self._setup = _setup(spec, cwd)
        self.file = Path(self._setup.file) if self._setup.file else None
        self.source = self._setup.source  # what runs, whatever becomes of the file
        python = interpreter(spec.python, cwd, "env.python")
        within: list[str] = []
        if spec.sandbox != "none":
            variables = environment(os.environ, spec.pass_env)
            within = sandboxed(self.file or Path(__file__), python, variables, "env.sandbox")
        self._workers = [_EnvProcess(self._setup, spec, python, within) for _ in range(spec.workers)]
        self._lending = Lending(spec.workers)
        self._numbers = itertools.count()

    def start(self) -> None:
        """Load the class now. Raises SpecError when it cannot be loaded."""
        self._workers[0].start()

    def new(self, task: Task) -> HostedEpisode:
        """Return an episode that is to be reset."""
        return HostedEpisode(next(self._numbers), task)

    def begin(self, tasks: Sequence[Task]) -> list[tuple[HostedEpisode, EpisodeAnswer]]:
        """Make an episode of each task and reset it."""
        episodes = [self.new(task) for task in tasks]
        return [*zip(episodes, self.answers(episodes), strict=True)]

    def answers(self, episodes: Sequence[HostedEpisode]) -> list[EpisodeAnswer]:
        """Return each episode's answer to its last turn. Blocks; never raises for what user code does."""
        shares: list[list[int]] = [[] for _ in self._workers]
        for place, episode in enumerate(episodes):
            shares[episode.number % len(shares)].append(place)
        answered: dict[int, EpisodeAnswer] = {}

        def work(worker: _EnvProcess, share: list[int]) -> None:
            with HEART.waits():  # for a child, each time for no longer than its time limit
                for place in share:
                    answered[place] = worker.answer(episodes[place])

        busy = [(worker, share) for worker, share in zip(self._workers, shares, strict=True) if share]
        if len(busy) == 1:
            work(*busy[0])
        elif busy:
            with HEART.waits(), ThreadPoolExecutor(len(busy), "env") as pool:
                for future in [pool.submit(work, *each) for each in busy]:
                    future.result()
        return [answered[place] for place in range(len(episodes))]

    def answer(self, episode: HostedEpisode) -> EpisodeAnswer:
        """Return an episode's answer to its last turn, by the first process that has time.

        Safe between threads. Blocks; never raises for what user code does.
        """
        number, before = self._lending.take(episode.number, episode.seconds)
        if before is not None:
            self._workers[before].over.append(episode.number)
        try:
            return self._workers[number].answer(episode)
        finally:
            self._lending.give(number)

    def forget(self, episodes: Sequence[HostedEpisode]) -> None:
        """Close the environments of episodes that are over, with the next request to their process."""
        for episode in episodes:
            lent = self._lending.forget(episode.number)
            number = episode.number % len(self._workers) if lent is None else lent
            self._workers[number].over.append(episode.number)

    def close(self) -> None:
        """Kill the processes, also under `answers` in another thread, whose remaining episodes then fail."""
        for worker in self._workers:
            worker.close()


class _EnvProcess:
    """A process that plays the episodes in `_playing`; those in `over` can be closed."""

    def __init__(self, setup: EnvClass, spec: EnvSpec, python: Path | None, within: Sequence[str]) -> None:
        self._setup = setup
        self._spec = spec
        self._python = python
        self._within = within
        self._too_long = f"its turns took {spec.episode_timeout:g} s (env.episode_timeout)"
        self._environment = environment(os.environ, spec.pass_env)
        self._child: UserProcess | None = None
        self._closed = False
        self._busy = threading.Lock()
        self._playing: set[int] = set()
        self.over: deque[int] = deque()

    def start(self) -> UserProcess:
        """Start another process. Raises SpecError."""
        self._stop()
        self.over.clear()
        self._playing = set()
        child = self._child = UserProcess(
            "lorad.envs.child", "environment", self._environment, self._python, self._within
        )
        if self._closed:  # by another thread, which may not have seen the child
            child.signal()
        try:
            limit = self._spec.start_timeout
            child.load(self._setup, "env.name", Ready, limit, ", or raise env.start_timeout")
        except SpecError:
            self._stop()
            raise
        return child

    def answer(self, episode: HostedEpisode) -> EpisodeAnswer:
        with self._busy:
            for _ in range(1 + self._spec.retry):
                answer = self._answer(episode)
                if not answer.error or self._closed or episode.seconds >= self._spec.episode_timeout:
                    break
            return answer

    def close(self) -> None:
        self._closed = True
        if (child := self._child) is not None:
            child.signal()
        with self._busy:
            self._stop()

    def _answer(self, episode: HostedEpisode) -> EpisodeAnswer:
        if self._closed:
            return EpisodeAnswer(error="the environments are closed")
        started = time.monotonic()
        turns = 1
        left = self._spec.episode_timeout - episode.seconds
        if left <= 0:
            return EpisodeAnswer(error=self._too_long)
        number = episode.number
        try:
            child = self._child if self._child is not None and self._child.alive else self.start()
            over = [self.over.popleft() for _ in range(len(self.over))]
            self._playing.difference_update(over)
            turns = 1 if number in self._playing else max(len(episode.turns), 1)
            limit = min(self._spec.timeout, left) * turns
            started = time.monotonic()
            ask = Ask(number, episode.task, episode.turns, over, episode.at_limit)
            answer = child.ask(ask, EpisodeAnswer, limit)
            if answer.error:
                self._playing.discard(number)
            else:
                self._playing.add(number)
        except (SpecError, Lost) as error:
            self._stop()
            answer = EpisodeAnswer(error=str(error), seconds=time.monotonic() - started)
        episode.seconds += answer.seconds / turns  # turns that others made necessary again do not count
        if answer.error and episode.seconds >= self._spec.episode_timeout:
            return changed(answer, error=self._too_long)
        return answer

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def _setup(spec: EnvSpec, cwd: Path) -> EnvClass:
    if spec.name is not None and ":" in spec.name:
        code = code_of(spec.name, cwd, "env.name", spec.memory_bytes)
        return EnvClass(**asdict(code) | {"memory_key": "env.memory", "args": spec.args})
    if spec.name is None or spec.name not in BUILTIN:
        raise SpecError(
            f"there is no environment {spec.name!r}",
            key="env.name",
            hint=f"Name one of {', '.join(BUILTIN)}, or path/to/file.py:Class.",
        )
    memory = spec.memory_bytes or read_machine().memory // 2
    return EnvClass(function=spec.name, memory=memory, memory_key="env.memory", args=spec.args)
