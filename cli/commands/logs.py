"""lorad logs [RUN]: what its processes print, or the daemon, or the gateway."""

import sys
import time
from typing import Annotated

import typer

from lorad.box.paths import Home
from lorad.cli import candidates, output
from lorad.cli.options import AsJson
from lorad.client.client import Client
from lorad.client.shapes import LogPart
from lorad.errors import DaemonUnreachable, NotFound, SpecError

_WITHOUT_RUN = ("daemon", "gateway")
_SHOWN = 1 << 16  # bytes, of a log that no daemon reads


def logs(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="A run's name.", show_default=False, autocompletion=candidates.runs
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until the run is over or Ctrl-C.")
    ] = False,
    of: Annotated[
        str,
        typer.Option(
            help="driver, pool, trainer or engine of a run; or daemon or gateway.",
            autocompletion=candidates.words("driver", "pool", "trainer", "engine", "daemon", "gateway"),
        ),
    ] = "driver",
    as_json: AsJson = False,
) -> None:
    """Print the end of a log; -f follows it. `lorad logs --of daemon` and `--of gateway` need no run."""
    client = Client()
    if (of in _WITHOUT_RUN) == (run is not None):
        hint = "`lorad logs RUN` for a run's, `lorad logs --of daemon` or `--of gateway` without one."
        raise SpecError(f"--of {of} {'belongs to no run' if run else 'needs the name of a run'}", hint=hint)
    part = _read(client, run, of)
    if as_json:
        output.print_json(part)
        return
    while True:
        sys.stdout.write(output.printable(part.text))
        sys.stdout.flush()
        if not follow or (not part.text and run and client.show(run).state in ("ended", "paused")):
            return
        time.sleep(0 if part.text else 0.3)
        part = _read(client, run, of, offset=part.offset)


def _read(client: Client, run: str | None, of: str, *, offset: int = -_SHOWN) -> LogPart:
    if run is not None:
        return client.logs(run, of=of, offset=offset)
    try:
        return client.own_logs(of, offset=offset)
    except DaemonUnreachable:  # when its log is wanted most
        if offset >= 0:
            raise
        return _end_of(client.home, of)


def _end_of(home: Home, of: str) -> LogPart:
    """The end of a log as this user may read it. Raises NotFound, OSError."""
    lives = sorted((home.gateway / "attempts").glob("[0-9]*/log"))
    paths = [home.daemon_log] if of == "daemon" else lives
    if not paths or not paths[-1].exists():
        raise NotFound(f"there is no log of a {of} in {home.root}", hint=f"No {of} has worked there yet.")
    with paths[-1].open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _SHOWN))
        return LogPart(file.read().decode(errors="replace"), size, size)
