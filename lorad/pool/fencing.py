"""Who may change a run's slot, and that nothing is done twice: see `lorad/protocol/calls.py`.

A mutating call becomes a task of its own, which no broken connection stops; its outcome, result or error, is
recorded.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from lorad.errors import Conflict, Fenced
from lorad.protocol.calls import Call

RECORDED = 16  # replies kept for each run
_IDLE = "idle"

_Work = Callable[[], Coroutine[Any, Any, Any]]


class Fence:
    """The fence of one run.

    Attributes:
        attempt: The newest attempt that was seen.

    Args:
        abort: Ends a stream by its request name.
    """

    def __init__(self, run: str, abort: Callable[[str], Awaitable[None]]) -> None:
        self.run = run
        self.attempt = 0
        self._phase = _IDLE  # or the verb under way
        self._abort = abort
        self._newest = 0  # seq
        self._replies: dict[int, tuple[str, asyncio.Task[Any]]] = {}  # verb and outcome, by seq
        self._slot = asyncio.Lock()
        self._streams: dict[str, int] = {}  # request -> attempt
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def busy(self) -> str:
        """Return the verb under way, or `idle`."""
        return self._phase if self._phase != _IDLE or not self._streams else "generate"

    async def once(self, call: Call, work: _Work) -> Any:
        """Return the outcome of a mutating call, which is done now, under way or recorded.

        Raises Fenced, Conflict, or what `work` does.
        """
        self._admit(call)
        reply = self._replies.get(call.seq)
        if reply is None:
            if call.seq <= self._newest:
                raise Fenced(
                    f"call {call.seq} of {self.run} attempt {call.attempt} is older than the {RECORDED} "
                    "recorded replies",
                    hint="Resume the run: its state in the pool is not what the caller thinks.",
                )
            self._newest = call.seq
            reply = self._replies[call.seq] = (call.verb, self._spawn(call, work))
            ended = [seq for seq, (_, task) in self._replies.items() if task.done()]
            for seq in ended[: max(0, len(self._replies) - RECORDED)]:
                del self._replies[seq]
        verb, outcome = reply
        if verb != call.verb:
            raise Conflict(
                f"call {call.seq} of {self.run} attempt {call.attempt} was {verb}, now it is {call.verb}",
                hint="A sequence number belongs to one call; repeat that call or count on.",
            )
        return await asyncio.shield(outcome)

    async def read(self, call: Call, work: _Work) -> Any:
        """Return the result of a call that reads the slot, between the ones that change it."""
        self._admit(call)
        return await asyncio.shield(self._spawn(call, work))

    @contextmanager
    def stream(self, call: Call, request: str) -> Iterator[Callable[[], None]]:
        """Enter a stream of the run; provides a check that raises Fenced once a newer attempt began."""
        self._admit(call)
        self._streams[request] = call.attempt
        try:
            yield lambda: self._check(call)
        finally:
            del self._streams[request]

    async def settle(self) -> None:
        """Wait for everything that was admitted."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _admit(self, call: Call) -> None:
        self._check(call)
        if call.attempt > self.attempt:
            if call.verb != "open":
                raise Conflict(
                    f"{call.verb} is the first call of {self.run} attempt {call.attempt}; it must be open",
                    hint="This pool does not know that attempt: it may have been restarted. Resume the run.",
                )
            self.attempt = call.attempt
            self._newest = 0
            self._replies = {}

    def _check(self, call: Call) -> None:
        if call.attempt < self.attempt:
            raise Fenced(
                f"{call.verb} came from attempt {call.attempt} of {self.run}, but attempt {self.attempt} "
                "has begun",
                hint="This process is out of date and has nothing left to do.",
            )

    def _spawn(self, call: Call, work: _Work) -> asyncio.Task[Any]:
        task = asyncio.create_task(self._alone(call, work), name=f"{self.run} {call.verb}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        # also one that nobody waits for any more
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.clear_frames(error.__traceback__)  # a recorded error keeps no tensors alive

    async def _alone(self, call: Call, work: _Work) -> Any:
        for request in [request for request, attempt in self._streams.items() if attempt < call.attempt]:
            await self._abort(request)
        async with self._slot:
            self._check(call)
            self._phase = call.verb
            try:
                return await work()
            finally:
                self._phase = _IDLE
