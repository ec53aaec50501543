"""What one request, and one caller, may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from lorad.bounds import Bounds
from lorad.gateway.errors import ApiError

BODY_BYTES = 8 << 20
BODY_SECONDS = 9.0  # for a body to arrive
READ_SECONDS = 60.0  # for a client to take what was sent to it
CONNECTIONS = Bounds(idle=75.0, write=READ_SECONDS, of_own=1024)
POOL_SECONDS = 600.0  # for a pool to say anything more
MOST_REQUESTS = 512  # at once
MOST_OF_ONE = 256  # of one owner
MOST_SAMPLES = 4096  # of one request: prompts times n


class Limits:
    """Counts completions that are under way."""

    def __init__(self) -> None:
        self._owners: Counter[str] = Counter()

    @property
    def under_way(self) -> int:
        return self._owners.total()

    @contextmanager
    def place(self, owner: str) -> Iterator[None]:
        """Around a request. Raises ApiError 429."""
        if self.under_way >= MOST_REQUESTS or self._owners[owner] >= MOST_OF_ONE:
            raise ApiError(
                429,
                f"{self._owners[owner]} of your requests and {self.under_way} in all are under way: more than "
                f"{MOST_OF_ONE} and {MOST_REQUESTS} are not taken at once. Ask again when some have ended.",
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
