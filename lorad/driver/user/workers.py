"""Processes of a reward function. Calls of it are spread over them; each fails alone.

A call has a process for itself, unless the function is a coroutine: then many are under way in each.
"""

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lorad.children.user_process import Lost, UserProcess
from lorad.children.user_serve import Code, Ready
from lorad.driver.user.pace import FirstCalls, Growth
from lorad.errors import SpecError
from lorad.rl.reward import RewardInput

_CHILD = "lorad.driver.user.reward_child"
_BACKLOG_SECONDS = 0.2  # that a call waits until another process is worth its start
_GRACE_SECONDS = 2.0  # for a process that times its calls itself
_CLOSED = "the rewarder is closed"


class RewardFunction(Code):
    """A builtin (`name`, `pattern`), or without a name the function of a file.

    timeout: seconds of a call.
    settings: arguments with which the function of the file makes the one that scores, if there are any.
    is_packaged: the function is lorad's own, which reads answers as text.
    raw: a builtin reads the text with special tokens and the stop string.
    """

    name: str = ""
    pattern: str | None = None
    timeout: float = 0.0
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    is_packaged: bool = False
    raw: bool = False


class Loaded(Ready):
    """The answer of a process that has loaded the function.

    is_batch: it takes lists, all samples of a call at once.
    is_async: many calls may be under way in one process.
    wants_ids: it asks for the tokens of completions.
    wants_raw: it asks for their text as it was sampled.
    names: the names of its parameters.
    """

    is_batch: bool = False
    is_async: bool = False
    wants_ids: bool = False
    wants_raw: bool = False
    names: list[str] = msgspec.field(default_factory=list)


class Reply(Struct, frozen=True):
    """The reward of one sample, or an error.

    parts: its components by name.
    abstains: the function says that it has no reward for this sample.
    costs: what it counted, failed or not.
    """

    value: float | None = None
    error: str = ""
    parts: dict[str, float] = {}
    seconds: float = 0.0
    abstains: bool = False
    costs: dict[str, float] = {}


class _Request(Struct):
    """One call. groups: the number of each sample's group within the call."""

    id: int
    samples: list[RewardInput]
    groups: list[int]


class _WorkerAnswer(Struct):
    """What a process answers to a call.

    is_last: the process is of no further use.
    computed: seconds in which the call computed, or waited for a core; 0 for a coroutine.
    memory: bytes of the process; 0 for a coroutine.
    """

    id: int
    replies: list[Reply]
    is_last: bool = False
    computed: float = 0.0
    memory: int = 0


@dataclass(eq=False)
class Call:
    """One call of the function.

    finish: takes a reply for each sample, in another thread.
    is_alone: no other call is under way in its process meanwhile, which may die of it.
    """

    samples: list[RewardInput]
    groups: list[int]
    finish: Callable[[list[Reply]], None]
    is_alone: bool = False
    at: float = 0.0

    def fail(self, why: str) -> None:
        self.finish([Reply(error=why)] * len(self.samples))


@dataclass
class _UnderWay:
    """A call is under way in a process.

    began: when it began, by time.monotonic().
    seconds: how long it may take.
    end: when that time is over, by time.monotonic().
    """

    call: Call
    began: float
    seconds: float
    end: float


