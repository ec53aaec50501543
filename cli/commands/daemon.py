"""The commands of `lorad daemon`: start, stop, restart, status, run, install and uninstall."""

import contextlib
import os
import select
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from lorad import __version__
from lorad.box.config import config_of
from lorad.box.paths import Home, default_home
from lorad.cli import output
from lorad.cli.doctor.logout import has_linger, own_name
from lorad.cli.options import AsJson
from lorad.client.boxes.dial import dial as carry
from lorad.client.boxes.remote import FarDaemon
from lorad.client.client import Client
from lorad.client.launch import connected
from lorad.client.launch import start as launch
from lorad.client.systemd import remove_unit, tell_systemd, unit_of, write_unit
from lorad.client.transport import PROTOCOL
from lorad.errors import Conflict, DaemonUnreachable, NotAllowed

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Start, stop, status of the daemon.")


@app.command()
def start(as_json: AsJson = False) -> None:
    """Start it in the background; nothing happens if it runs already."""
    client = Client()
    try:
        client.status()
    except DaemonUnreachable:
        launch(client)
    _show(client, as_json)


@app.command()
def stop(
    gateway: Annotated[
        bool, typer.Option("--gateway", help="Also end the gateway and the Tinker door.")
    ] = False,
    pools: Annotated[
        bool,
        typer.Option(
            "--pools", help="Also end the pools in which no run is at work, and a gateway without pools."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Ask it to exit. Runs, pools and the gateway continue, and the next daemon adopts them.

    A pool that is idle ends after its idle timeout.
    """
    client = connected() if pools else Client()  # pools outlive their daemon: one is needed to end them
    answer = client.shutdown(gateway=gateway, pools=pools)
    _await_end(client, answer.pid)
    if as_json:
        output.print_json({"stopped": answer.pid, "ended": answer.ended, "staying": answer.staying})
        return
    continuing = "; runs continue" if any(pool.runs for pool in answer.staying) else ""
    output.note(f"The daemon (pid {answer.pid}) is stopped{continuing}.")
    if answer.gateway:
        output.note("The gateway ends with its last request.")
    for name in answer.ended:
        output.note(f"Pool {name} ended.")
    for pool in answer.staying:
        lasting = output.duration(pool.seconds)
        says = f"is idle and ends in {lasting}; `lorad daemon stop --pools` ends it"
        if pool.runs:
            says = f"stays up while {', '.join(pool.runs)} works, then {lasting}"
        elif pool.serves:
            served = ", ".join(pool.serves)
            says = f"stays up while the gateway serves {served}; `lorad daemon stop --pools` ends it"
        output.note(f"Pool {pool.pool} {says}.")


@app.command()
def restart(as_json: AsJson = False) -> None:
    """Replace it with one of this version, which reads config.yaml again.

    Runs, pools and the gateway continue.
    """
    client = Client()
    if (owner := client.home.shared_by) is not None:
        hint = "Ask its owner: `lorad daemon restart`, or `systemctl restart lorad` where a unit starts it."
        raise NotAllowed(f"the daemon of {client.home.root} is user {owner}'s", hint=hint)
    config_of(client.home)  # what would keep the next one from starting is said while this one works
    shared = False
    with contextlib.suppress(DaemonUnreachable):
        shared = client.status().shared
        _await_end(client, client.shutdown().pid)
    launch(client, system=shared)
    _show(client, as_json)


@app.command()
def status(as_json: AsJson = False) -> None:
    """Show whether it answers, and what it manages."""
    _show(Client(), as_json)


@app.command()
def run(
    system: Annotated[
        bool,
        typer.Option(
            "--system", help="For all users of this machine, whose runs work as themselves. Needs root."
        ),
    ] = False,
) -> None:
    """Run it in the foreground (for systemd, or to look at its log)."""
    os.environ.pop("LORAD_ATTEMPT", None)  # a run may start it, and is outlived by it
    os.execv(sys.executable, [sys.executable, "-m", "lorad.daemon", *(["--system"] if system else [])])


@app.command(hidden=True)
def socket(as_json: AsJson = False) -> None:
    """Show where its socket is, for `lorad --host` of another machine. Nothing is started."""
    home = Home(default_home())
    is_running = True
    try:
        Client(home, timeout=5).status()
    except DaemonUnreachable:
        is_running = False
    facts = FarDaemon(
        socket=str(home.socket),
        home=str(home.root),
        version=__version__,
        protocol=PROTOCOL,
        user=own_name(),
        running=is_running,
        login=str(Path("~").expanduser()),
        alarms=config_of(home).alarms,
    )
    print(msgspec.json.encode(facts).decode() if as_json else facts.socket)


@app.command(hidden=True)
def dial() -> None:
    """Carry bytes between stdin, stdout and its socket, for `lorad --host` where ssh forwards no sockets."""
    raise typer.Exit(carry())


_ForAll = Annotated[
    bool, typer.Option("--system", help="The unit of the whole machine: a daemon for all users.")
]


@app.command()
def install(
    system: _ForAll = False,
    now: Annotated[
        bool, typer.Option("--now", help="Start it with systemd at once; runs continue meanwhile.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a unit that is not lorad's.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a systemd unit that keeps the daemon up: after a crash, a logout, a reboot."""
    unit = unit_of(Client().home, system=system)
    write_unit(unit, force=force)
    if now:
        if not unit.is_reachable():
            following = " && ".join(map(" ".join, unit.next_commands))
            hint = f"The unit is written. Where systemd runs: `{following}`."
            raise Conflict("systemd does not run here, or cannot be asked from this session", hint=hint)
        client = Client(Home(unit.home))
        is_alive = False
        with contextlib.suppress(DaemonUnreachable):
            client.status()
            is_alive = True
        if is_alive:  # it makes room for systemd's
            _await_end(client, client.shutdown().pid)
        tell_systemd(*unit.next_commands)
    user = own_name()
    linger = None if unit.system else has_linger(Path("/"), user)
    commands = [] if now else [" ".join(command) for command in unit.next_commands]
    if linger is False:
        commands.append(f"loginctl enable-linger {user}")
    if as_json:
        about = {"unit": str(unit.path), "home": str(unit.home), "system": unit.system, "started": now}
        output.print_json(about | {"linger": linger, "next": commands})
        return
    output.note(f"{unit.path} is written, for the home {unit.home}.")
    if commands:
        output.note("Next: " + " && ".join(commands))


@app.command()
def uninstall(system: _ForAll = False, as_json: AsJson = False) -> None:
    """Remove the unit that `install` wrote. The daemon ends; runs and pools continue."""
    unit = unit_of(Client().home, system=system)
    if unit.path.exists() and unit.is_ours() and unit.is_reachable():
        tell_systemd([*unit.systemctl, "disable", "--now", "lorad"])
    remove_unit(unit)
    if unit.is_reachable():
        tell_systemd([*unit.systemctl, "daemon-reload"])
    text = f"{unit.path} is removed; runs continue."
    output.note_or_json({"removed": str(unit.path)}, text, as_json=as_json)


def _show(client: Client, as_json: bool) -> None:
    data = client.status()
    if as_json:
        output.print_json(data)
        return
    runs = ", ".join(f"{count} {state}" for state, count in data.runs.items() if count) or "no runs"
    age = output.age(data.started_at)
    output.report(f"The daemon (pid {data.pid}, version {data.version}) runs for {age}: {runs}.")
    output.report(f"Home: {data.home}")
    for trouble in data.troubles:
        output.report(f"Something keeps it from continuing; it tries again: {trouble}")
    if data.gateway:
        output.report(f"The gateway speaks OpenAI's API on {data.gateway}.")
    if data.url:
        key = f"the key in {data.key_file}" if data.key_file else "a token"
        output.report(f"With {key} it speaks it on {data.url} as well.")
    if data.url_trouble:
        output.report(f"error: {data.url_trouble}")


def _await_end(client: Client, pid: int) -> None:
    """Wait until the daemon's process is gone: it writes until then, to its database last.

    Raises Conflict.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        gone = select.poll()
        gone.register(process, select.POLLIN)
        if not gone.poll(10_000):
            hint = f"Its log: {client.home.daemon_log}"
            raise Conflict(f"the daemon (pid {pid}) still works after 10 s", hint=hint)
    finally:
        os.close(process)
