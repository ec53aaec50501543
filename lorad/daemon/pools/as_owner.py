"""Use the files and sockets of a user with that user's rights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from lorad.bounds import POOL_BYTES
from lorad.daemon.context import Context
from lorad.daemon.pool import Pool
from lorad.daemon.process.as_user import as_user
from lorad.errors import PoolLost
from lorad.protocol.connection import Connection

P = ParamSpec("P")
T = TypeVar("T")


async def on_behalf(ctx: Context, uid: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run `work` in a thread that opens files as the user of `uid`; it may start no threads or processes."""

    def work_as_user() -> T:
        with as_user(ctx.user(uid)):
            return work(*args, **options)

    return await in_thread(ctx, uid, work_as_user)


async def in_thread(ctx: Context, uid: int, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Run `work`, which may wait for a process or file of the user's, where it blocks no other user."""
    return await ctx.users.in_thread(uid, partial(work, *args, **options))


def connection_to(
    ctx: Context, pool: Pool, timeout: float | None = None, most: int = POOL_BYTES
) -> Connection:
    """Connect to a pool, whose owner may have put something else in place of its socket. Raises PoolLost."""
    with as_user(ctx.user(pool.setup.owner)):
        connection = Connection(Path(pool.setup.socket), timeout=timeout, most=most)
    if not ctx.users.is_believed(connection.peer_uid, pool.setup.owner):
        connection.close()
        peer = f"is of user {connection.peer_uid}, pool {pool.id} of {pool.setup.owner}"
        raise PoolLost(f"{pool.setup.socket} {peer}")
    return connection