class Workers:
    """At most `count` processes, started when calls wait; more if they grow and calls mostly wait."""

    def __init__(
        self,
        setup: RewardFunction,
        environment: Mapping[str, str],
        count: int,
        concurrency: int,
        python: Path | None = None,
        within: Sequence[str] = (),
        *,
        grows: bool = False,
    ) -> None:
        """Start nothing yet.

        concurrency: calls of a coroutine function that are under way in each process.
        python: another interpreter to run the function.
        within: the sandbox, see `sandboxed`.
        """
        self._setup = setup
        self._environment = environment
        self._python = python
        self._within = within
        self._concurrency = concurrency
        self._calls: deque[Call] = deque()
        self._changed = threading.Condition()
        self._count = count
        self._workers: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        self._spare: UserProcess | None = None
        self._loading = threading.Lock()
        self._loaded: Loaded | None = None
        self._ready_at = 0.0  # when a process was ready first
        self._broken = ""  # why no process can be started
        self.closed = False
        self.timeout = setup.timeout
        name = setup.name or f"{Path(setup.file).name}:{setup.function}"
        self._first = FirstCalls(name, setup.timeout, may_load=not setup.name)
        self._growth = Growth(count) if grows else None

    def start(self) -> Loaded:
        """Load the function now, unless it is loaded. Raises SpecError."""
        with self._loading:
            if self._loaded is None:
                try:
                    self._spare, self._loaded = self.open(partial(setattr, self, "_spare"))
                except SpecError:
                    self._spare = None
                    raise
            return self._loaded

    def open(self, keep: Callable[[UserProcess], None]) -> tuple[UserProcess, Loaded]:
        """Start a process and load the function there. Raises SpecError.

        keep: Gets the process before it loads, so that `close` finds it.
        """
        process = UserProcess(_CHILD, "reward", self._environment, self._python, self._within)
        keep(process)
        if self.closed:  # by another thread, which may not have seen the process
            process.signal()
        try:
            loaded = process.load(self._setup, "reward", Loaded)
        except SpecError:
            process.kill()
            raise
        with self._changed:
            self._ready_at = self._ready_at or time.monotonic()
        return process, loaded

    @property
    def wants_raw(self) -> bool:
        """Return whether the function is loaded, and asks for the text as it was sampled."""
        return self._loaded is not None and self._loaded.wants_raw

    @property
    def capacity(self) -> int:
        """Return how many calls may be under way in one process."""
        return self._concurrency if self._loaded is not None and self._loaded.is_async else 1

    def forgive(self) -> None:
        """Try again to start processes that could not be started."""
        with self._changed:
            self._broken = ""

    def submit(self, *calls: Call, first: bool = False) -> None:
        """Queue calls; `first`: before the others. Each will be finished, whatever happens."""
        now = time.monotonic()
        with self._changed:
            for call in calls:
                call.at = now
            if not self.closed and not self._broken:
                if first:
                    self._calls.extendleft(reversed(calls))
                else:
                    self._calls.extend(calls)
                self._have(self._count)
                self._changed.notify_all()
                for worker in self._workers:
                    worker.ring()
                return
            why = _CLOSED if self.closed else self._broken
        for call in calls:
            call.fail(why)

    def _have(self, count: int) -> None:
        """Have so many workers, and a thread for each; they start their processes when calls wait."""
        for number in range(len(self._workers), count):
            worker = _Worker(self, is_extra=number >= self._count)
            self._workers.append(worker)
            self._threads.append(threading.Thread(target=worker.run, name="rewards", daemon=True))
            self._threads[-1].start()

    @property
    def first_seconds(self) -> float:
        """Return how long the first call of a process may take."""
        with self._changed:
            return self._first.seconds

    def note_end(self, answer: _WorkerAnswer, seconds: float, *, is_first: bool) -> None:
        """Note what a call took; its process's first one tells little of others."""
        with self._changed:
            if is_first:
                self._first.note_end(seconds)
            elif self._growth is not None and not self.closed:
                self._growth.note_call(seconds, answer.computed, answer.memory)
                self._have(self._growth.worth(len(self._workers)))

    def lost_first(self) -> str:
        """Note that a first call took too long. Returns why no other call begins; "" while one may."""
        with self._changed:
            if why := self._first.note_loss():
                self._break(why)
            return why

    def words(self) -> str:
        """Say for people that the first call of a process is waited for; "" where it is not."""
        with self._changed:
            began = [worker.first_began for worker in self._workers if worker.first_began]
        seconds = time.monotonic() - min(began, default=math.inf)
        return f"waiting for the first call of the reward, {seconds:.0f} s" if seconds > 1 else ""

    def take_note(self) -> str:
        """Return what the run should say of the function, once."""
        with self._changed:
            note = self._first.note
            self._first.note = ""
            return note

    def next(self, worker: "_Worker", *, waits: bool) -> Call | None:
        """Take a call that the worker may begin now; None where there is none, or after the end."""
        with self._changed:
            while not self.closed:
                if self._calls and worker.has_room_for(self._calls[0], self.capacity):
                    patience = 0.0 if worker.is_there else self._patience(worker)
                    if patience <= 0:
                        if not worker.is_there:
                            worker.is_there = True
                            worker.process = self._spare
                            self._spare = None
                        return self._calls.popleft()
                else:
                    patience = None
                if not waits:
                    return None
                self._changed.wait(patience)
            return None

    def _patience(self, worker: "_Worker") -> float:
        """Return for how many seconds the first call is left to processes that exist already."""
        # extra processes are started one after another, as starting takes a core
        if worker.is_extra and any(other.is_there and not other.is_ready for other in self._workers):
            return _BACKLOG_SECONDS
        if self._spare is not None or not any(worker.is_there for worker in self._workers):
            return 0.0
        if not self._ready_at:
            return _BACKLOG_SECONDS
        return max(self._calls[0].at, self._ready_at) + _BACKLOG_SECONDS - time.monotonic()

    def cannot_start(self, call: Call, why: str) -> None:
        """Let this call and all others fail where there is no other process."""
        with self._changed:
            self._calls.appendleft(call)
            if any(worker.is_ready for worker in self._workers):
                self._changed.notify_all()
            else:
                self._break(why)

    def _break(self, why: str) -> None:
        """Have all calls fail that wait, or come before `forgive`."""
        self._broken = why
        calls = list(self._calls)
        self._calls.clear()
        for call in calls:
            call.fail(why)

    def close(self) -> None:
        """Kill the processes; calls that wait or are under way fail."""
        with self._changed:
            self.closed = True
            calls = list(self._calls)
            self._calls.clear()
            self._changed.notify_all()
        if self._spare is not None:
            self._spare.signal()
        for worker in self._workers:
            if (process := worker.process) is not None:
                process.signal()
            worker.ring()
        for call in calls:
            call.fail(_CLOSED)
        for thread in self._threads:
            thread.join()
        with self._loading:
            if self._spare is not None:
                self._spare.kill()
                self._spare = None
        for worker in self._workers:
            os.close(worker.bell)
        self._workers.clear()


