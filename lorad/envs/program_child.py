"""The process in which an agent program runs: `main(LIFELINE)`.

JSON lines: a Setup, answered by Ready; then one Play at a time, answered by Played; `programs.py` has their
forms. See `lorad/children/user_code.py`.

It may run in another interpreter, so that the standard library is all that it imports.
"""

import asyncio
import base64
import inspect
import json
import sys
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, BinaryIO

from lorad.children.user_code import describe, die_with, import_function, limit_memory, take_pipes
from lorad.errors import LoradError

_LARGEST = 1e30  # training computes in fp32
_GIVEN = ("base_url", "task", "sampling")


def main(lifeline: int) -> None:
    die_with(lifeline)
    requests, replies = take_pipes()
    setup = SimpleNamespace(**json.loads(requests.readline()))
    setup.source = base64.b64decode(setup.source)
    try:
        limit_memory(setup.memory)
        function = _load(setup)
    except BaseException as error:
        _send(replies, {"error": describe(error, setup), "hint": _hint(error)})
        return
    _send(replies, {})
    with asyncio.Runner() if hasattr(asyncio, "Runner") else _OlderRunner() as runner:
        for line in requests:
            _send(replies, _played(setup, function, json.loads(line), runner.run))


def _hint(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"Install it for {sys.executable}, or name an interpreter that has it: env.python."
    return str(getattr(error, "hint", ""))


def _load(setup: Any) -> Callable[..., Any]:
    """Raises LoradError for another function than a coroutine function of three parameters."""
    function = import_function(setup)
    if not inspect.iscoroutinefunction(function):
        raise LoradError(f"{setup.function} is no async def", hint="An agent program is one.")
    try:
        inspect.signature(function).bind(*_GIVEN, **setup.args)
    except TypeError as error:
        hint = f"It is called with {', '.join(_GIVEN)}, and with env.args as keywords."
        raise LoradError(f"{setup.function}: {error}", hint=hint) from None
    return function


def _played(setup: Any, function: Callable[..., Any], play: dict[str, Any], run: Any) -> dict[str, Any]:
    started = time.monotonic()
    try:
        value = run(_alone(function(*(play[name] for name in _GIVEN), **setup.args)))
        answer: dict[str, Any] = {"reward": _as_reward(value)}
    except BaseException as error:
        answer = {"error": describe(error, setup), "is_last": not isinstance(error, Exception)}
        answer["is_last"] |= isinstance(error, MemoryError)
    return answer | {"seconds": time.monotonic() - started}


async def _alone(program: Coroutine[Any, Any, Any]) -> Any:
    """Leave no task behind, which would speak in the next episode."""
    try:
        return await program
    finally:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


class _OlderRunner:
    """asyncio.Runner, which Python 3.10 lacks; each program has a loop of its own."""

    run = staticmethod(asyncio.run)

    def __enter__(self) -> "_OlderRunner":
        return self

    def __exit__(self, *error: object) -> None:
        """End nothing: each loop has ended."""


def _as_reward(value: Any) -> float:
    """Raises ValueError unless it is a finite number."""
    if isinstance(value, str | bytes | complex) or not hasattr(value, "__float__"):
        raise ValueError(f"returned {type(value).__name__}, not a number")
    number = float(value)
    if not abs(number) < _LARGEST:  # NaN too
        raise ValueError(f"returned {number}, not a finite number")
    return number


def _send(replies: BinaryIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
