"""Find or start pools for requests that are no runs, and load their versions there."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from lorad.adapters.directory import TEMPORARY, discard
from lorad.box.paths import RunDir
from lorad.daemon.context import Context, Request, request_of, spec_of
from lorad.daemon.pool import Pool
from lorad.daemon.pools.as_owner import connection_to, in_thread, on_behalf
from lorad.daemon.pools.life import ask_status, look_at_process
from lorad.daemon.process.doing import doing
from lorad.daemon.process.processes import log_end, write_json
from lorad.daemon.process.user_files import make_run
from lorad.daemon.queue.place import warm_pool
from lorad.daemon.state import PoolRequest
from lorad.errors import AttestationFailed, PoolLost
from lorad.protocol.calls import Attestation, Loaded, LoadVersion
from lorad.protocol.connection import Connection
from lorad.rl.tasks import TASKS
from lorad.rl.templates import has_chat_template
from lorad.spec.data import single
from lorad.spec.model import Spec, to_json
from lorad.states import EndReason, RunState
from lorad.store.rows import RunRow, VersionRow
from lorad.text import clauses

_POLL_SECONDS = 0.1


@contextlib.contextmanager
def staged(ctx: Context, uid: int, kind: str, spec: Spec, request: Request) -> Iterator[RunRow]:
    """Make a row as of a run, by which a pool is chosen, and a directory for it within the block."""
    name = f"{kind}-{uuid.uuid4().hex[:8]}"
    directory = ctx.runs_root / f"{TEMPORARY}{name}"
    try:
        directory.mkdir(parents=True, mode=0o700)
        make_run(RunDir(directory), ctx.user(uid))
        write_json(directory / "request.json", msgspec.to_builtins(request))
        text = to_json(spec).decode()
        yield RunRow(name=name, owner_uid=uid, state=RunState.ENDED, spec=text, directory=str(directory))
    finally:
        discard(directory)


@contextlib.asynccontextmanager
async def hold_pool(ctx: Context, run: RunRow) -> AsyncIterator[Pool]:
    """Hold a pool of a run's base, up and answering, within the block: a warm one at once, else one that the
    loop finds a place for. It counts the request as its guest.

    Raises Conflict (no device), and PoolLost where the pool ends before it answers, or takes too long.
    """
    pool = warm_pool(ctx, run)
    if pool is not None:
        pool.guests += 1
    else:
        doing().tell("waiting for a device")
        until = time.monotonic() + ctx.patience.pool_shutdown + ctx.patience.pool_term
        request = PoolRequest(run, until, asyncio.get_running_loop().create_future())
        ctx.queue.requests.append(request)
        ctx.loop.poke()
        try:
            pool = ctx.pools[await request.pool]
        except asyncio.CancelledError:
            if request.pool.done() and not request.pool.cancelled() and request.pool.exception() is None:
                ctx.pools[request.pool.result()].guests -= 1
            raise
        finally:
            ctx.queue.requests.remove(request)
    try:
        doing().tell(f"waiting for pool {pool.id}", lambda: ctx.processes.in_words(pool.attempt()))
        deadline = time.monotonic() + ctx.patience.pool_ready
        while pool.status is None:
            look_at_process(ctx, pool)
            if not pool.process.is_up or time.monotonic() > deadline:
                what = f"pool {pool.id} {pool.process.in_words()} before it answered"
                raise PoolLost(clauses(what, log_end(pool.attempt().log, 3)), hint="Try again.")
            await ask_status(ctx, pool)
            await asyncio.sleep(_POLL_SECONDS)
        yield pool
    finally:
        pool.guests -= 1
        pool.used_at = time.monotonic()
        ctx.loop.poke()


async def load(ctx: Context, pool: Pool, version: VersionRow, *, keep: bool = False) -> Attestation:
    """Load a version and attest it. Raises what the pool raises, and AttestationFailed."""
    doing().tell(f"loading and attesting {version.name}")
    load_it = load_of(version, keep=keep)
    attestation = await in_thread(ctx, pool.setup.owner, attested, ctx, pool, "load_version", load_it)
    await ask_status(ctx, pool)  # so that what is loaded is known
    if attestation.verdict == "failed":
        raise AttestationFailed(f"{version.name}: {attestation.detail}", hint="Serve another version.")
    return attestation


def attested(ctx: Context, pool: Pool, verb: str, load: LoadVersion) -> Attestation:
    """Have a pool `load_version` and attest it, or `attest_again` a loaded one. Runs in a thread."""
    with connection_to(ctx, pool) as connection, waited_for(ctx, connection):
        loaded: Loaded = connection.call(verb, load)
    return loaded.attestation


def load_of(version: VersionRow, *, keep: bool = False) -> LoadVersion:
    return LoadVersion(version.name, version.path, version.sha256, keep)


@contextlib.contextmanager
def waited_for(ctx: Context, connection: Connection) -> Iterator[None]:
    """Let a daemon that ends abort the connection, within the block."""
    ctx.requests.waiting.add(connection)
    try:
        yield
    finally:
        ctx.requests.waiting.discard(connection)


async def is_chat(ctx: Context, run: RunRow) -> bool:
    """Check whether the versions of a run were trained with the chat template, as far as that is known."""
    data = spec_of(run).data
    learned = single(data.train) not in TASKS or run.reason == EndReason.IMPORTED
    if data.chat_template != "auto" or not learned:
        return False
    return await on_behalf(ctx, run.owner_uid, has_chat_template, Path(request_of(run).model_path))
