"""`load_version` and `unload`: versions for others than their run, and versions that their run is done with."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lorad.adapters.adapter import Adapter
from lorad.adapters.peft import read_peft
from lorad.adapters.validate import validate
from lorad.engines.base import AdapterSource
from lorad.errors import AttestationFailed, IntegrityError
from lorad.pool.canaries import Canaries
from lorad.pool.loaded import Entry
from lorad.pool.state import Pool
from lorad.protocol.calls import Call, LoadVersion, Nothing, Unload


async def load_version(pool: Pool, call: Call, args: LoadVersion) -> Nothing:
    """Raises AdapterRefused, IntegrityError (the files are not `sha256`), AttestationFailed (delivery, servers)."""
    canaries = None if pool.info.mode == "fused" else await pool.attester.any_canaries()
    async with pool.phases.serving(), pool.engine.settled():
        known = pool.loaded.find(args.version)
        entry = await pool.loaded.serve(args.version, args.sha256, lambda: _read(pool, args))
        try:
            await _check(pool, entry, canaries)
        except BaseException:
            if entry is not known:
                pool.loaded.withdraw(entry)
            raise
    return Nothing()


async def unload(pool: Pool, call: Call, args: Unload) -> Nothing:
    """The run is done with one of its versions. Raises Conflict when it is not one of its loaded ones."""
    tenant = pool.tenant(call)
    entry = tenant.attested(args.version)
    tenant.versions.remove(entry)
    pool.loaded.release(entry)
    return Nothing()


async def _check(pool: Pool, entry: Entry, canaries: Canaries | None) -> None:
    """canaries: None for an engine that lives and dies with the pool, and so never returns."""
    if (wrong := await pool.attester.delivery(entry.engine_name, entry.digest)) is not None:
        raise AttestationFailed(f"{entry.version}: {wrong.detail}", hint="It was unloaded; load it again.")
    if canaries is not None:
        await pool.attester.remember(entry.engine_name, canaries)


async def _read(pool: Pool, args: LoadVersion) -> AdapterSource:
    def read() -> tuple[Adapter, str]:
        adapter = read_peft(Path(args.directory))
        validate(adapter, pool.trainer.modules())
        return adapter, adapter.digest()

    adapter, digest = await asyncio.to_thread(read)
    if digest != args.sha256:
        raise IntegrityError(
            f"{args.directory}: its tensors have sha256 {digest}, {args.version} is {args.sha256}",
            hint="Its files were changed, and nothing was loaded; use another version.",
        )
    return AdapterSource(args.sha256, adapter=adapter)
