"""Limits on what one request and one caller may take."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lorad.bounds import Bounds
from lorad.gateway.errors import ApiError

BODY_BYTES = 8 << 20
BODY_SECONDS = 9.0  # for a body to arrive
_READ_SECONDS = 60.0  # for a client to take what was sent to it
CONNECTIONS = Bounds(idle=75.0, write=_READ_SECONDS, of_one=320, of_own=1024)
BEHIND_FRONT = Bounds(idle=75.0, write=_READ_SECONDS, of_one=1024, of_own=1024)  # of an owner's gateway
POOL_SECONDS = 600.0  # for a pool to say anything more
MOST_REQUESTS = 512  # at once
MOST_OF_ONE = 256  # of one owner
MOST_SAMPLES = 4096  # of one request: prompts times n


@dataclass
class RequestLimits:
    """Counts the completions that are under way.

    Attributes:
        most: How many there may be at once.
        of_one: How many of them one owner may have.
    """

    most: int = MOST_REQUESTS
    of_one: int = MOST_OF_ONE
    _owners: Counter[str] = field(default_factory=Counter)

    @property
    def under_way(self) -> int:
        return self._owners.total()

    @contextmanager
    def place(self, owner: str) -> Iterator[None]:
        """Count a request of an owner within the block. Raises ApiError 429 where there are too many."""
        if self.under_way >= self.most or self._owners[owner] >= self.of_one:
            raise ApiError(
                429,
                f"{self._owners[owner]} of your requests and {self.under_way} in all are under way: more "
                f"than {self.of_one} and {self.most} are not taken at once. Ask again when some have ended.",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=1,
            )
        self._owners[owner] += 1
        try:
            yield
        finally:
            self._owners[owner] -= 1
            self._owners += Counter()  # forget who has none
