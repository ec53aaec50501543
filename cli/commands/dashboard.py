"""The commands tui and top: the dashboard in the terminal or a browser, and what it shows in plain tables."""

import contextlib
import dataclasses
import gc
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import typer

from lorad.alarms import Alarm, alarms
from lorad.box.config import AlarmLimits, Config
from lorad.box.paths import Home
from lorad.cli.commands.pools import device_row, first_few, strangers, versions_in
from lorad.cli.options import AsJson, Watch
from lorad.cli.output import NO_RUNS, duration, note, number, print_json, size
from lorad.cli.streams import takes_all
from lorad.cli.table import Columns, columns, folded_as_is, print_table, terminal_width
from lorad.client.boxes.hosts import limits_of
from lorad.client.client import Client
from lorad.client.columns import COLUMNS, has_losses, with_figures
from lorad.client.launch import connected
from lorad.client.words import set_aside
from lorad.errors import SpecError
from lorad.records.daemon import Status
from lorad.records.devices import Device
from lorad.records.pools import Pool
from lorad.records.runs import Run
from lorad.tui.watch import settings_of
from lorad.tui.widgets.sparkline import sparkline

_SPARK = 12  # steps whose rewards are drawn
_SECONDS = 2  # between two looks
_MOST = 50  # runs that ended, without a terminal that says how many fit
_ORDER = ("running", "starting", "stopping", "queued", "paused", "ended")
_RUNS = columns(
    "name, state, step, reward 1, tok/s 3, version 5, eval 7, owner 8, age 9, recent 6, why 2 cut"
)
_POOLS = columns("pool, state, model 4, runs 1, phase 6, versions 5, sampled 2, trained 3, memory 7, idle 8")
_DEVICES = columns("device, used, total 3, busy, pool 1, user 2, others cut")
_ALARMS = columns(", about, alarm, what cut")
_SIGNS = {"bad": "!!", "look": "!"}
ENTER = "\x1b[?1049h\x1b[?25l\x1b[?2026h\x1b[H\x1b[2J"  # the other screen of the terminal, empty, until DRAWN
DRAWN = "\x1b[?2026l"
LEAVE = "\x1b[?25h\x1b[?1049l"


class _Look(msgspec.Struct, frozen=True):
    """A snapshot of what `lorad top` shows."""

    status: Status
    runs: list[Run]
    pools: list[Pool]
    devices: list[Device]
    alarms: Sequence[Alarm]
    at: float


def top(watch: Watch = False, as_json: AsJson = False) -> None:
    """Show runs, pools, devices and alarms at a glance; with --watch --json one line of JSON each time.

    sampled, trained: tokens per second. An alarm with !! means that something is broken.
    """
    client = Client()
    limits = limits_of(client.where)
    while True:
        seen = _look(client, limits)
        if not as_json:
            _show(seen, watch)
        else:
            shown = {name: getattr(seen, name) for name in ("runs", "pools", "devices", "alarms", "at")}
            print_json(shown, in_line=watch)
        if not watch:
            return
        time.sleep(_SECONDS)


def _look(client: Client, limits: AlarmLimits) -> _Look:
    """Take a snapshot. The requests run one after the other, as together they take a few milliseconds."""
    runs = sorted(client.list(limit=_MOST), key=lambda run: _ORDER.index(run.state))
    status = client.status()
    pools = client.pools()
    devices = client.devices()
    now = time.time()
    raised = alarms(runs, limits, now, pools=pools, devices=devices, status=status)
    return _Look(status, runs, pools, devices, raised, now)


