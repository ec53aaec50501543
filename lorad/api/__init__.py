"""The Python API: `lorad.connect()`, the handles that it leads to, and their async twins.

Every name of `__all__` is public: it keeps its meaning and its signature, which tests compare with a frozen
file. The package `lorad` hands these names out when they are first asked for, so that `import lorad` costs
nothing.
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
