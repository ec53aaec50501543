"""What a killed pool left is cleared up by the daemon, whichever daemon sees that it is over."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from lorad.children.leftovers import places
from lorad.daemon.process.processes import Processes
from tests.kit.daemon_world import reconciling, submit, until, until_state


def leave(pool: Path) -> Sequence[Path]:
    """Leave what a killed pool with servers leaves."""
    left = places(pool)
    for directory in left:
        directory.mkdir(parents=True)
        (directory / "0.sock").touch()
    return left


async def test_daemon_clears_leftovers_of_a_killed_pool(home: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "ended")
        left = leave(ctx.pools["tiny-1"].root)
        await until(lambda: ctx.pools["tiny-1"].process.pid)
        os.kill(ctx.pools["tiny-1"].process.pid or 0, signal.SIGKILL)
        await until(lambda: not any(path.exists() for path in left))
        assert not ctx.pools["tiny-1"].process.is_up and (home / "pools" / "tiny-1" / "pool.json").exists()


async def test_next_daemon_clears_leftovers_of_dead_pool(home: Path) -> None:
    async with reconciling(home) as ctx:
        submit(ctx, "a")
        await until_state(ctx, "a", "ended")
        pool = ctx.pools["tiny-1"]
        left, pid = leave(pool.root), await until(lambda: pool.process.pid)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: Processes().inspect(pool.attempt()).is_over)
    assert all(path.exists() for path in left)
    async with reconciling(home):
        await until(lambda: not any(path.exists() for path in left))
