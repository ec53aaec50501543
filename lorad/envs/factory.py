"""Classes for TRL's `environment_factory`, as environments of lorad."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from lorad.children.user_code import keywords_of
from lorad.envs.protocol import Message, Observation, Turn
from lorad.envs.tools import result_of


def is_factory(kind: Any) -> bool:
    """Return whether a class has TRL's contract: `reset`, no `step`, and public methods, which are tools."""
    if not inspect.isclass(kind) or not hasattr(kind, "reset") or hasattr(kind, "step"):
        return False
    return bool(_tools_of(kind))


class Factory:
    """One episode of such a class, which ends with the first turn that calls no tool.

    The prompt is the row's `prompt`; the result of `reset(**row)` is added to its last message. The reward is
    that of `get_reward()`, asked once at the end, or else the attribute `reward`.
    """

    def __init__(self, kind: Callable[..., Any], /, **args: Any) -> None:
        self._theirs = kind(**args)
        functions = {name: getattr(self._theirs, name) for name in _tools_of(type(self._theirs))}
        self.tools = [*functions.values()]
        self._by_name = {name: _awaited(tool) for name, tool in functions.items()}

    def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Begin without the seed, which TRL's contract lacks."""
        reset = _awaited(self._theirs.reset)
        said = reset(**keywords_of(self._theirs.reset, "reset").chosen(row))
        prompt = row.get("prompt", "")
        chat: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if isinstance(said, list) and all(isinstance(part, dict) and "text" in part for part in said):
            said = "".join(str(part["text"]) for part in said)
        if said is not None:
            if not isinstance(said, str):
                raise ValueError(f"reset returned {type(said).__name__}, not text")
            last = chat[-1]
            chat[-1] = {**last, "content": f"{last['content']}{said}"}
        return Observation(chat)

    def step(self, turn: Turn) -> Observation:
        """Answer the calls; without any the episode is over."""
        if turn.calls:
            answers = list[Message]()
            errors = 0
            for call in turn.calls:
                try:
                    result = self._by_name[call.name](**call.arguments or {})
                except Exception as error:
                    result = {"error": str(error)}
                    errors += 1
                answers.append(result_of(call.name, str(result)))
            return Observation(answers, tool_errors=errors)
        if turn.finish == "length":  # which ends the episode
            return Observation("")
        return Observation(None, self.at_limit())

    def at_limit(self) -> float:
        """Return the reward of the episode."""
        if hasattr(self._theirs, "get_reward"):
            return float(_awaited(self._theirs.get_reward)())
        if not hasattr(self._theirs, "reward"):
            name = type(self._theirs).__name__
            raise ValueError(f"{name} has neither get_reward() nor an attribute `reward`")
        return float(self._theirs.reward)

    def close(self) -> None:
        """Free nothing: TRL's contract has no end of an episode."""


def _tools_of(kind: type) -> list[str]:
    members = inspect.getmembers(kind, predicate=inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_") and name not in ("reset", "get_reward")]


def _awaited(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that waits for the result of a coroutine function."""
    if not inspect.iscoroutinefunction(function):
        return function
    return lambda *args, **keywords: _loop().run_until_complete(function(*args, **keywords))


@functools.cache
def _loop() -> Any:
    """Make the one event loop of this process: clients that a class keeps belong to it."""
    import asyncio

    return asyncio.new_event_loop()
