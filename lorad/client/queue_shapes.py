"""What the daemon says of a run that waits for its start."""

from msgspec import Struct


class Queued(Struct, frozen=True):
    """Where a run stands in the queue.

    place: 1 is next. of: how many runs wait.
    behind: why those before it come first; "" where nobody else is before it.
    starts_at: the Unix time at which it will start, as far as can be known; None: not known.
    after: the run whose end makes room for it.
    """

    place: int
    of: int = 0
    behind: str = ""
    starts_at: float | None = None
    after: str = ""
