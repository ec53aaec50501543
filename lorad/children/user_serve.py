"""Serves user code by JSON lines: a `Code`, answered by `Ready`, then one request at a time."""

from collections.abc import Callable
from typing import Any, BinaryIO, ClassVar, TypeVar

import msgspec
from msgspec import Struct

from lorad.children.user_code import describe, die_with, limit_memory, take_pipes


class Code(Struct):
    """A function in a file.

    source: The file's text when the attempt began.
    memory: The most bytes that the process may have; 0 for no limit.
    memory_key: The key of the spec that sets this limit.
    """

    file: str = ""
    function: str = ""
    source: bytes = b""
    memory: int = 0
    memory_key: str = ""


class ProgramSetup(Code):
    """A function that plays episodes.

    Attributes:
        args: Its keywords.
        timeout: The most seconds that an episode may take.
        door: The door's Unix socket, where there is no network; "" elsewhere.
    """

    args: dict[str, Any] = msgspec.field(default_factory=dict)
    timeout: float = 0.0
    door: str = ""


class Ready(Struct):
    """Whether the function is there, and the keywords that it cannot do without."""

    is_last: ClassVar[bool] = False
    error: str = ""
    hint: str = ""
    required: list[str] = []


_Code = TypeVar("_Code", bound=Code)


def serve(
    lifeline: int,
    kind: type[_Code],
    load: Callable[[_Code], tuple[Callable[[bytes], Any], list[str]]],
    enc_hook: Callable[[Any], Any] | None = None,
) -> None:
    """Answer requests to their end, or until LIFELINE closes.

    load: Returns the function that answers a line, and the keywords that the user's code requires.
    """
    die_with(lifeline)
    requests, replies = take_pipes()
    setup = msgspec.json.decode(requests.readline(), type=kind)
    try:
        limit_memory(setup.memory)
        answer, required = load(setup)
    except BaseException as error:
        send(replies, Ready(error=describe(error, setup), hint=getattr(error, "hint", "")))
        return
    send(replies, Ready(required=required))
    for line in requests:
        send(replies, answer(line), enc_hook=enc_hook)


def send(replies: BinaryIO, message: Struct, enc_hook: Callable[[Any], Any] | None = None) -> None:
    replies.write(msgspec.json.encode(message, enc_hook=enc_hook) + b"\n")
    replies.flush()
