"""The async twins of `Lorad`, `Run` and `Sweep`: the same names, arguments, answers and errors, to be
awaited.

Each call is the one of the sync twin, in a thread of its own. This file only lists which there are.
"""

import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from lorad.api.box import Lorad, connect
from lorad.api.run import Run
from lorad.api.sweep import Sweep
from lorad.api.table import Table, mapped
from lorad.api.threads import in_thread
from lorad.client.client import Client
from lorad.records import runs

_END = object()
_P = ParamSpec("_P")
R = TypeVar("R")
S = TypeVar("S")
A = TypeVar("A")


class _Twin(Generic[S]):
    """An object that stands for a sync one."""

    def __init__(self, sync: S) -> None:
        self.sync = sync

    def __repr__(self) -> str:
        return repr(self.sync).replace("<", "<Async", 1)


_Method = Callable[Concatenate[Any, _P], Coroutine[Any, Any, R]]


def _call(method: Callable[Concatenate[Any, _P], R]) -> _Method[_P, R]:
    """Make the twin of a method."""

    @functools.wraps(method)
    async def call(self: _Twin[Any], /, *args: _P.args, **kwargs: _P.kwargs) -> R:
        return await in_thread(functools.partial(method, self.sync, *args, **kwargs))

    return call


def _call_for(method: Callable[Concatenate[Any, _P], Any], twin: Callable[[Any], A]) -> _Method[_P, A]:
    """Make the twin of a method that returns a handle. It returns the twin of the handle."""

    @functools.wraps(method)
    async def call(self: _Twin[Any], /, *args: _P.args, **kwargs: _P.kwargs) -> A:
        return twin(await in_thread(functools.partial(method, self.sync, *args, **kwargs)))

    return call


def _stream(
    method: Callable[Concatenate[Any, _P], Iterator[R]],
) -> Callable[Concatenate[Any, _P], AsyncIterator[R]]:
    """Make the twin of a method that yields. Its iterator is made and asked in threads only."""

    @functools.wraps(method)
    async def stream(self: _Twin[Any], /, *args: _P.args, **kwargs: _P.kwargs) -> AsyncIterator[Any]:
        iterator: Iterator[Any] = await in_thread(functools.partial(method, self.sync, *args, **kwargs))
        while (item := await in_thread(functools.partial(next, iterator, _END))) is not _END:
            yield item

    return stream


class _Awaited(Generic[R]):
    """The value of an attribute, once it is awaited: `await run.steps`. Each `await` asks again."""

    def __init__(self, ask: Callable[[], R]) -> None:
        self._ask = ask

    def __await__(self) -> Generator[Any, None, R]:
        return in_thread(self._ask).__await__()


class _PropertyTwin(Generic[S, R]):
    """The twin of a property."""

    def __init__(self, of: type[S], look: Callable[[S], R]) -> None:
        self._of = of
        self._look = look

    def __set_name__(self, _: type, name: str) -> None:
        self.__doc__ = getattr(self._of, name).__doc__

    @overload
    def __get__(self, twin: None, _: Any = None) -> "_PropertyTwin[S, R]": ...
    @overload
    def __get__(self, twin: _Twin[S], _: Any = None) -> _Awaited[R]: ...
    def __get__(self, twin: _Twin[S] | None, _: Any = None) -> "_PropertyTwin[S, R] | _Awaited[R]":
        return self if twin is None else _Awaited(functools.partial(self._look, twin.sync))

    def __set__(self, twin: _Twin[S], _: object) -> None:
        raise AttributeError("it is read, as the property of the sync twin is")


def _run(sync: Run) -> "AsyncRun":
    return AsyncRun(sync)


def _runs(handles: Table[Run]) -> "Table[AsyncRun]":
    return mapped(handles, AsyncRun, lambda twin: twin.sync)


class AsyncRun(_Twin[Run]):
    """The async twin of `Run`: `await run.wait()`, `await run.steps`, `async for event in run.events()`."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.sync.name

    @property
    def summary(self) -> runs.Run:
        """The run as this handle saw it last, without asking."""
        return self.sync.summary

    details = _PropertyTwin(Run, lambda sync: sync.details)
    state = _PropertyTwin(Run, lambda sync: sync.state)
    spec = _PropertyTwin(Run, lambda sync: sync.spec)
    progress = _PropertyTwin(Run, lambda sync: sync.progress)
    steps = _PropertyTwin(Run, lambda sync: sync.steps)
    evals = _PropertyTwin(Run, lambda sync: sync.evals)
    samples = _call(Run.samples)
    why = _call(Run.why)
    versions = _PropertyTwin(Run, lambda sync: sync.versions)
    checkpoints = _PropertyTwin(Run, lambda sync: sync.checkpoints)
    results = _PropertyTwin(Run, lambda sync: sync.results)
    events = _stream(Run.events)
    logs = _call(Run.logs)
    follow_logs = _stream(Run.follow_logs)
    wait = _call(Run.wait)
    watch = _call(Run.watch)
    stop = _call_for(Run.stop, _run)
    pause = _call_for(Run.pause, _run)
    kill = _call_for(Run.kill, _run)
    resume = _call_for(Run.resume, _run)
    fork = _call_for(Run.fork, _run)
    rename = _call_for(Run.rename, _run)
    remove = _call(Run.remove)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self.sync._repr_mimebundle_(include, exclude)


class AsyncSweep(_Twin[Sweep]):
    """The async twin of `Sweep`."""

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self.sync.name

    details = _PropertyTwin(Sweep, lambda sync: sync.details)
    runs = _PropertyTwin(Sweep, lambda sync: _runs(sync.runs))
    wait = _call(Sweep.wait)


class AsyncLorad(_Twin[Lorad]):
    """The async twin of `Lorad`, which `await lorad.connect_async()` makes."""

    @property
    def client(self) -> Client:
        """What asks the daemon, without `await`: its methods block."""
        return self.sync.client

    status = _PropertyTwin(Lorad, lambda sync: sync.status)
    run = _call_for(Lorad.run, AsyncRun)
    runs = _call_for(Lorad.runs, _runs)
    get = _call_for(Lorad.get, AsyncRun)
    sweep = _call_for(Lorad.sweep, AsyncSweep)
    get_sweep = _call_for(Lorad.get_sweep, AsyncSweep)
    events = _stream(Lorad.events)
    aliases = _PropertyTwin(Lorad, lambda sync: sync.aliases)
    swap = _call(Lorad.swap)
    remove_alias = _call(Lorad.remove_alias)
    pin = _call(Lorad.pin)
    unpin = _call(Lorad.unpin)
    export = _call(Lorad.export)
    generate = _call(Lorad.generate)
    eval = _call(Lorad.eval)
    pools = _PropertyTwin(Lorad, lambda sync: sync.pools)
    devices = _PropertyTwin(Lorad, lambda sync: sync.devices)
    nodes = _PropertyTwin(Lorad, lambda sync: sync.nodes)


async def connect_async(home: str | os.PathLike[str] | None = None, *, start: bool = True) -> AsyncLorad:
    """Connect as `connect` does, for asyncio: every method of what it returns is awaited."""
    return AsyncLorad(await in_thread(functools.partial(connect, home, start=start)))
