"""Read what gateways report about requests for aliases, in small files: see `lorad/protocol/traffic.py`.

In a shared daemon the file of an owner's gateway belongs to that user: it is read as that user, and believed
only about aliases of the user's versions. If anything is wrong with a file there are no figures, and no
request waits for it.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec

from lorad.daemon.context import Context
from lorad.daemon.pools.as_owner import on_behalf
from lorad.daemon.services.gateway import GATEWAY
from lorad.daemon.services.service import OWN, process_of, state_of
from lorad.errors import LoradError
from lorad.files import read_file
from lorad.protocol.traffic import FILE, FILE_BYTES, Figures, Report
from lorad.records.versions import Alias
from lorad.store import runs

_READ_SECONDS = 0.25  # for a file of a user's, whose disk may hang
_Names = dict[str, Figures]


async def traffic_of(ctx: Context, rows: Iterable[Alias]) -> dict[str, Figures | None]:
    """Collect the figures of each alias, zeros where it was never asked; None where no gateway reports."""
    owners = runs.owners_of_aliased(ctx.store)
    owner_of = {row.alias: owners.get(row.run) for row in rows}
    uids = sorted({uid for uid in owner_of.values() if uid is not None})
    reports = dict(zip(uids, await asyncio.gather(*(reported_by(ctx, uid) for uid in uids)), strict=True))
    figures: dict[str, Figures | None] = {}
    for alias, uid in owner_of.items():
        names = None if uid is None else reports[uid]
        figures[alias] = None if names is None else names.get(alias, Figures())
    return figures


async def reported_by(ctx: Context, uid: int) -> _Names | None:
    """Read the figures that the owner's gateway wrote; None while it is not up."""
    gateway = process_of(ctx, GATEWAY, uid if ctx.users.shared else OWN)
    if state_of(ctx, gateway).phase != "alive":
        return None
    try:
        async with asyncio.timeout(_READ_SECONDS):
            return await on_behalf(ctx, uid, read, gateway.work / FILE)
    except (OSError, LoradError):  # a timeout is an OSError
        return None


def read(path: Path) -> _Names | None:
    """Read the figures in a gateway's file; None for a file that is damaged. Raises OSError."""
    try:
        return msgspec.json.decode(read_file(path, FILE_BYTES, links=False), type=Report).names
    except (msgspec.MsgspecError, RecursionError):
        return None
