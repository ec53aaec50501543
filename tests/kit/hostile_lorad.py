"""`python -m tests.kit.hostile_lorad COMMAND …`: lorad before a daemon whose every text is made to hurt a
terminal. A COMMAND is one word of the shell, as in 'show sorter'; all of them are run, one after the
other."""

import contextlib
import functools
import shlex
import sys
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from lorad.cli.app import main
from lorad.client.transport import Json, Transport
from lorad.errors import LoradError

TITLE, BLINK, EIGHT_BIT, BACKWARDS = "\x1b]0;PWNED\x07", "\x1b[5;7mBLINK", "\x9b5mC1", "\u202eRTL"
POISON = f"[bold red]x[/] {TITLE}{BLINK}{EIGHT_BIT}{BACKWARDS}\r\b"
# others decide by them
WORDS = ("state", "kind", "verdict", "level", "on", "reason", "phase", "attested", "version")
ask, stream = Transport.ask, Transport.stream


def poisoned(value: Any, key: str = "") -> Any:
    """Every text, with POISON behind it."""
    if isinstance(value, dict):
        return {name: poisoned(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner, key) for inner in value]
    return f"{value}{POISON}" if isinstance(value, str) and key not in WORDS else value


@functools.wraps(ask)
def hostile_ask(self: Transport, method: str, path: str, body: Struct | None = None) -> Json:
    try:
        answer: Json = poisoned(ask(self, method, path, body))
    except LoradError as error:
        raise type(error)(f"{error.message}{POISON}", hint=f"{error.hint}{POISON}") from None
    return answer


@functools.wraps(stream)
def hostile_stream(self: Transport, method: str, path: str, body: Struct | None = None) -> Iterator[Json]:
    yield from (poisoned(event) for event in stream(self, method, path, body))


if __name__ == "__main__":
    Transport.ask, Transport.stream = hostile_ask, hostile_stream  # type: ignore[method-assign]
    for command in sys.argv[1:]:
        print(f"==> {command}", flush=True)
        sys.argv = ["lorad", *shlex.split(command)]
        with contextlib.suppress(SystemExit):
            main()
        sys.stderr.flush()
        sys.stdout.flush()
