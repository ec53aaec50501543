"""Data goes to stdout, everything else to stderr. Text of models, users and logs is never read as markup."""

import json
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lorad.cli.streams import takes_all
from lorad.cli.table import Columns, print_table, shortened
from lorad.client.words import why
from lorad.records.versions import ServedModel, Swapped
from lorad.text import age, duration, number, one_line, printable, size

if TYPE_CHECKING:
    from lorad.client.client import Client
    from lorad.errors import LoradError


__all__ = ["age", "duration", "number", "print_table", "printable", "size", "why"]

NO_RUNS = "No runs. `lorad init` writes a spec to start from."


def print_json(data: Any, *, in_line: bool = False) -> None:
    """Print Structs, or what JSON has, as JSON; `in_line` for a reader that follows."""
    print(json_text(data, indent=None if in_line else 2), flush=in_line)


def json_text(data: Any, indent: int | None = None) -> str:
    """Return JSON, with \\u for what a terminal does not show, as 8-bit controls and marks of direction."""
    is_ascii = not takes_all(sys.stdout)
    lines = json.dumps(msgspec.to_builtins(data), indent=indent, ensure_ascii=is_ascii).split("\n")
    return "\n".join(
        "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in line) for line in lines
    )


def table_or_json(
    answer: Any, columns: Columns, rows: Iterable[Sequence[Any]], *, empty: str, as_json: bool
) -> None:
    """Print an answer as JSON, or as a table; `empty` is noted where it has no rows."""
    if as_json:
        print_json(answer)
    else:
        print_table(columns, rows, empty=empty)


def note_or_json(answer: Any, text: str, *, as_json: bool) -> None:
    """Print an answer as JSON, or a note that says it."""
    if as_json:
        print_json(answer)
    else:
        note(text)


def print_error(error: "LoradError") -> None:
    for part in (error, *error.others):
        note(f"error: {part.message}")
        if part.hint:
            note(f"  {part.hint}")


def report(text: str) -> None:
    """Print one line of the result on stdout."""
    print(printable(text), flush=True)


def note(text: str) -> None:
    """Print one line for a person on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def telling(client: "Client", *, quiet: bool) -> "Client":
    """Have a client show what the daemon does while it waits; without a terminal it is heard all the same."""
    return client.telling((lambda words: None) if quiet or not sys.stderr.isatty() else doing)


def doing(words: str) -> None:
    """Show words at the end of the terminal, in the place of those before; "" takes them away."""
    line = shortened(one_line(words), shutil.get_terminal_size((80, 24)).columns - 1)
    print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)


def hook_transport(words: Sequence[str]) -> None:
    """Name a daemon of another version once, show that one is being started, and start one that died.

    words: the command line. Where it asks for silence or JSON, no start is shown. `daemon` and `doctor` are
        about the daemon as it is, and the TUI shows that there is none.
    """
    from lorad.client.transport import Transport

    Transport.on_other_version = _other_version
    if sys.stderr.isatty() and not {"--json", "--quiet", "-q"} & {*words}:
        Transport.on_wait = doing
    if words[:1] not in (["daemon"], ["doctor"], ["tui"]):
        Transport.on_dead = _start_again


def _start_again(socket: Path) -> None:
    from lorad.box.paths import Home
    from lorad.client.client import Client
    from lorad.client.launch import start

    client = Client()
    if isinstance(client.where, Home) and client.where.socket == socket:
        note("The daemon has died: it is started again. Runs went on meanwhile.")
        start(client)


def _other_version(version: str, box: str) -> None:
    from lorad import __version__
    from lorad.box.paths import Home, default_home

    daemon = f"version {version}" if version else "an earlier version"
    if box:
        words = f"The daemon on {box} is {daemon}, this command is version {__version__}"
        note(f"{words}: install the same on both, then `lorad --host {box} daemon restart`.")
        return
    is_shared = Home(default_home()).shared_by is not None
    restart = "its admin replaces it with" if is_shared else "replace it with"
    note(f"The daemon is {daemon}, this command is version {__version__}: {restart} `lorad daemon restart`.")


def tell_address(served: ServedModel | Swapped, model: str) -> None:
    """Print where a model answers, a command to try it, and lines of Python for the client of OpenAI.

    The key itself is not printed: what is pasted reads its file.
    """
    if not served.gateway:
        note("The gateway does not answer yet; `lorad logs --of gateway` says why.")
        return
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
    asked = {"model": model, **(asked if served.chat else {"prompt": "Hello"}), "max_tokens": 32}
    route = "chat/completions" if served.chat else "completions"
    words = ["curl", "--unix-socket", served.gateway, f"http://lorad/v1/{route}"]
    note(f"Socket: {served.gateway}")
    note(f"Try it: {shlex.join([*words, '-H', 'Content-Type: application/json', '-d', json.dumps(asked)])}")
    if not served.url:
        note(
            "There is no port for clients that take a base URL: `gateway: {port, tokens}` in config.yaml of "
            "the daemon opens one on 127.0.0.1, and docs/serving.md says how."
        )
        return
    keywords = ", ".join(f"{key}={json.dumps(value)}" for key, value in asked.items())
    note(f"Base URL: {served.url}")
    note(f"API key: {f'in {served.key_file}' if served.key_file else 'a token of gateway.tokens'}")
    note("In Python:")
    note("from openai import OpenAI")
    key = f"open({json.dumps(served.key_file)}).read()" if served.key_file else '"A TOKEN"'
    note(f"client = OpenAI(base_url={json.dumps(served.url)}, api_key={key})")
    note(f"answer = client.{route.replace('/', '.')}.create({keywords})")
    note(f"print(answer.choices[0].{'message.content' if served.chat else 'text'})")
