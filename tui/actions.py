"""What can be done to a run: the request, the command that does the same, and what is asked before."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lorad.client import Client

Json = dict[str, Any]


@dataclass(frozen=True)
class Action:
    """`question`: what happens, for the user to agree to; empty when it can be undone. `flags`: of the command."""

    verb: str
    request: Callable[[Client, str], Json]
    says: str
    question: str = ""
    flags: str = ""

    def command(self, run: str) -> str:
        return command(self.verb, run, self.flags)


def command(verb: str, run: str, flags: str = "") -> str:
    """The line to type in a shell."""
    return " ".join(part for part in ("lorad", verb, shlex.quote(run), flags) if part)


ACTIONS = {
    action.verb: action
    for action in (
        Action("pause", lambda client, run: client.pause(run), "Finish the step, write a checkpoint and wait"),
        Action("resume", lambda client, run: client.resume(run), "Go on from the newest checkpoint", flags="--detach"),
        Action(
            "stop",
            lambda client, run: client.stop(run),
            "Finish the step, write a checkpoint and end",
            "It finishes the step it is at, writes a checkpoint and ends. It can be resumed later.",
        ),
        Action(
            "kill",
            lambda client, run: client.kill(run),
            "End it at once",
            "Its driver is ended at once, in the middle of a step. When resumed, it goes back to its last checkpoint: "
            "the steps after that are done again.",
        ),
    )
}
