"""Shows one pool: its figures, who has a slot or waits for one, and the logs of its processes."""

import contextlib
from collections.abc import Iterable

from msgspec import Struct
from rich.text import Text
from textual.widget import Widget

from lorad.client.client import Client
from lorad.errors import NotAllowed, NotFound
from lorad.text import one_line
from lorad.tui.actions.table import bindings
from lorad.tui.feed import Changes
from lorad.tui.pool import figures
from lorad.tui.pool.figures import Seen
from lorad.tui.run.logs import Logs, Part
from lorad.tui.screens.base import TableScreen
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Rows

_WAITS = frozenset({"queued", "starting"})


class PoolLogs(Logs):
    """The logs of a pool, which are read through a run that is in it."""

    def __init__(self) -> None:
        super().__init__("")
        self._of = "pool"

    def read_of(self, client: Client, run: str, life: object) -> Part | None:
        """Read the log through a run. life: tells the pool from another one, which has other logs."""
        names = [name for name in client.log_names(run) if name != "driver"] or ["pool"]
        self.run_name = run
        return self.part(client, (self._of, life), names)


class _PoolNews(Struct, frozen=True):
    seen: Seen
    log: Part | None


class PoolScreen(TableScreen):
    TABLE = "pool-rows"
    BINDINGS = bindings("pool", "back", "pool_screen")
    DEFAULT_CSS = """
    PoolScreen #pool-facts { height: auto; max-height: 8; width: 100%; padding: 0 1; }
    PoolScreen #pool-rows { height: auto; max-height: 40%; min-height: 3; background: $background; }
    PoolScreen PoolLogs { height: 1fr; min-height: 4; }
    PoolScreen.-short #pool-facts { max-height: 2; }
    PoolScreen.-short PoolLogs { display: none; }
    PoolScreen.-middle #pool-facts { max-height: 4; }
    """

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.pool = pool
        self._seen = Seen(None)

    def body(self) -> Iterable[Widget]:
        self._logs = PoolLogs()  # it reads on the feed's thread
        yield Line(id="pool-facts")
        yield Rows(figures.COLUMNS, id="pool-rows")
        yield self._logs

    # -- what is read and shown ------------------------------------------------------------------------------
    def read(self, client: Client, changes: Changes) -> _PoolNews | None:
        pool = next((pool for pool in client.pools() if pool.pool == self.pool), None)
        if pool is None:
            return _PoolNews(Seen(None), None)
        runs = client.list()
        named = {*pool.tenants, *(name.rpartition("@")[0] for name in pool.loaded)}
        inside = [run for run in runs if run.name in named]
        waiting = [
            run
            for run in runs
            if run.state in _WAITS
            and run.name not in pool.tenants
            and (run.pool == pool.pool or (run.pool is None and run.base == pool.model))
        ]
        through = next((run.name for run in inside if run.pool == pool.pool), None)
        log = None
        if through is not None:
            with contextlib.suppress(NotAllowed, NotFound):  # it ended just now, or is somebody else's
                log = self._logs.read_of(client, through, pool.pid)
        return _PoolNews(Seen(pool, inside, waiting, client.aliases()), log)

    def show(self, data: _PoolNews) -> None:
        self._seen = data.seen
        pool = data.seen.pool
        facts = self.query_one("#pool-facts", Line)
        if pool is None:
            facts.say(f"{one_line(self.pool)} is not up: it ended, or was idle for too long. esc goes back.")
            self.say_title(Text.assemble(("pool ", "bold"), one_line(self.pool)))
            self.table.show({})
            return
        facts.say(figures.lines(pool, len(data.seen.waiting)))
        counted = f"{len(pool.tenants)} runs · {pool.state}"
        self.say_title(Text.assemble(("pool ", "bold"), one_line(self.pool), f"  {counted}"))
        rows = figures.rows(data.seen)
        self.table.show(rows, figures.values(data.seen, rows))
        if data.log is not None:
            self._logs.show(data.log)
        self.offer("lorad pools", self.pool)

    # -- what keys act on ------------------------------------------------------------------------------------
    def targets(self, on: str) -> list[str]:
        return [self.pool] if on == "pool" and self._seen.pool else []

    def has(self, target: str) -> bool:
        return target == self.pool and self._seen.pool is not None

    def on_rows_selected(self, event: Rows.Selected) -> None:
        self.lorad.open_run(event.key)
