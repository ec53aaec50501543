"""A sweep, from Python."""

import time

from lorad.api.connection import DaemonConnection, rest
from lorad.api.run import Run, run_row
from lorad.api.table import Table
from lorad.api.waiting import has_failed, is_over
from lorad.errors import DaemonUnreachable, RunFailed, TimedOut
from lorad.records import sweeps

_PERIOD = 0.5  # seconds between looks


class Sweep:
    """A sweep: what `Lorad.sweep` has started. Safe to use from several threads."""

    def __init__(self, connection: DaemonConnection, name: str) -> None:
        self._connection = connection
        self._name = name

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self._name

    @property
    def details(self) -> sweeps.Sweep:
        """The sweep as it is: its grid, its runs with their values, and the rungs of its halving.

        Raises NotFound where there is no such sweep.
        """
        (sweep,) = self._connection.client.sweeps(self._name)
        return sweep

    @property
    def runs(self) -> Table[Run]:
        """Its runs; as a table with a column for each key of the grid."""
        values = {run.name: run.values for run in self.details.runs}
        handles = [Run(self._connection, run) for run in self.details.runs]
        return Table(handles, row=lambda run: {"name": run.name} | values.get(run.name, {}) | run_row(run))

    def wait(self, *, timeout: float | None = None) -> sweeps.Sweep:
        """Wait until all of its runs are over.

        timeout: seconds.

        Raises TimedOut, and RunFailed of the first run when no run ended well.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                sweep = self.details
            except DaemonUnreachable as error:
                self._connection.revive(error)
                continue
            at_work = [run.name for run in sweep.runs if not is_over(run)]
            if not at_work and sweep.runs and all(has_failed(run) for run in sweep.runs):
                run = sweep.runs[0]
                name = sweep.sweep
                hint = f"No run of sweep {name} ended well; `lorad sweep --list {name}` shows all."
                raise RunFailed(run.name, run.reason or run.state, run.detail, step=run.step, hint=hint)
            if not at_work:
                return sweep
            if deadline is not None and time.monotonic() >= deadline:
                names = ", ".join(at_work)
                raise TimedOut(f"{names} of sweep {self._name} are not over after {timeout:g} seconds")
            rest(_PERIOD)

    def __repr__(self) -> str:
        return f"<Sweep {self._name}>"
