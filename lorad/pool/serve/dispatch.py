"""One call: its arguments checked, fenced, done by its verb, answered by items and a result,
or by an error.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from lorad.errors import Conflict, LoradError, PoolLost, SpecError, to_wire
from lorad.models.turns import WORK
from lorad.pool.state import Pool
from lorad.pool.verbs import PLAIN, STREAMS
from lorad.protocol import frames
from lorad.protocol.calls import VERBS, Answer, Call, Verb

log = logging.getLogger(__name__)

ABOUT = frozenset({"hello", "status", "shutdown"})  # calls that do not count as use of the pool


async def answers(pool: Pool, call: Call) -> AsyncGenerator[Answer, None]:
    """Yield everything that goes back to the caller, from a task of its own.

    Raises nothing but cancellation.
    """
    WORK.set(pool.parties.caller(call))
    try:
        kind, args = _checked(pool, call)
        with contextlib.nullcontext() if call.verb in ABOUT else pool.meter.activity():
            if kind.item is None:
                yield Answer(call.id, "result", await _plain(pool, call, kind, args))
                return
            async with aclosing(STREAMS[call.verb](pool, call, args)) as items:
                async for item in items:
                    yield Answer(call.id, "item" if isinstance(item, kind.item) else "result", item)
    except LoradError as error:
        log.info("%s of %s: %s: %s", call.verb, call.run or "nobody", type(error).__name__, error)
        yield Answer(call.id, "error", to_wire(error))
    except Exception as error:
        log.exception("%s of %s", call.verb, call.run or "nobody")
        yield Answer(call.id, "error", to_wire(error))


async def _plain(pool: Pool, call: Call, kind: Verb, args: Any) -> Any:
    def work() -> Any:
        return PLAIN[call.verb](pool, call, args)

    if kind.mutates:
        return await pool.fence(call.run).once(call, work)
    if kind.of_run:
        return await pool.fence(call.run).read(call, work)
    return await work()


def _checked(pool: Pool, call: Call) -> tuple[Verb, Any]:
    kind = VERBS.get(call.verb)
    if kind is None:
        raise Conflict(
            f"a pool has no verb {call.verb!r}", hint="Both sides must be of the same version of lorad."
        )
    if pool.stopping.is_set() and call.verb not in ABOUT:
        raise PoolLost("the pool is shutting down", hint="Resume the run; the daemon starts another pool.")
    if kind.of_run and (not call.run or call.attempt < 1 or (kind.mutates and call.seq < 1)):
        raise Conflict(
            f"{call.verb} needs a run, an attempt and a sequence number", hint="See lorad.protocol.calls."
        )
    try:
        return kind, frames.converted(call.args, kind.args)
    except msgspec.ValidationError as error:
        raise SpecError(
            f"{call.verb}: {error}", hint="Both sides must be of the same version of lorad."
        ) from None
