"""Answers to the shell, which asks `_LORAD_COMPLETE=SHELL lorad WORD…` as `lorad completion` has told it to.

Each line is a kind, a candidate and what it means, between tabs. The kinds are `plain`, `part` (no space
comes after it), `file` and `dir` (the shell knows them). Where something goes wrong, nothing is printed.
"""

import contextlib
import os
import sys
from typing import Any

VARIABLE = "_LORAD_COMPLETE"


def answer(shell: str, cli: Any) -> None:
    """Print the candidates for what the shell hands over; nothing else is printed, whatever happens."""
    with contextlib.suppress(Exception, SystemExit), open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            words = sys.argv[1:] or [""]
            if shell == "bash":  # it splits words also at `=`, `:` and `@`: they are read from the line
                from typer._click.shell_completion import split_arg_string

                line = sys.argv[1]
                is_after = not line or (line[-1].isspace() and not line.endswith("\\ "))
                words = [*split_arg_string(line)[1:], *([""] if is_after else [])] or [""]
            offered = _candidates(cli, words[:-1], words[-1])
        cut = 0
        if shell == "bash":  # it says which end of a word it replaces
            end = sys.argv[2] if len(sys.argv) > 2 else words[-1]
            cut = len(words[-1]) - len(end) if words[-1].endswith(end) else 0
        for kind, value, meaning in offered:
            print(kind, value[cut:] or "-", meaning, sep="\t")


def _candidates(cli: Any, args: list[str], incomplete: str) -> list[tuple[str, str, str]]:
    from typer._click.shell_completion import _resolve_context, _resolve_incomplete

    # an option without its value is not understood
    whole = args[:-1] if args and args[-1].startswith("-") else args
    ctx = _resolve_context(cli, {}, "lorad", whole)
    place, incomplete = _resolve_incomplete(ctx, args, incomplete)
    items = place.shell_complete(ctx, incomplete)
    candidates = []
    for item in items:
        value, _, shell = str(item.value).partition("\0")
        kind = "part" if item.type == "plain" and value.endswith(("=", "/")) else item.type
        candidates.append((shell or kind, value, " ".join((item.help or "").split())))
    return candidates