class _Worker:
    """One process at a time, and the thread that talks to it.

    is_there: it has a process, or is about to start one.
    is_ready: the function is loaded there.
    is_extra: it was added when calls had shown that they mostly wait.
    first_began: when the first call of its process began, until one has ended there; else 0.
    """

    def __init__(self, workers: Workers, *, is_extra: bool) -> None:
        self._workers = workers
        self.is_extra = is_extra
        self.process: UserProcess | None = None
        self._under_way: dict[int, _UnderWay] = {}
        self._count = 0
        self._is_new = True  # no call has ended in its process
        self.first_began = 0.0
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.is_there = self.is_ready = False

    def has_room_for(self, call: Call, capacity: int) -> bool:
        alone = call.is_alone or any(each.call.is_alone for each in self._under_way.values())
        return len(self._under_way) < (1 if alone else capacity)

    def ring(self) -> None:
        """Wake the thread up: there is a call."""
        os.eventfd_write(self.bell, 1)

    def run(self) -> None:
        while not self._workers.closed:
            while (call := self._workers.next(self, waits=not self._under_way)) is not None:
                self._begin(call)
            if self._under_way:
                self._listen()
        for each in self._under_way.values():
            each.call.fail(_CLOSED)
        self._stop()

    def _begin(self, call: Call) -> None:
        try:
            if self.process is None or not self.process.alive:
                self._stop()
                self.is_there = True
                self._workers.open(partial(setattr, self, "process"))
            self.is_ready = True
        except SpecError as error:
            self.process = None
            self.is_there = False
            self._workers.cannot_start(call, _CLOSED if self._workers.closed else str(error))
            return
        assert self.process is not None
        self._count += 1
        now = time.monotonic()
        seconds = self._workers.timeout
        if self._is_new:
            seconds = self._workers.first_seconds
            self.first_began = self.first_began or now
        grace = _GRACE_SECONDS * (self._workers.capacity > 1)
        self._under_way[self._count] = _UnderWay(call, now, seconds, now + seconds + grace)
        loaded = self._workers.start()
        unread: dict[str, Any] = {} if loaded.wants_ids else {"completion_ids": []}
        unread |= {} if loaded.wants_raw else {"raw_completion": ""}
        unread |= {} if loaded.is_batch else {"prompt_value": None}
        samples = [replace(sample, **unread) for sample in call.samples]
        self.process.send(msgspec.json.encode(_Request(self._count, samples, call.groups), enc_hook=str))

    def _listen(self) -> None:
        """Wait for an answer, for the end of a call's time or for another call."""
        assert self.process is not None
        has_room = len(self._under_way) < self._workers.capacity
        next_to_end = min(self._under_way.values(), key=lambda each: each.end)
        deadline = next_to_end.end
        try:
            line = self.process.receive(deadline, self.bell if has_room else None)
            if line is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.bell)
                if time.monotonic() >= deadline:
                    first = ", the time of the first call of a process" if self._is_new else ""
                    why = self._workers.lost_first() if self._is_new else ""
                    raise Lost(why or f"no result within {next_to_end.seconds:g} s{first}")
                return
            ended = None
            with contextlib.suppress(msgspec.MsgspecError):
                answer = msgspec.json.decode(line, type=_WorkerAnswer)
                ended = self._under_way.get(answer.id)
            if ended is None or len(answer.replies) != len(ended.call.samples):
                raise Lost("the reward process answered out of turn")
            del self._under_way[answer.id]
        except Lost as lost:
            self._lost(str(lost))
            return
        now = time.monotonic()
        self._workers.note_end(answer, now - ended.began, is_first=self._is_new)
        if self._is_new:
            self._is_new = False
            self.first_began = 0.0
            for each in self._under_way.values():  # these have no more than the usual time
                each.seconds = self._workers.timeout
                each.end = min(each.end, now + each.seconds + _GRACE_SECONDS)
        if answer.is_last:
            self._lost("")
        ended.call.finish(answer.replies)

    def _lost(self, why: str) -> None:
        """Begin anew, and make each call of several alone: one of them may have been the cause."""
        self._stop()
        calls = [each.call for each in self._under_way.values()]
        self._under_way.clear()
        for call in calls if why else ():
            call.is_alone = True
        if why and len(calls) == 1:
            calls[0].fail(why)
        elif calls:
            self._workers.submit(*calls, first=True)

    def _stop(self) -> None:
        if self.process is not None:
            self.process.kill()
        self.process = None
        self.is_there = self.is_ready = False
        self._is_new = True
        self.first_began = 0.0
