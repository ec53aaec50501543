# What type checkers see of `lorad`, whose names are imported when they are first asked for.
from lorad.api import (
    AsyncLorad as AsyncLorad,
)
from lorad.api import (
    AsyncRun as AsyncRun,
)
from lorad.api import (
    AsyncSweep as AsyncSweep,
)
from lorad.api import (
    Conflict as Conflict,
)
from lorad.api import (
    DaemonUnreachable as DaemonUnreachable,
)
from lorad.api import (
    Lorad as Lorad,
)
from lorad.api import (
    LoradError as LoradError,
)
from lorad.api import (
    NotAllowed as NotAllowed,
)
from lorad.api import (
    NotFound as NotFound,
)
from lorad.api import (
    NotReached as NotReached,
)
from lorad.api import (
    Progress as Progress,
)
from lorad.api import (
    Run as Run,
)
from lorad.api import (
    RunFailed as RunFailed,
)
from lorad.api import (
    SpecError as SpecError,
)
from lorad.api import (
    Sweep as Sweep,
)
from lorad.api import (
    Table as Table,
)
from lorad.api import (
    TimedOut as TimedOut,
)
from lorad.api import (
    connect as connect,
)
from lorad.api import (
    connect_async as connect_async,
)

__version__: str
__all__: list[str]
