"""Does what every process of user code needs, be it for rewards, advantages or losses.

What user code prints goes to stderr. Each process that user code starts has the memory limit for itself. See
`user_process.py` for the other side. It imports the standard library alone, for interpreters without lorad's
packages.
"""

import base64
import fcntl
import importlib.util
import inspect
import io
import json
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple, Protocol

from lorad.errors import LoradError

_ERROR_LIMIT = 2000  # characters of an error that travel
_MOST = 1 << 60  # bytes of memory: no limit
_LARGEST = 1e30  # of a reward: training computes in fp32


class _FunctionInFile(Protocol):
    """A function in a file, see `Code`."""

    file: str
    function: str
    source: bytes
    memory_key: str


class _Keywords(NamedTuple):
    """The parameters of a function, and whether it takes any other keyword too."""

    names: set[str]
    required: list[str]
    takes_all: bool

    def chosen(self, values: dict[str, Any]) -> dict[str, Any]:
        """Select the values that the function takes."""
        return {name: value for name, value in values.items() if self.takes_all or name in self.names}


def die_with(lifeline: int) -> None:
    """Have the kernel kill this process group, even amid C code, when the other end of `lifeline` closes.

    See fcntl(2), O_ASYNC.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # closed before it was watched
        os.killpg(0, signal.SIGKILL)


def limit_memory(limit: int) -> None:
    """Limit the memory of this process and of each that it starts; CUDA reserves much address space."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    least = min(limit or _MOST, _MOST if hard == resource.RLIM_INFINITY else hard)
    resource.setrlimit(resource.RLIMIT_DATA, (least, least))


def open_lines(lifeline: int) -> tuple[SimpleNamespace, BinaryIO, BinaryIO]:
    """Begin a process that speaks JSON lines without msgspec: return its setup, requests and replies.

    The process ends with `lifeline`, see `die_with`. The setup has the fields of `Code`, and others.
    """
    die_with(lifeline)
    requests, replies = take_pipes()
    setup = SimpleNamespace(**json.loads(requests.readline()))
    setup.source = base64.b64decode(setup.source)
    return setup, requests, replies


def send_json(replies: BinaryIO, message: dict[str, Any]) -> None:
    """Send a line of JSON."""
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


def as_reward(value: Any) -> float:
    """Convert user code's result to a number. Raises ValueError unless it is a finite number."""
    if isinstance(value, str | bytes | complex) or not hasattr(value, "__float__"):
        raise ValueError(f"returned {type(value).__name__}, not a number")
    number = float(value)
    if not abs(number) < _LARGEST:  # NaN too
        raise ValueError(f"returned {number}, not a finite number")
    return number


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep stdin and stdout for the protocol; user code has an empty stdin, and stderr as its stdout."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    os.close(empty)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that a killed process's last line is in the log
    return requests, replies


def import_function(code: _FunctionInFile) -> Callable[..., Any]:
    """Import a file, by the text in `code`, as a module, and return its function.

    Its directory comes first on sys.path, as for a script. The module has the name of its file, by which
    processes of multiprocessing import it again, unless lorad or Python use that name. Raises LoradError, and
    what the import raises.
    """
    file = Path(code.file)
    sys.path.insert(0, str(file.parent))
    is_free = file.stem not in {*sys.modules, *sys.builtin_module_names} and "." not in file.stem
    spec = importlib.util.spec_from_file_location(file.stem if is_free else "user_code", file)
    if spec is None or spec.loader is None:
        raise LoradError(f"{file} is no Python file", hint="Name it path/to/file.py:function.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(compile(code.source, str(file), "exec", dont_inherit=True), module.__dict__)
    function: Callable[..., Any] | None = getattr(module, code.function, None)
    if not callable(function):
        names = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise LoradError(f"{file} has no function {code.function}", hint=f"Its functions: {names}.")
    return function


def keywords_of(function: Callable[..., Any], name: str) -> _Keywords:
    """Look at a function's parameters. Raises LoradError for one that cannot be called by keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters):
        raise LoradError(f"{name} has positional-only parameters", hint="It is called by keyword.")
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return _Keywords(
        names={p.name for p in named},
        required=[p.name for p in named if p.default is p.empty],
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def describe(error: BaseException, code: _FunctionInFile) -> str:
    """Describe an error with the line of the user's file: `rewards.py:12: ValueError: what`."""
    if isinstance(error, LoradError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code.file]
    if isinstance(error, SyntaxError) and error.filename == code.file:
        lines = [error.lineno]
    where = f"{code.file}:{lines[-1]}: " if lines else ""
    text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, MemoryError):
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        most = f"{limit / (1 << 20):,.0f} MiB ({code.memory_key})"
        text = f"MemoryError: it needs more than its limit of {most}"
    return f"{where}{text}"[:_ERROR_LIMIT]
