"""The process in which a user's reward function runs: `python -m lorad.driver.reward_child LIFELINE`.

JSON lines: a Setup, answered by Ready; then one RewardInput at a time, answered by Reply. What user code
prints goes to stderr. Each process that user code starts has the memory limit of the Setup for itself.
LIFELINE is the read end of a pipe whose write end only the driver holds: when the driver is gone, however it
went, the kernel kills this process group, even one that is stuck inside C code.
"""

import fcntl
import importlib.util
import inspect
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from lorad.startup import quick_imports

with quick_imports():
    import msgspec
    from msgspec import Struct

    from lorad.errors import LoradError
    from lorad.rl.reward import RewardInput, as_reward, builtin

_ERROR_LIMIT = 2000  # characters of an error that travel
_MOST = 1 << 60  # bytes of memory: no limit


class Setup(Struct):
    """Either a builtin (`name`, `pattern`) or `file`, its text as it was when the attempt began (`source`),
    and `function`. memory: bytes that it may have; 0: no limit."""

    name: str = ""
    pattern: str | None = None
    file: str = ""
    function: str = ""
    source: bytes = b""
    memory: int = 0


class Ready(Struct):
    """Whether the function is there, and the keywords that it can not do without."""

    is_last: ClassVar[bool] = False
    error: str = ""
    hint: str = ""
    required: list[str] = []


class Reply(Struct):
    """The reward of one sample, or what went wrong. is_last: the process is of no further use."""

    value: float | None = None
    error: str = ""
    seconds: float = 0.0
    is_last: bool = False


def main(lifeline: int) -> None:
    _die_with(lifeline)
    requests, replies = _take_pipes()
    setup = msgspec.json.decode(requests.readline(), type=Setup)
    try:
        _limit_memory(setup.memory)
        score, required = _load(setup)
    except BaseException as error:
        _send(replies, Ready(error=_describe(error, setup.file), hint=getattr(error, "hint", "")))
        return
    _send(replies, Ready(required=required))
    for line in requests:
        _send(replies, run(score, msgspec.json.decode(line, type=RewardInput), setup.file))


def _die_with(lifeline: int) -> None:
    """Have the kernel SIGKILL this process group when the other end of `lifeline` closes (see fcntl(2),
    O_ASYNC).
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # closed before it was watched
        os.killpg(0, signal.SIGKILL)


def _limit_memory(limit: int) -> None:
    """Limit the memory of this process and of each that it starts; address space alone is free, since CUDA
    reserves much.
    """
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    least = min(limit or _MOST, _MOST if hard == resource.RLIM_INFINITY else hard)
    resource.setrlimit(resource.RLIMIT_DATA, (least, least))


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """stdin and stdout for the protocol alone; user code finds an empty stdin, and stderr as its stdout."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    os.close(empty)
    return requests, replies


def _load(setup: Setup) -> tuple[Callable[[RewardInput], Any], list[str]]:
    """Return the function, called with a sample, and the keywords that it requires."""
    if setup.name:
        return builtin(setup.name, setup.pattern), []
    function = _import_function(Path(setup.file), setup.source, setup.function)
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
        raise LoradError(
            f"{setup.function} has positional-only parameters", hint="Rewards are called by keyword."
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = [p.name for p in parameters if p.name in names and p.default is p.empty]

    def score(sample: RewardInput) -> Any:
        keywords = sample.keywords()
        return function(**{name: value for name, value in keywords.items() if takes_all or name in names})

    return score, required


def _import_function(file: Path, source: bytes, name: str) -> Callable[..., Any]:
    """`name` of the module in `file`, of this text; its directory comes first on sys.path,
    as for a script.
    """
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location("user_reward", file)
    if spec is None or spec.loader is None:
        raise LoradError(f"{file} is no Python file", hint="Name it path/to/file.py:function.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(compile(source, str(file), "exec", dont_inherit=True), module.__dict__)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise LoradError(f"{file} has no function {name}", hint=f"Its functions: {there}.")
    return function


def run(score: Callable[[RewardInput], Any], sample: RewardInput, file: str) -> Reply:
    started, is_last = time.monotonic(), False
    try:
        value, error = as_reward(score(sample)), ""
    except BaseException as raised:
        value, error, is_last = None, _describe(raised, file), isinstance(raised, MemoryError)
    return Reply(value=value, error=error, seconds=time.monotonic() - started, is_last=is_last)


def _describe(error: BaseException, file: str) -> str:
    """`rewards.py:12: ValueError: what`, the line being the last one in the user's file."""
    if isinstance(error, LoradError):
        return str(error)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines = [error.lineno]
    where = f"{file}:{lines[-1]}: " if lines else ""
    text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, MemoryError):
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        text = f"MemoryError: it needs more than its limit of {limit / (1 << 20):,.0f} MiB (reward.memory)"
    return f"{where}{text}"[:_ERROR_LIMIT]


def _send(replies: BinaryIO, message: Struct) -> None:
    replies.write(msgspec.json.encode(message) + b"\n")
    replies.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
