"""Runs a process under a guard for one block of asyncio.

`process.py` is for children that live as long as a pool, `user_process.py` for callers without asyncio.
"""

import asyncio
import contextlib
import signal
import socket
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from lorad.children import guard
from lorad.errors import PoolLost

_Result = TypeVar("_Result")
_LINE_BYTES = 1 << 16
_PART = 1 << 16  # bytes that are read at once
_KILLED_SECONDS = 5.0  # for a guard that was killed itself


@contextlib.asynccontextmanager
async def under_guard(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    limit: int = _LINE_BYTES,
    is_read: bool = True,
    cwd: str | None = None,
    grace: float = 0.0,
) -> AsyncIterator[Process]:
    """Run a process within the block; after it, or without this process, nothing that it started is left.

    Its guard is this process's own, also where `argv` becomes another user: nobody else can end it.

    limit: The most bytes of a line that is read of it.
    is_read: Whether its output is read within the block; else it goes with this process's own.
    grace: Seconds that it has to end after SIGTERM, once the block is left; 0 kills it at once.
    """
    output = PIPE if is_read else None
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            starting = asyncio.create_subprocess_exec(
                *guard.command(argv, theirs.fileno()),
                stdin=PIPE,
                stdout=output,
                stderr=output,
                env=env,
                cwd=cwd,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                limit=limit,
            )
            # asyncio kills a process whose start is cancelled; this one is a guard, which then would end
            # nothing
            process, is_cancelled = await _uncancelled(starting)
        try:
            if is_cancelled:
                raise asyncio.CancelledError
            yield process
        finally:
            _, is_cancelled = await _uncancelled(_end(process, grace))
            if is_cancelled:
                raise asyncio.CancelledError


async def lines_of(process: Process, what: str, question: bytes = b"") -> AsyncGenerator[bytes, None]:
    """Send a question and yield the lines that a process prints, as long as the caller wants them.

    Raises PoolLost, about `what`, when there is no further line, or one that is too long.
    """
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(question)
    process.stdin.close()
    errors = asyncio.create_task(_read_out(process.stderr))
    try:
        while line := await process.stdout.readline():
            yield line
        last = (await errors).decode(errors="replace").strip().splitlines()[-1:]
        raise PoolLost(f"{what} fell over: {' '.join(last)}", hint="Try again.")
    except ValueError:
        raise PoolLost(f"{what} printed a line without end", hint="Try again.") from None
    finally:
        errors.cancel()


async def _end(process: Process, grace: float) -> None:
    """End the guard and all that it started, and drop what they still print.

    A guard that is killed leaves processes running, so it is killed only where it does not end by itself.
    """
    steps = [(guard.KILL_NOW, guard.END_SECONDS), (signal.SIGKILL, _KILLED_SECONDS)]
    if grace:
        steps.insert(0, (signal.SIGTERM, grace))
    for number, seconds in steps:
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(_read_out(process.stdout), _read_out(process.stderr), process.wait())
    process._transport.close()  # type: ignore[attr-defined]


async def _read_out(stream: asyncio.StreamReader | None) -> bytes:
    """Read a stream to its end, as a process that cannot write cannot end; return its last bytes."""
    last = b""
    while stream is not None and (chunk := await stream.read(_PART)):
        last = (last + chunk)[-_PART:]
    return last


async def _uncancelled(work: Coroutine[Any, Any, _Result]) -> tuple[_Result, bool]:
    """Finish `work` even if this task is cancelled; return its result, and whether it was cancelled."""
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    return task.result(), is_cancelled
