"""The command `lorad job`: a run with a daemon of its own, as one process, for schedulers of jobs."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from lorad.children import guard
from lorad.cli import output
from lorad.cli.follow import follow
from lorad.cli.many import OVER
from lorad.cli.options import AsJson, Overrides, Spec
from lorad.client.client import Client
from lorad.client.overrides import from_here, read_spec
from lorad.client.words import why
from lorad.errors import Conflict, DaemonUnreachable, LoradError, NotFound
from lorad.records.runs import Run

_START_SECONDS = 60.0
_PERIOD = 0.1  # seconds between looks
_GOOD = ("completed", "stopped")


class _Interrupted(Exception):
    """SIGTERM or SIGINT: the scheduler wants the machine back."""


def job(
    spec: Spec,
    overrides: Overrides = None,
    name: Annotated[
        str | None, typer.Option(help="The run's name; default: that in SPEC, else SPEC's file name.")
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds that a run may take to stop at its next step after SIGTERM.", min=0)
    ] = 25.0,
    as_json: AsJson = False,
) -> None:
    """Do a run from start to end in the foreground, for schedulers: the daemon is this process's child, and
    whatever was started ends with it, however it ends.

    Started again with the same LORAD_HOME it resumes the run. SIGTERM stops the run after its step, with a
    checkpoint. It exits 0 when the run is done, else 1; 143 after SIGTERM.
    """
    client = Client()
    with contextlib.suppress(DaemonUnreachable):
        client.status()
        hint = "Use `lorad run` there, or give the job a LORAD_HOME of its own."
        raise Conflict(f"a daemon works in {client.home.root} already", hint=hint)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        with _own_daemon(client):
            run = _start(client, spec, overrides or [], name)
            try:
                follow(client, run.name, as_json=as_json, restart=_refuse_restart)
            except _Interrupted:
                _pause(client, run.name, grace)
                raise
            finally:
                with contextlib.suppress(LoradError):
                    client.shutdown(gateway=True, pools=True)
    except _Interrupted:
        raise typer.Exit(128 + signal.SIGTERM) from None


def _interrupt(*_: object) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # once is enough
    raise _Interrupted


def _refuse_restart(client: Client) -> None:
    raise DaemonUnreachable("the job's daemon ended", hint=f"Its log: {client.home.daemon_log}")


@contextlib.contextmanager
def _own_daemon(client: Client) -> Iterator[None]:
    """Run a daemon under a guard that ends it, and whatever it started, with this process."""
    home = client.home
    home.daemon_log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    ours, theirs = socket.socketpair()
    environment = {key: value for key, value in os.environ.items() if key != "LORAD_ATTEMPT"}
    fd = theirs.fileno()
    guarded = guard.command([sys.executable, "-m", "lorad.daemon"], fd)
    with theirs, home.daemon_log.open("ab") as log:
        subprocess.run(
            # no descendant of this process: `ray job stop` sends SIGTERM to each of them, and the pool would
            # end before the run has stopped
            ["/bin/sh", "-c", '"$@" &', "sh", *guarded],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a scheduler that kills this process's group leaves the guard its work
            pass_fds=[fd],
            cwd="/",
            env=environment | {"LORAD_HOME": str(home.root)},
            check=True,
        )
    with ours:
        try:
            _await_answer(client, ours, home.daemon_log)
            yield
        finally:
            ours.shutdown(socket.SHUT_WR)
            while ours.recv(4096):  # until the guard has gone
                pass


def _await_answer(client: Client, guarded: socket.socket, log: Path) -> None:
    """Wait until the daemon answers. Raises DaemonUnreachable where it does not.

    guarded: readable to its end once the guard has gone.
    """
    end = time.monotonic() + _START_SECONDS
    guarded.recv(64)  # the daemon's pid
    while not select.select([guarded], [], [], 0)[0] and time.monotonic() < end:
        with contextlib.suppress(DaemonUnreachable):
            client.status()
            return
        time.sleep(_PERIOD)
    raise DaemonUnreachable("the daemon did not start", hint=f"Its log: {log}")


def _start(client: Client, spec: str, overrides: list[str], name: str | None) -> Run:
    from lorad.spec.text import load_spec  # slow
    from lorad.tui.spec_lines import flat

    text, source, cwd = read_spec(spec)
    changed = from_here(overrides)
    stem = "job" if spec == "-" else Path(spec).stem
    parsed = load_spec(text, source=source, overrides=changed)
    name = name or parsed.name or stem
    try:
        run = client.show(name)
    except NotFound:
        started = client.run(text, source=source, cwd=str(cwd), overrides=changed, name=name)
        output.note(f"{name} starts in {client.home.root}.")
        return started
    own = flat(run.spec)
    for key, value in flat(msgspec.to_builtins(parsed)).items():  # relative paths are not compared
        has = own.get(key)
        is_same = has == value or str(has).endswith(f"/{value}")
        if value is not None and key != "name" and not is_same:
            words = f"{key} is {value} in {source}, but {has} in the run that is here, which counts"
            output.note(f"warning: {words}")
    if run.state in OVER and run.reason not in _GOOD:
        client.resume(name)
        output.note(f"{name} is resumed in {client.home.root}, from step {run.step} or its checkpoint.")
    elif run.state not in OVER:
        output.note(f"{name} continues in {client.home.root}: {why(run) or run.state}.")
    return run


def _pause(client: Client, name: str, grace: float) -> None:
    """Stop the run after its step, with a checkpoint; what takes longer than `grace` is killed."""
    end = time.monotonic() + grace
    with contextlib.suppress(LoradError):
        output.note(f"SIGTERM: {name} stops after its step.")
        client.pause(name)
        while client.show(name).state not in OVER and time.monotonic() < end:
            time.sleep(_PERIOD)
        run = client.show(name)
        output.note(f"{name} is {run.state} at step {run.step}; the same command resumes it.")
