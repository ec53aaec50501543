"""The Python API: `lorad.connect()`, the handles that it leads to, and their async twins.

Its data are the daemon's answers, asked for by `lorad.client` each time: a handle keeps a name, no state.

A method is added in `api/run.py`, `api/box.py` or `api/sweep.py`, with its line in `api/twins.py`. Every name
of `__all__` is public and keeps its meaning and its signature: `tests/api/test_public.py` compares them with
a frozen file. The package `lorad` hands these names out when they are first asked for, so that `import lorad`
costs nothing.
"""

from lorad.api.box import Lorad, connect
from lorad.api.run import Progress, Run
from lorad.api.sweep import Sweep
from lorad.api.table import Table
from lorad.api.twins import AsyncLorad, AsyncRun, AsyncSweep, connect_async
from lorad.errors import (
    Conflict,
    DaemonUnreachable,
    LoradError,
    NotAllowed,
    NotFound,
    NotReached,
    RunFailed,
    SpecError,
    TimedOut,
)

__all__ = [
    "connect", "connect_async", "Lorad", "AsyncLorad", "Run", "AsyncRun", "Sweep", "AsyncSweep",
    "Table", "Progress", "LoradError", "SpecError", "NotFound", "NotAllowed", "DaemonUnreachable", "Conflict",
    "RunFailed", "NotReached", "TimedOut",
]  # fmt: skip