def _show(seen: _Look, watch: bool) -> None:
    width = terminal_width()
    raised = [(_SIGNS[a.level], a.subject or a.on, a.kind, a.says) for a in seen.alarms]
    devices = []
    for device in seen.devices:  # with the figures of `lorad devices`
        name, _, *figures, _, _ = device_row(device)
        others = "; ".join(part for part in (set_aside(device), *strangers(device)) if part)
        devices.append([name, *figures, others])
    pools = [
        (
            pool.pool,
            pool.state,
            (os.path.basename(pool.model) or pool.model)
            + (f" on {first_few(pool.nodes)}" if pool.nodes else ""),
            first_few(pool.tenants),
            ", ".join(dict.fromkeys(run.phase for run in pool.runs if run.phase != "idle")) or "idle",
            versions_in(pool),
            number(pool.engine_tokens_per_second, 0),
            number(pool.trainer_tokens_per_second, 0),
            size(pool.memory_bytes),
            duration(pool.idle_seconds),
        )
        for pool in seen.pools
    ]
    below: list[tuple[Columns, Sequence[Sequence[object]]]] = [
        (_POOLS, pools),
        (_DEVICES, devices),
        (_ALARMS, raised),
    ]
    names = with_figures([column.name for column in _RUNS], has_losses(seen.runs))
    cells = COLUMNS | {"recent": lambda run: sparkline(run.recent, _SPARK)}
    runs = [[cells[name](run) for name in names] for run in seen.runs]
    if width is not None:  # the runs that work, and as many more as fit into the terminal
        least = len([run for run in seen.runs if run.state in _ORDER[:4]])
        free = shutil.get_terminal_size((80, 24)).lines - 5 - sum(len(rows) + 2 for _, rows in below if rows)
        runs = runs[: max(free, least, 3)]
    if watch:
        print("\x1b[H\x1b[2J", end="")
    counts = [f"{count} {state}" for state in _ORDER if (count := seen.status.runs.get(state))]
    disk = [f"{size(seen.status.disk.free)} free"] if seen.status.disk else []
    clock = time.strftime("%H:%M:%S", time.localtime(seen.at))
    print(*folded_as_is("  ".join(["lorad", clock, ", ".join(counts), *disk]), width or 1000), sep="\n")
    print()
    heads = [column._replace(name=name) for column, name in zip(_RUNS, names, strict=True)]
    print_table(heads, runs, empty=NO_RUNS, single=True)
    if (more := sum(seen.status.runs.values()) - len(runs)) > 0 and runs:
        note(f"{more} more: `lorad list --all` shows every run.")
    for head, rows in below:
        if rows:
            print()
            print_table(head, rows, empty="", single=True)
    sys.stdout.flush()


def tui(
    readonly: Annotated[bool, typer.Option("--readonly", help="Only look: every action is refused.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="In a browser: prints a URL for you alone.")] = False,
    port: Annotated[
        int | None, typer.Option(help="Port on 127.0.0.1 for --serve; default: a free one.", min=0, max=65535)
    ] = None,
) -> None:
    """Watch and control runs in the terminal, or (--serve) in a browser."""
    if port is not None and not serve:
        raise typer.BadParameter("it needs --serve", param_hint="--port")
    if not serve and "TEXTUAL_DRIVER" not in os.environ:
        lack = ""
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            lack = "its input or output is not one"
        elif (kind := os.environ.get("TERM", "")) in ("dumb", "unknown"):
            lack = f"TERM={kind} says that this one cannot move its cursor"
        elif not takes_all(sys.__stderr__):
            characters = f"its locale ({sys.stderr.encoding}) lacks the characters that are drawn with"
            lack = f"{characters}: try LC_ALL=C.UTF-8"
        if lack:
            hint = "`lorad top` prints the same as text, and `lorad tui --serve` shows it in a browser."
            raise SpecError(f"lorad tui needs a terminal, and {lack}", hint=hint)
    client = connected()
    if serve:
        from lorad.tui.web.server import serve as serve_browsers

        serve_browsers(client.home.root, port=port or 0, readonly=readonly)
        return
    config = settings_of(client.where)
    if not isinstance(client.where, Home):  # ssh may ask before the screen is drawn, and not after that
        client = Client(dataclasses.replace(client.where, asks=False))
    os.environ.setdefault("TEXTUAL_FPS", "500")  # only what changed is drawn, and a key waits for two frames
    gc.disable()  # until the first screen stands: a tenth of the time until then
    with glance(client, config) if sys.stdout.isatty() and sys.stderr.isatty() else contextlib.nullcontext():
        from lorad.tui.app import LoradApp

        screens = LoradApp(client, readonly=readonly, config=config)
    screens.run()


@contextlib.contextmanager
def glance(client: Client, config: Config) -> Iterator[None]:
    """Print what `lorad top` shows while the screens are imported that replace it.

    The import takes longer than everything else, on a machine with busy cores a second and more.
    """
    seen = _look(client, config.alarms)
    try:
        print(ENTER, end="")
        _show(seen, watch=False)
        print(DRAWN, end="", flush=True)
        yield
    except BaseException:
        print(DRAWN, LEAVE, sep="", end="", flush=True)
        raise
