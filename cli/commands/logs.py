"""The command `lorad logs`: what the processes of a run print, or the daemon, or the gateway."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from lorad.box.paths import Home
from lorad.cli import candidates, output
from lorad.cli.options import AsJson
from lorad.client.client import Client
from lorad.errors import DaemonUnreachable, NotFound, SpecError
from lorad.records.runs import LogPart

_WITHOUT_RUN = ("daemon", "gateway")
_SHOWN = 1 << 16  # bytes that are shown where no number of lines is given
_MOST = 1 << 20  # bytes in which lines are looked for
_PERIOD = 0.3  # seconds between looks
_Read = Callable[[int], LogPart]  # from an offset


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
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", help="Only the last so many lines.", min=0, show_default=False),
    ] = None,
    of: Annotated[
        str | None,
        typer.Option(
            help="driver (the default), pool, trainer, engine, engine-1 of a run; or daemon or gateway.",
            show_default=False,
            autocompletion=candidates.words("driver", "pool", "trainer", "engine", "daemon", "gateway"),
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="All processes of the run, each line with its process.")
    ] = False,
    attempt: Annotated[
        int | None,
        typer.Option(help="Of this attempt of the driver; default: the newest.", min=1, show_default=False),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(help="Only what the processes on this node of a cluster print.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the end of a log; -f follows it. `lorad logs --of daemon` and `--of gateway` need no run."""
    client = Client()
    _refuse_contradiction(run, of, every=every, attempt=attempt)
    if every and run is not None:
        _all_of(client, run, lines, follow=follow, as_json=as_json)
        return

    if node is not None:
        _of_node(client, run, of, node, lines, follow=follow, as_json=as_json)
        return

    def read(offset: int) -> LogPart:
        return _read(client, run, of or "driver", attempt or 0, offset)

    part = _end(read, lines)
    if as_json:
        output.print_json(part)
        return
    while True:
        sys.stdout.write(output.printable(part.text))
        sys.stdout.flush()
        if not follow or (not part.text and run and _is_over(client, run, attempt)):
            return
        time.sleep(0 if part.text else _PERIOD)
        part = read(part.offset)


def _refuse_contradiction(run: str | None, of: str | None, *, every: bool, attempt: int | None) -> None:
    """Raises SpecError."""
    if every and (run is None or of is not None or attempt is not None):
        hint = "`lorad logs RUN --all`, without --of and --attempt."
        raise SpecError("--all shows all logs of one run", hint=hint)
    of = of or "driver"
    if (of in _WITHOUT_RUN) == (run is not None):
        hint = "`lorad logs RUN` for a run's, `lorad logs --of daemon` or `--of gateway` without one."
        raise SpecError(f"--of {of} {'belongs to no run' if run else 'needs the name of a run'}", hint=hint)


def _of_node(
    client: Client,
    run: str | None,
    of: str | None,
    node: str,
    lines: int | None,
    *,
    follow: bool,
    as_json: bool,
) -> None:
    """Print those lines of a log that came from a node: they begin with its name. Raises SpecError."""
    if run is None or of is None or as_json:
        hint = f"`lorad logs RUN --of trainer --node {node}`."
        raise SpecError("--node chooses lines of one log of a run, for people", hint=hint)
    log = _Log(client, run, of)
    begins = f"{node}: "
    log.begin(None)
    most = lines
    while True:
        over = not follow or (not log.part.text and _is_over(client, run, None))
        texts = [line.removeprefix(begins) for line in log.lines(last=over) if line.startswith(begins)]
        for line in texts if most is None else texts[len(texts) - most :] if most else ():
            print(output.printable(line), flush=True)
        most = None
        if over:
            return
        time.sleep(0 if log.part.text else _PERIOD)
        log.advance()


def _is_over(client: Client, run: str, attempt: int | None) -> bool:
    shown = client.show(run)
    return shown.state in ("ended", "paused") or (attempt is not None and attempt < shown.attempt)


def _end(read: _Read, lines: int | None) -> LogPart:
    """Read the end of a log: so many lines, or what is shown without a number of them."""
    if lines is None:
        return read(-_SHOWN)
    span = _SHOWN
    while True:
        part = read(-span)
        tail = part.text.splitlines(keepends=True)
        if len(tail) > lines or span >= min(part.size, _MOST):
            break
        span *= 4
    if len(tail) < lines and span < part.size:
        output.note(f"These are the last {len(tail)} lines: no more than {_MOST >> 20} MiB is read back.")
    return LogPart("".join(tail[-lines:] if lines else []), part.offset, part.size)


class _Log:
    """One of several logs: prints its whole lines, each with the name of the process."""

    def __init__(self, client: Client, run: str, of: str) -> None:
        self.of = of
        self._client = client
        self._run = run
        self.part = LogPart("")
        self._rest = ""

    def begin(self, lines: int | None) -> None:
        self.part = _end(self.read, lines)

    def read(self, offset: int) -> LogPart:
        return self._client.logs(self._run, of=self.of, offset=offset)

    def advance(self) -> None:
        self.part = self.read(self.part.offset)

    def lines(self, *, last: bool) -> Iterator[str]:
        """Yield what came since the last time. last: also a line without its end."""
        *whole, self._rest = (self._rest + self.part.text).split("\n")
        yield from whole
        if last and self._rest:
            yield self._rest
            self._rest = ""


def _all_of(client: Client, run: str, lines: int | None, *, follow: bool, as_json: bool) -> None:
    """Print all logs of a run: first the end of each, then what comes, as it comes."""
    logs: dict[str, _Log] = {}

    def meet(lines: int | None) -> None:
        for of in client.log_names(run):
            if of not in logs:
                logs[of] = _Log(client, run, of)
                logs[of].begin(lines)

    meet(lines)
    if as_json:
        output.print_json({of: log.part for of, log in logs.items()})
        return
    while True:
        width = max(map(len, logs))
        came = any(log.part.text for log in logs.values())
        over = not follow or (not came and _is_over(client, run, None))
        for log in logs.values():
            for line in log.lines(last=over):
                print(output.printable(f"{log.of:<{width}} | {line}"), flush=True)
        if over:
            return
        time.sleep(0 if came else _PERIOD)
        for log in logs.values():
            log.advance()
        meet(None)  # a pool that came up meanwhile


def _read(client: Client, run: str | None, of: str, attempt: int, offset: int) -> LogPart:
    if run is not None:
        return client.logs(run, of=of, attempt=attempt, offset=offset)
    try:
        return client.own_logs(of, offset=offset)
    except DaemonUnreachable:  # when its log is wanted most
        if offset >= 0 or not isinstance(client.where, Home):
            raise
        return _end_of(client.where, of, -offset)


def _end_of(home: Home, of: str, most: int) -> LogPart:
    """Read the end of a log as this user may read it, at most so many bytes. Raises NotFound, OSError."""
    lives = sorted((home.gateway / "attempts").glob("[0-9]*/log"))
    paths = [home.daemon_log] if of == "daemon" else lives
    if not paths or not paths[-1].exists():
        raise NotFound(f"there is no log of a {of} in {home.root}", hint=f"No {of} has worked there yet.")
    with paths[-1].open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - most))
        return LogPart(file.read().decode(errors="replace"), size, size)
