"""A pool: its figures, who has a slot or waits for one, and the logs of its processes."""

import contextlib

from msgspec import Struct
from rich.text import Text

from lorad.client.client import Client
from lorad.errors import NotAllowed, NotFound
from lorad.text import one_line
from lorad.tui.actions.table import bindings
from lorad.tui.details import pool_figures
from lorad.tui.details.pool_figures import Seen
from lorad.tui.details.screen import Chosen, DetailScreen, Drawn
from lorad.tui.run.logs import Logs, Part

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


class PoolScreen(DetailScreen):
    NAME = "pool"
    COLUMNS = pool_figures.COLUMNS
    BINDINGS = bindings("pool", "pool_screen")

    def __init__(self, subject: str) -> None:
        super().__init__(subject)
        self._logs = PoolLogs()  # it reads on the feed's thread
        self.below_table = [self._logs]

    def fetch(self, client: Client, chosen: Chosen) -> _PoolNews:
        pool = next((pool for pool in client.pools() if pool.pool == self.subject), None)
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

    def show(self, data: tuple[Chosen, _PoolNews]) -> None:
        super().show(data)
        if (log := data[1].log) is not None:
            self._logs.show(log)

    def draw(self, fetched: _PoolNews | None, chosen: Chosen) -> Drawn:
        name = self.subject
        title = Text.assemble(("pool ", "bold"), one_line(name))
        if fetched is None:
            return Drawn(title)
        seen = fetched.seen
        pool = seen.pool
        if pool is None:
            gone = f"{one_line(name)} is not up: it ended, or was idle for too long. esc goes back."
            return Drawn(title, gone, rows={})
        title.append(f"  {len(pool.tenants)} runs · {pool.state}")
        rows = pool_figures.rows(pool, seen)
        above = pool_figures.lines(pool, len(seen.waiting))
        opens = {key: ("run", key) for key in rows}
        about = {run.name: run.waiting for run in seen.waiting}
        return Drawn(title, above, "", rows, command="lorad pools", opens=opens, about=about, ended=name)
