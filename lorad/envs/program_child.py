"""Runs an agent program in a process of its own: `main(LIFELINE)`.

JSON lines: a Setup, answered by Ready; then Plays, each answered by Played when it ends; `programs.py` has
their forms. See `lorad/children/user_code.py`. It imports the standard library alone, for other interpreters.
"""

import asyncio
import contextvars
import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, BinaryIO

from lorad.children.user_async import answer_as_they_end, outcome, within
from lorad.children.user_code import as_reward, describe, import_function, limit_memory, open_lines, send_json
from lorad.errors import LoradError

_PARAMETERS = ("base_url", "task", "sampling")
_CANCEL_SECONDS = 1.0  # for the tasks of an episode to end, once they are cancelled
_PART = 1 << 16  # bytes that are passed on at once
MOST_METRICS = 64
METRIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,63}")
_PlayOne = Callable[..., Coroutine[Any, Any, dict[str, Any]]]
_TASKS: contextvars.ContextVar["set[asyncio.Future[Any]] | None"] = contextvars.ContextVar(
    "tasks of the episode", default=None
)


def main(lifeline: int) -> None:
    setup, requests, replies = open_lines(lifeline)
    try:
        limit_memory(setup.memory)
        function = import_function(setup)
        if not inspect.iscoroutinefunction(function):
            raise LoradError(f"{setup.function} is no async def", hint="An agent program is one.")
        try:
            inspect.signature(function).bind(*_PARAMETERS, **setup.args)
        except TypeError as error:
            hint = f"It is called with {', '.join(_PARAMETERS)}, and with env.args as keywords."
            raise LoradError(f"{setup.function}: {error}", hint=hint) from None
    except BaseException as error:
        send_json(replies, {"error": describe(error, setup), "hint": hint_of(error)})
        return
    send_json(replies, {})

    async def play(base_url: str, task: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
        value = await function(base_url, task, sampling, **setup.args)
        if not isinstance(value, tuple):
            return {"reward": as_reward(value)}
        if len(value) != 2 or not isinstance(value[1], dict):
            raise ValueError(f"returned {len(value)} values, not a reward and its metrics by name")
        reward, metrics = value
        are_names = all(isinstance(name, str) and METRIC.fullmatch(name) for name in metrics)
        if len(metrics) > MOST_METRICS or not are_names:
            raise ValueError(
                f"returned other metrics than {MOST_METRICS} short names of letters, digits and _./- at most"
            )
        return {"reward": as_reward(reward), "metrics": {name: as_reward(metrics[name]) for name in metrics}}

    asyncio.run(serve_episodes(setup, play, requests, replies))


def hint_of(error: BaseException) -> str:
    """Return the hint of an error, or about a failed import."""
    if isinstance(error, ModuleNotFoundError):
        return f"Install it for {sys.executable}, or name an interpreter that has it: env.python."
    return str(getattr(error, "hint", ""))


async def serve_episodes(setup: Any, play_one: _PlayOne, requests: BinaryIO, replies: BinaryIO) -> None:
    """Play all requested episodes side by side, to the end of `requests`.

    play_one: Returns the fields of `Played` for a base URL, a row and sampling; it may raise anything.
    """
    asyncio.get_running_loop().set_task_factory(_noted)
    port = await _relayed(setup.door) if setup.door else 0

    async def play(line: bytes) -> None:
        request = json.loads(line)
        if port:
            request["base_url"] = re.sub(r"(?<=127\.0\.0\.1:)\d+", str(port), request["base_url"])
        started = time.monotonic()
        own = asyncio.current_task()
        assert own is not None
        tasks: set[asyncio.Future[Any]] = {own}
        _TASKS.set(tasks)
        answer: dict[str, Any]
        try:
            program = play_one(*(request[name] for name in _PARAMETERS))
            answer, error = await within(setup.timeout, outcome(program))
            if error:
                answer = {"error": describe(error, setup)}
            # what ends a process, or finds no memory, leaves one that is of no further use
            answer["is_last"] = isinstance(error, MemoryError) or not isinstance(error, Exception | None)
        except TimeoutError:
            answer = {"error": f"it took {setup.timeout:g} s (env.episode_timeout)"}
        except (Exception, asyncio.CancelledError) as error:
            answer = {"error": describe(error, setup)}
        tasks.discard(own)
        for task in tasks:  # none is left behind, which would go on beside other episodes
            task.cancel()
        if tasks:
            _, running = await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
            answer["is_last"] = answer.get("is_last", False) or bool(running)
        answer["seconds"] = time.monotonic() - started
        send_json(replies, answer | {"play": request["play"]})

    await answer_as_they_end(requests, play)


async def _relayed(door: str) -> int:
    """Open a port of the sandbox's loopback, whose callers are joined to the door's Unix socket."""

    async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, requests = await asyncio.open_unix_connection(door)
            await asyncio.gather(_passed_on(reader, requests), _passed_on(answers, writer))
        except OSError:
            pass  # the door is closed: the episode is over
        finally:
            writer.close()

    server = await asyncio.start_server(called, "127.0.0.1", 0)
    return int(server.sockets[0].getsockname()[1])


async def _passed_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(_PART):
            target.write(data)
            await target.drain()
    finally:
        target.close()


def _noted(loop: asyncio.AbstractEventLoop, work: Any, **keywords: Any) -> "asyncio.Task[Any]":
    """Make a task, and add it to those of the episode that starts it.

    Tasks that a server starts for a caller are not added: an episode may have started the server for all.
    """
    task = asyncio.Task[Any](work, loop=loop, **keywords)
    tasks = _TASKS.get()
    if tasks is not None and asyncio.current_task(loop) in tasks:
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    return task


if __name__ == "__main__":
    main(int(sys.argv[1]))
