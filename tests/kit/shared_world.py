"""A daemon that several users share, in this process, with the fakes of `daemon_fakes` as
drivers and pools.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lorad.box.config import Config, Sharing
from lorad.box.paths import Home
from lorad.daemon.adopt import adopt
from lorad.daemon.context import Context
from lorad.daemon.daemon import serve_api
from lorad.daemon.gpu.devices import Device
from lorad.daemon.gpu.state import GpuState
from lorad.daemon.journal import DaemonJournal
from lorad.daemon.process.shared_home import prepare_shared
from lorad.daemon.process.sharing import SharedBox
from lorad.daemon.reconcile import reconcile
from lorad.store.db import Store
from tests.kit.daemon_world import COMMANDS, QUICK
from tests.kit.leftovers import kill_leftovers
from tests.kit.warm.processes import WarmProcesses

# who becomes another user is forked, where `keep_warm` has it so
_COMMANDS = replace(COMMANDS, preflight=(sys.executable, *COMMANDS.preflight[-3:]))
OWNER, OTHER, ADMIN, ROOT = 4001, 4002, 4003, 0  # none of them is in /etc/passwd but the last


@contextlib.contextmanager
def shared_home() -> Iterator[Path]:
    """A home for a shared daemon, whose processes do not outlive it."""
    with tempfile.TemporaryDirectory(prefix="lr-") as directory:
        home = Path(directory)
        home.chmod(0o711)  # nobody's home that exists is opened to others
        os.environ["LORAD_HOME"] = directory
        prepare_shared(Home(home))
        try:
            yield home
        finally:
            kill_leftovers(home)


@contextlib.asynccontextmanager
async def shared(home: Path, **sharing: Any) -> AsyncIterator[Context]:
    ctx = open_shared(home, **sharing)
    adopt(ctx)
    async with serve_api(ctx):
        loop = asyncio.create_task(reconcile(ctx))
        try:
            yield ctx
        finally:
            ctx.close()
            await loop
    ctx.store.close()
    ctx.journal.close()


def open_shared(home: Path, **sharing: Any) -> Context:
    world = Home(home)
    config = Config(sharing=Sharing(admins=[str(ADMIN)], **sharing))
    device, store, journal = (
        Device("cpu", "a CPU", 1 << 30),
        Store(world.database),
        DaemonJournal(world.journal),
    )
    return Context(
        world,
        config,
        store,
        journal,
        GpuState([device]),
        processes=WarmProcesses(_COMMANDS),
        patience=QUICK,
        users=SharedBox(),
    )
