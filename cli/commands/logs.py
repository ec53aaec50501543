"""The command `lorad logs`: what the processes of a run print, or the daemon, or the gateway."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated

import typer

from lorad.bounds import LINE_CHARACTERS
from lorad.box.paths import Home
from lorad.cli import candidates, output
from lorad.cli.options import AsJson
from lorad.client.client import Client
from lorad.client.log_lines import LEVELS, Sieve, Wish, wish
from lorad.errors import DaemonUnreachable, NotFound, SpecError
from lorad.records.runs import LogPart
from lorad.selection import seconds_in

_WITHOUT_RUN = ("daemon", "gateway")
_SHOWN = 1 << 16  # bytes that are shown where no number of lines is given
_MOST = 1 << 20  # bytes in which the last lines are looked for
_KEPT = 8 << 20  # characters of lines that are kept until the end of a log is reached
_PERIOD = 0.3  # seconds between looks
_Read = Callable[[int], LogPart]  # from an offset


def logs(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run's name.", autocompletion=candidates.runs)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until the run is over or Ctrl-C.")
    ] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", help="Only the last so many lines.", min=0)
    ] = None,
    of: Annotated[
        str | None,
        typer.Option(
            help="driver (the default), pool, trainer, engine, engine-1 of a run; or daemon or gateway.",
            autocompletion=candidates.words("driver", "pool", "trainer", "engine", "daemon", "gateway"),
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="All processes of the run, each line with its process.")
    ] = False,
    attempt: Annotated[
        int | None, typer.Option(help="Of this attempt of the driver; default: the newest.", min=1)
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="Only what the processes on this node of a cluster print.")
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option(
            help="Lines with these words, in any case: 'nan', '\"out of memory\"', 'warning !resource'."
        ),
    ] = None,
    level: Annotated[
        str | None,
        typer.Option(
            help="Lines of this level or a worse one: warning, error; with their tracebacks.",
            autocompletion=candidates.words(*LEVELS),
        ),
    ] = None,
    since: Annotated[str | None, typer.Option(help="Lines written at most so long ago: 10m, 2h.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the end of a log; -f follows it. `lorad logs --of daemon` and `--of gateway` need no run.

    With --grep, --level, --since or --node the whole log is read, and -n counts lines that fit.
    """
    client = Client()
    if every and (run is None or of is not None or attempt is not None):
        hint = "`lorad logs RUN --all`, without --of and --attempt."
        raise SpecError("--all shows all logs of one run", hint=hint)
    if node is not None and (run is None or of is None):
        hint = f"`lorad logs RUN --of trainer --node {node}`."
        raise SpecError("--node chooses lines of one log of a run", hint=hint)
    name = of or "driver"
    if (name in _WITHOUT_RUN) == (run is not None):
        hint = "`lorad logs RUN` for a run's, `lorad logs --of daemon` or `--of gateway` without one."
        raise SpecError(f"--of {name} {'belongs to no run' if run else 'needs the name of a run'}", hint=hint)
    age = seconds_in("--since", since)
    sought = wish(grep, level, age, node, time.time())
    if (every and run is not None) or sought:
        log = None if every else name
        _by_lines(client, run, log, attempt, lines, sought, follow=follow, as_json=as_json)
        return
    read = partial(_read, client, run, name, attempt or 0)
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
    """Reads one of several logs, line by line, and leaves out what is not asked for."""

    def __init__(self, read: _Read, sought: Wish) -> None:
        self.part = LogPart("")
        self.sieve = Sieve(sought)
        self.read = read
        self._sought = sought
        self._first: deque[str] = deque()
        self._rest = ""

    def begin(self, lines: int | None, *, follow: bool) -> None:
        """Read the end of the log, or all of it, in parts, where lines of it are asked for."""
        if not self._sought:
            self.part = _end(self.read, lines)
            return
        characters = 0
        self.part = self.read(0)
        end = self.part.size
        while True:
            is_end = self.part.offset >= end or not self.part.text
            for line in self._came(last=is_end and not follow):
                self._first.append(line)
                characters += len(line)
                most = len(self._first) if lines is None else lines
                while len(self._first) > most or (characters > _KEPT and len(self._first) > 1):
                    characters -= len(self._first.popleft())
            if is_end:
                self.part = LogPart("", self.part.offset, self.part.size)
                return
            self.part = self.read(self.part.offset)

    def whole(self) -> LogPart:
        """Return what was read at first, without the lines that are not asked for."""
        if not self._sought:
            return self.part
        return LogPart("".join(f"{line}\n" for line in self._first), self.part.offset, self.part.size)

    def lines(self, *, last: bool) -> Iterator[str]:
        """Yield what came since the last time, with `last` also a line without its end."""
        while self._first:
            yield self._first.popleft()
        yield from self._came(last=last)

    def _came(self, *, last: bool) -> Iterator[str]:
        *whole, rest = (self._rest + self.part.text).split("\n")
        self._rest = "" if last else rest[:LINE_CHARACTERS]
        yield from self.sieve.choose([*whole, rest] if last and rest else whole)


