"""What `lorad --host BOX COMMAND` does: asks the daemon there, runs the command there, or refuses it."""

import os
from collections.abc import Sequence

import typer

from lorad.box.paths import Home
from lorad.client.boxes.hosts import ALL, CWD, HERE, HOST, SEND, place
from lorad.errors import SpecError

API = "api"  # the command works here and asks the daemon there
THERE = "there"  # ssh runs the command on the box: it reads files, or starts processes
_ANYWHERE = "anywhere"  # the command is about no daemon

_SENDING = ("run", "check", "try", "sweep")  # commands that read a spec here
# Every command stands here; one that does not is a mistake that a test finds.
REACH = {
    "run": API, "check": API, "list": API, "show": API, "why": API, "attach": API, "diff": API, "open": API,
    "logs": API, "wait": API, "resume": API, "pause": API, "stop": API, "kill": API, "rm": API, "tag": API,
    "note": API, "rename": API, "edit": API, "groups": API, "sweep": API, "fork": API, "try": API,
    "adapters": API, "checkpoints": API, "export": API, "verify": API, "samples": API, "plot": API,
    "report": API, "metrics": API, "pin": API, "unpin": API, "swap": API, "aliases": API, "generate": API,
    "pools": API, "devices": API, "nodes": API, "bill": API, "gc": API, "top": API,
    "eval": THERE, "replay": THERE, "log-metrics": THERE, "notify": THERE, "serve": THERE, "tinker": THERE,
    "models": THERE, "daemon": THERE, "backends": THERE, "doctor": THERE, "tui": API,
    "spec": _ANYWHERE, "init": _ANYWHERE, "completion": _ANYWHERE, "hosts": _ANYWHERE,
    "skill": _ANYWHERE,
    "job": "a job has a daemon of its own, which starts where the command does",
    "mcp": "what an agent is served is the daemon beside it; let it start `ssh BOX lorad mcp`",
}  # fmt: skip


def go(words: Sequence[str], host: str | None, cwd: str | None, *, send: bool = False) -> None:
    """Write the box that a command is about into the environment, and run there what has to.

    words: the command and what stands behind it.
    host, cwd, send: what stands before it.

    Raises SpecError for what cannot be done from here, and HostUnreachable. Raises typer.Exit when the
    command was run there.
    """
    os.environ.update({name: value for name, value in ((HOST, host), (CWD, cwd)) if value is not None})
    has_spec = bool(words) and words[0] in _SENDING
    if send and (not has_spec or cwd is not None):
        hint = "Relative paths of the spec then begin among the files that are sent."
        raise SpecError(f"--send is for {', '.join(_SENDING)}, without --cwd", hint=hint)
    if send:
        os.environ[SEND] = "1"
    if not words or REACH.get(words[0]) == _ANYWHERE:
        return
    if os.environ.get(HOST) == ALL:
        if words[0] != "list":
            hint = "Name one box; `lorad hosts` lists them."
            raise SpecError(f"--host {ALL} is for `lorad list`", hint=hint)
        return
    box = place()
    if isinstance(box, Home):
        if cwd is not None or send:
            option = "--send sends to" if send else "--cwd is a directory of"
            raise SpecError(f"{option} another box", hint="Name it with --host, or leave that out.")
        return
    way = REACH.get(words[0], f"it is not known what {words[0]} would do there")
    if way == THERE or (words[0] == "tui" and "--serve" in words):  # a browser is served from the box
        raise typer.Exit(box.call(words))
    if way != API:
        hint = f"Call it there, `ssh {box.entry.ssh}`; or here with --host {HERE}."
        raise SpecError(f"lorad {words[0]} is not for --host {box.name}: {way}", hint=hint)
    if words[0] == "try" and "--rewards" in words:
        hint = "Call it there, or leave out --rewards."
        raise SpecError("--rewards scores completions on this machine, not there", hint=hint)
