"""Run an agent program in a process of its own: `main(LIFELINE)`.

JSON lines: a Setup, answered by Ready; then one Play at a time, answered by Played; `programs.py` has their
forms. See `lorad/children/user_code.py`.

It may run in another interpreter, so that the standard library is all that it imports.
"""

import asyncio
import inspect
import json
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from lorad.children.user_code import as_reward, describe, import_function, limit_memory, open_lines, send_json
from lorad.errors import LoradError

_PARAMETERS = ("base_url", "task", "sampling")


def main(lifeline: int) -> None:
    setup, requests, replies = open_lines(lifeline)
    try:
        limit_memory(setup.memory)
        function = _load(setup)
    except BaseException as error:
        send_json(replies, {"error": describe(error, setup), "hint": _hint(error)})
        return
    send_json(replies, {})
    with asyncio.Runner() if hasattr(asyncio, "Runner") else _OlderRunner() as runner:
        for line in requests:
            send_json(replies, _played(setup, function, json.loads(line), runner.run))


def _hint(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"Install it for {sys.executable}, or name an interpreter that has it: env.python."
    return str(getattr(error, "hint", ""))


def _load(setup: Any) -> Callable[..., Any]:
    """Import the program. Raises LoradError unless it is a coroutine function of three parameters."""
    function = import_function(setup)
    if not inspect.iscoroutinefunction(function):
        raise LoradError(f"{setup.function} is no async def", hint="An agent program is one.")
    try:
        inspect.signature(function).bind(*_PARAMETERS, **setup.args)
    except TypeError as error:
        hint = f"It is called with {', '.join(_PARAMETERS)}, and with env.args as keywords."
        raise LoradError(f"{setup.function}: {error}", hint=hint) from None
    return function


def _played(setup: Any, function: Callable[..., Any], play: dict[str, Any], run: Any) -> dict[str, Any]:
    started = time.monotonic()
    try:
        value = run(_alone(function(*(play[name] for name in _PARAMETERS), **setup.args)))
        answer: dict[str, Any] = {"reward": as_reward(value)}
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
    """Stands for asyncio.Runner, which Python 3.10 lacks; each program has a loop of its own."""

    run = staticmethod(asyncio.run)

    def __enter__(self) -> "_OlderRunner":
        return self

    def __exit__(self, *error: object) -> None:
        """End nothing: each loop has ended."""


if __name__ == "__main__":
    main(int(sys.argv[1]))
