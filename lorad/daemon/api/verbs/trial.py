"""Try a spec before it is queued: a few samples of its base, scored, on a pool as the run would have it.

Nothing is kept but the pool, which stays warm as after a run.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from datetime import datetime
from pathlib import Path

import msgspec
from aiohttp import web
from msgspec.structs import replace

from lorad.box.paths import AttemptDir, RunDir
from lorad.children.ask import lines_of, under_guard
from lorad.client.transport import LINES
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.check import prepare_request
from lorad.daemon.context import Context, Request, spec_of
from lorad.daemon.pool import Pool
from lorad.daemon.pools.as_owner import in_thread
from lorad.daemon.process.commands import secrets_of
from lorad.daemon.process.doing import begin_telling, doing
from lorad.daemon.process.processes import write_json
from lorad.daemon.process.user_files import hand_over, make_attempt
from lorad.daemon.queue.limits import refuse_priority
from lorad.daemon.queue.place import warm_pool
from lorad.daemon.runs.create import anchored
from lorad.daemon.serving.borrow_pool import hold_pool, staged
from lorad.errors import Conflict, LoradError, PoolLost, SpecError, to_wire
from lorad.protocol.driver_params import FILE as PARAMS
from lorad.protocol.driver_params import DriverParams
from lorad.protocol.preflight import ErrorFacts
from lorad.records.requests import TrialRequest
from lorad.records.samples import TrialEvent
from lorad.spec.model import Spec
from lorad.spec.text import load_task
from lorad.store.rows import RunRow

log = logging.getLogger("lorad.daemon")

_IDLE_SECONDS = 2.0  # after which a reader that went is noticed
_LINE_BYTES = 8 << 20  # an episode in full
_AHEAD = 4  # lines that are read before the client has the first of them; then the trial waits
_Events = asyncio.Queue[TrialEvent]


async def try_out(ctx: Context, call: Call) -> web.StreamResponse:
    """Stream TrialEvents, one JSON line each; the last is `end`. The trial ends with the connection."""
    body = call.json(TrialRequest)
    uid = call.caller.uid
    spec = await in_thread(ctx, uid, load_task, body.spec, source=body.source, overrides=body.overrides)
    spec = await in_thread(ctx, uid, anchored, spec, Path(body.cwd), ctx.user(uid))
    refuse_priority(ctx, call.caller, spec)
    if spec.algorithm.kind != "rl":
        problem = f"{spec.algorithm.name} trains on completions in the data: there is nothing to try"
        raise SpecError(problem, key="algorithm.name", hint="`lorad run` checks the data before it starts.")
    response = web.StreamResponse(headers={"Content-Type": LINES})
    events = _Events(_AHEAD)
    present = begin_telling()
    work = asyncio.create_task(_play(ctx, uid, spec, body, events))
    try:
        await response.prepare(call.request)
        while not ctx.loop.closing:
            try:
                async with asyncio.timeout(_IDLE_SECONDS):
                    event = await events.get()
            except TimeoutError:
                event = TrialEvent("idle", present.in_words())
            await response.write(msgspec.json.encode(event) + b"\n")
            if event.kind == "end":
                break
    except OSError:
        pass  # the reader went
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    return response


async def _play(ctx: Context, uid: int, spec: Spec, body: TrialRequest, events: _Events) -> None:
    """Put the events of a trial into the queue; the last is `end`."""
    try:
        await events.put(TrialEvent("phase", "the spec is being checked"))
        spec, request = await prepare_request(ctx, uid, spec, body)
        spec = replace(  # without what only training needs
            spec,
            algorithm=replace(spec.algorithm, teacher=None),
            eval=replace(spec.eval, every=0),
            rollout=replace(spec.rollout, max_staleness=0),
        )
        with staged(ctx, uid, "try", spec, request) as row:
            pool = warm_pool(ctx, row)
            path = spec_of(row).model.path
            cold = f"where a device is free a pool loads {path}, and stays warm for the next time"
            await events.put(TrialEvent("phase", f"pool {pool.id} has {path}" if pool else cold))
            async with contextlib.AsyncExitStack() as stack:
                ctx.requests.trials.add(row.name)
                stack.callback(ctx.requests.trials.discard, row.name)
                try:
                    pool = await stack.enter_async_context(hold_pool(ctx, row))
                except Conflict as error:
                    hint = f"{error.hint} `lorad try SPEC --rewards` needs no device."
                    raise Conflict(error.message, hint=hint) from None
                doing().tell("sampling")
                attempt = _make_attempt(ctx, row, request, pool)
                async with contextlib.aclosing(_events_of(ctx, uid, attempt, body.n)) as tried:
                    async for event in tried:
                        await events.put(event)
    except Exception as error:
        if not isinstance(error, LoradError):
            log.exception("a trial")
        await events.put(TrialEvent("end", error=msgspec.convert(to_wire(error), ErrorFacts)))


def _make_attempt(ctx: Context, run: RunRow, request: Request, pool: Pool) -> AttemptDir:
    """Make the files that the process of a trial reads."""
    user = ctx.user(run.owner_uid)
    attempt = RunDir(Path(run.directory)).attempt(1)
    make_attempt(attempt, user)
    write_json(attempt.spec, msgspec.json.decode(run.spec))
    params = DriverParams(
        run=run.name,
        run_dir=run.directory,
        attempt=1,
        steps=1,
        pool=pool.setup.pool,
        pool_socket=pool.setup.socket,
        cwd=request.cwd,
        pool_timeout=ctx.patience.pool_ready,
        spec=str(attempt.work / attempt.spec.name),
        date=datetime.now().isoformat(),
    )
    files = {PARAMS: msgspec.to_builtins(params), attempt.spec.name: msgspec.json.decode(run.spec)}
    hand_over(attempt, files, user)
    return attempt


async def _events_of(ctx: Context, uid: int, attempt: AttemptDir, n: int) -> AsyncGenerator[TrialEvent, None]:
    """Yield the events of the process. Raises PoolLost when it ends too early, or user code prints a line."""
    user = ctx.user(uid)
    command = [*ctx.processes.commands.trial, str(attempt.work), str(n)]
    argv, env = ctx.processes.commands.asked_as(user, command, ctx.home)
    env |= secrets_of(ctx.config, user)
    async with (
        under_guard(argv, env, limit=_LINE_BYTES) as process,
        contextlib.aclosing(lines_of(process, "the trial")) as lines,
    ):
        async for line in lines:
            try:
                event = msgspec.json.decode(line, type=TrialEvent)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise PoolLost(f"the trial printed something else: {error}", hint="Try again.") from None
            yield event
            if line.startswith(b'{"kind":"end"'):
                return
