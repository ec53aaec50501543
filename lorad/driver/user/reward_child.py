"""Run a user's reward function in a process of its own: `main(LIFELINE)`.

JSON lines: a RewardFunction, answered by Loaded; then Requests, each answered by an Answer when it ends;
`workers.py` has their forms. LIFELINE is the read end of a pipe whose write end only the driver holds: when
the driver is gone, however it went, the kernel kills this process group. See `lorad/children/user_code.py`.

It may run in another interpreter, so that the standard library is all that it imports at first.
"""

import inspect
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, BinaryIO

from lorad.children.user_code import (
    as_reward,
    describe,
    import_function,
    keywords_of,
    limit_memory,
    open_lines,
    send_json,
)

_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")
_MOST_PARTS = 32
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")


def main(lifeline: int) -> None:
    setup, requests, replies = open_lines(lifeline)
    try:
        limit_memory(setup.memory)
        function = _load(setup)
    except BaseException as error:
        send_json(replies, {"error": describe(error, setup), "hint": getattr(error, "hint", "")})
        return
    send_json(
        replies,
        {
            "required": function.required,
            "is_batch": function.is_batch,
            "is_async": function.is_async,
            "wants_ids": function.wants_ids,
            "wants_raw": function.wants_raw,
            "names": sorted(function.names),
        },
    )
    if function.is_async:
        import asyncio  # a third of this process's start, and few functions are coroutines

        asyncio.run(_answer_as_they_end(function, requests, replies))
        return
    for line in requests:
        request = json.loads(line)
        before = _computed()
        try:
            answer = function.answer(request, function.call(request))
        except BaseException as error:
            answer = function.failure(request, error)
        most = max(
            resource.getrusage(of).ru_maxrss for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        # a call that holds an accelerator counts as computing: more processes would hold it, too
        computed = 1e9 if _holds_accelerator() else _computed() - before
        send_json(replies, answer | {"computed": computed, "memory": most << 10})


def _computed() -> float:
    """Return for how many seconds this process and its children have computed or waited for a core."""
    times = os.times()
    computed = times.user + times.system + times.children_user + times.children_system
    try:
        with open("/proc/self/schedstat", "rb") as file:  # of the main thread; os.times counts in 10 ms
            on_core, for_core, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return computed
    return max(computed, on_core / 1e9) + for_core / 1e9


def _holds_accelerator() -> bool:
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(_ACCELERATORS):
                return True
        except OSError:  # the one of the list itself
            continue
    return False


async def _answer_as_they_end(function: "_Function", requests: BinaryIO, replies: BinaryIO) -> None:
    """Have all requests under way at once, each with its own time."""
    from lorad.children.user_async import answer_as_they_end, outcome, within

    async def answer_one(line: bytes) -> None:
        request = json.loads(line)
        try:
            value, error = await within(function.timeout, outcome(function.call(request)))
            answer = function.failure(request, error) if error else function.answer(request, value)
        except TimeoutError:
            answer = function.refusal(request, f"no result within {function.timeout:g} s")
        except BaseException as error:
            answer = function.failure(request, error)
        send_json(replies, answer)

    await answer_as_they_end(requests, answer_one)


class _Function:
    """The user's function, or a builtin one.

    required: columns that it cannot do without.
    is_batch: it takes all samples of a call at once, as lists.
    is_async: it is a coroutine function.
    wants_ids: it asks for the tokens of completions.
    wants_raw: it asks for their text as it was sampled.
    """

    def __init__(self, setup: Any, function: Callable[..., Any]) -> None:
        self._setup = setup
        self._function = function
        self._keywords = keywords_of(function, setup.function)
        self.timeout = setup.timeout
        self.is_batch = bool({"completions", "raw_completions"} & self._keywords.names)
        self.names = self._keywords.names
        self.wants_ids = "completion_ids" in self.names or self._keywords.takes_all
        self.wants_raw = bool({"raw_completion", "raw_completions"} & self.names)
        self.is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        lists = ("prompts", "completions", "raw_completions", "groups") if self.is_batch else ()
        self.required = [name for name in self._keywords.required if name not in lists]

    def call(self, request: dict[str, Any]) -> Any:
        request["started"] = time.monotonic()
        samples = request["samples"]
        prompts = [sample.pop("prompt_value", None) or sample["prompt"] for sample in samples]
        keywords: list[dict[str, Any]] = []
        for sample in samples:
            row: dict[str, Any] = sample.pop("row", {})
            answer = sample.pop("answer_value", None)
            own = {} if answer is None or self._setup.is_packaged else {"answer": answer}
            raw = {"raw_completion": sample.pop("raw_completion", "")} if self.wants_raw else {}
            keywords.append({**row, **sample, **raw, **own})  # what the sample itself has wins
        if not self.is_batch:
            return self._function(**self._keywords.chosen(keywords[0]))
        names = dict.fromkeys(name for sample in keywords for name in sample)
        columns = {name: [sample.get(name) for sample in keywords] for name in names}
        del columns["prompt"]
        columns["prompts"] = prompts
        if self.wants_raw:
            columns["raw_completions"] = columns.pop("raw_completion", [""] * len(samples))
        columns["completions"] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, columns.pop("completion"), strict=True)
        ]
        return self._function(**self._keywords.chosen(columns | {"groups": request["groups"]}))

    def answer(self, request: dict[str, Any], value: Any) -> dict[str, Any]:
        """Make a reply for each sample of what the function returned. Raises ValueError."""
        values = [value]
        if self.is_batch:
            if isinstance(value, str | bytes | dict) or not hasattr(value, "__iter__"):
                raise ValueError(f"returned {type(value).__name__}, not a list")
            values = list(value)
            if len(values) != len(request["samples"]):
                raise ValueError(f"returned {len(values)} rewards for {len(request['samples'])} completions")
        return self._replies(request, [self._reply(reward) for reward in values])

    def failure(self, request: dict[str, Any], error: BaseException) -> dict[str, Any]:
        answer = self.refusal(request, describe(error, self._setup))
        return answer | {"is_last": isinstance(error, MemoryError)}

    def refusal(self, request: dict[str, Any], why: str) -> dict[str, Any]:
        return self._replies(request, [{"error": why}] * len(request["samples"]))

    def _replies(self, request: dict[str, Any], replies: list[dict[str, Any]]) -> dict[str, Any]:
        seconds = (time.monotonic() - request.get("started", time.monotonic())) / len(replies)
        return {"id": request["id"], "replies": [{**reply, "seconds": seconds} for reply in replies]}

    def _reply(self, value: Any) -> dict[str, Any]:
        try:
            if value is None:
                return {"error": "returned NoneType, not a number", "abstains": True}
            if self._setup.settings:  # of lorad's own, which says what it has cost
                error = "" if value.value is not None else value.error
                return {"value": value.value, "error": error, "costs": value.costs}
            if not isinstance(value, dict):
                return {"value": as_reward(value)}
            if len(value) > _MOST_PARTS or not all(isinstance(n, str) and _PART.fullmatch(n) for n in value):
                names = f"{_MOST_PARTS} short names of letters, digits, _, . and - at most"
                raise ValueError(f"returned other components than {names}")
            parts = {name: as_reward(value) for name, value in value.items() if value is not None}
            total = parts.pop("reward", None)
            if total is None and not parts:
                return {"error": "returned no component with a number", "abstains": True}
            return {"value": sum(parts.values()) if total is None else total, "parts": parts}
        except Exception as error:
            return {"error": describe(error, self._setup)}


def _load(setup: Any) -> _Function:
    """Find the function that the setup names. Raises whatever the import of the user's file raises."""
    if not setup.name:
        function = import_function(setup)
        return _Function(setup, function(**setup.settings) if setup.settings else function)
    from lorad.rl.reward import builtin

    score = builtin(setup.name, setup.pattern)

    def scored(completion: str, answer: str = "", finish: str = "") -> float:
        return score(SimpleNamespace(completion=completion, answer=answer, finish=finish))  # type: ignore[arg-type]

    def scored_raw(raw_completion: str, answer: str = "", finish: str = "") -> float:
        return scored(raw_completion, answer, finish)

    return _Function(setup, scored_raw if setup.raw else scored)


if __name__ == "__main__":
    main(int(sys.argv[1]))
