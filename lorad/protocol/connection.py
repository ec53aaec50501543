"""The calling side of the pool's protocol: a plain blocking connection, one call at a time."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from lorad.errors import PoolLost, from_wire
from lorad.protocol import frames
from lorad.protocol.calls import VERBS, Answer, Call
from lorad.protocol.heartbeat import HEART
from lorad.protocol.listener import uid_of


class Connection:
    """Calls to one pool, from one run and attempt (or from nobody: run "").

    Any failure of the socket raises PoolLost; the caller may make a new Connection with the same `seq` and
    repeat the call: the pool does nothing twice.

    most: bytes of one answer, of a pool that is not to be trusted.
    """

    def __init__(
        self,
        path: Path,
        *,
        run: str = "",
        attempt: int = 0,
        timeout: float | None = None,
        most: int = frames.MAX_BODY,
    ) -> None:
        self.run = run
        self.attempt = attempt
        self._path = path
        self._others = list[Connection]()
        self._ids = itertools.count(1)
        self._seq = 0
        self._most = most
        self._is_aborted = False
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise PoolLost(f"no pool answers on {path}: {error.strerror or error}") from error

    @property
    def peer_uid(self) -> int:
        """Return the user of the pool."""
        return uid_of(self._socket)

    def call(self, verb: str, args: Any) -> Any:
        """Return the result of a verb; the items of a stream are dropped. Raises what the pool raised."""
        result = None
        for result in self.stream(verb, args):  # noqa: B007
            pass
        return result

    def stream(self, verb: str, args: Any) -> Iterator[Any]:
        """Yield the items of a verb, then its result. Raises PoolLost for what is not understood."""
        kind = VERBS[verb]
        with self._lock:
            if kind.mutates:
                self._seq += 1
            call = Call(next(self._ids), verb, args, self.run, self.attempt, self._seq if kind.mutates else 0)
            with _waiting():
                for part in frames.encode(call):
                    self._socket.sendall(part)
            while True:
                with _waiting():
                    answer = frames.read(self._socket.recv_into, Answer, self._most)
                if answer.id != call.id:
                    continue  # the rest of a stream that its reader left early
                if answer.kind == "error":
                    raise from_wire(answer.body)
                expected: Any = kind.item if answer.kind == "item" else kind.result
                try:
                    item = frames.converted(answer.body, expected)
                except msgspec.ValidationError as error:
                    problem = f"the pool's answer is not understood: {error}"
                    raise PoolLost(problem, hint="Is it another version of lorad?") from None
                yield item
                if answer.kind == "result":
                    return

    def open_another(self) -> "Connection":
        """Open one more, for verbs that change nothing, which ends with this one. Raises PoolLost."""
        other = Connection(self._path, run=self.run, attempt=self.attempt, most=self._most)
        self._others.append(other)
        if self._is_aborted:  # by another thread, which may not have seen it
            other.abort()
        return other

    def abort(self) -> None:
        """Have the thread that waits for an answer get PoolLost now, and those of further connections."""
        self._is_aborted = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.abort_others()

    def abort_others(self) -> None:
        """Have the threads that wait for answers to further connections get PoolLost now."""
        for connection in [*self._others]:
            connection.abort()

    def close_others(self) -> None:
        """Close what `open_another` opened."""
        while self._others:
            self._others.pop().close()

    def close(self) -> None:
        self.close_others()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    """Wait for the pool within the block, which counts as idle. Raises PoolLost for any failure."""
    try:
        with HEART.waits():
            yield
    except (OSError, frames.BadFrame) as error:
        raise PoolLost(f"the pool went away: {getattr(error, 'strerror', None) or error}") from error