def _by_lines(
    client: Client,
    run: str | None,
    of: str | None,
    attempt: int | None,
    lines: int | None,
    sought: Wish,
    *,
    follow: bool,
    as_json: bool,
) -> None:
    """Print the lines of one log, or of all of a run, and with `follow` new ones as they are written."""
    logs: dict[str, _Log] = {}

    def meet(lines: int | None) -> None:
        for name in [of] if of is not None else client.log_names(run or ""):
            if name not in logs:
                logs[name] = _Log(partial(_read, client, run, name, attempt or 0), sought)
                logs[name].begin(lines, follow=follow and not as_json)

    meet(lines)
    if sought.since:
        _tell_timeless(logs, is_one=of is not None)
    if as_json:
        parts = {name: log.whole() for name, log in logs.items()}
        output.print_json(parts if of is None else parts[of])
        return
    count = 0
    while True:
        width = max(map(len, logs))
        came = any(log.part.text for log in logs.values())
        over = not follow or (not came and run is not None and _is_over(client, run, attempt))
        for name, log in logs.items():
            for line in log.lines(last=over):
                count += 1
                print(output.printable(f"{name:<{width}} | {line}" if of is None else line), flush=True)
        if over:
            break
        time.sleep(0 if came else _PERIOD)
        for log in logs.values():
            log.part = log.read(log.part.offset)
        meet(None)  # a pool that came up meanwhile
    if sought.words and not count:
        output.note("No line fits. --grep looks for words as they stand, not for an expression.")


def _tell_timeless(logs: dict[str, _Log], *, is_one: bool) -> None:
    """Say which logs have no times. Raises SpecError where it is the only one."""
    for name, log in logs.items():
        if log.part.size and not log.sieve.has_times:
            if is_one:
                hint = "Leave --since out: -n 100 shows the last lines."
                raise SpecError(f"no line of the {name}'s log says when it was written", hint=hint)
            output.note(f"{name}: none of its lines says when it was written, so --since leaves all out.")


def _read(client: Client, run: str | None, of: str, attempt: int, offset: int) -> LogPart:
    """Read a part of a log, without a daemon as this user may read it. Raises NotFound, OSError."""
    if run is not None:
        return client.logs(run, of=of, attempt=attempt, offset=offset)
    try:
        return client.own_logs(of, offset=offset)
    except DaemonUnreachable:  # when its log is wanted most
        if not isinstance(client.where, Home):
            raise
        home = client.where
    lives = sorted((home.gateway / "attempts").glob("[0-9]*/log"))
    paths = [home.daemon_log] if of == "daemon" else lives
    if not paths or not paths[-1].exists():
        raise NotFound(f"there is no log of a {of} in {home.root}", hint=f"No {of} has worked there yet.")
    with paths[-1].open("rb") as file:
        size = file.seek(0, 2)
        start = file.seek(min(size, offset) if offset >= 0 else max(0, size + offset))
        data = file.read(_MOST)
        return LogPart(data.decode(errors="replace"), start + len(data), size)
