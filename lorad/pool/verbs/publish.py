"""`publish`: export, load, attest; only then the version is current. Its files follow in the background."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lorad.adapters.adapter import Adapter
from lorad.adapters.validate import validate
from lorad.engines.base import AdapterSource
from lorad.errors import AttestationFailed, Conflict, EngineGone
from lorad.pool.attest import UNLOADED
from lorad.pool.loaded import Entry
from lorad.pool.state import Pool
from lorad.pool.tenants import Tenant
from lorad.protocol.calls import Attestation, Call, Publish, Published

TRIES = 3


class Live(NamedTuple):
    """change: see `Attester.attest`."""

    entry: Entry
    attestation: Attestation
    change: np.ndarray
    load_seconds: float
    attest_seconds: float


async def publish(pool: Pool, call: Call, args: Publish) -> Published:
    """Raises AdapterRefused, AttestationFailed, StorageError (of an earlier version); the old version serves then."""
    tenant = pool.tenant(call)
    _check_number(tenant, args)
    await pool.files.room(tenant.run)
    pool.files.check(tenant.run)
    version = f"{tenant.run}@{args.number}"
    async with pool.phases.with_base(tenant.run):
        started = time.perf_counter()
        adapter, digest = await _export(pool, tenant)
        exported = time.perf_counter()
        trainer = await pool.attester.of_slot(tenant.run, tenant.canaries)
    scored = time.perf_counter()
    live = await _live(pool, tenant, version, AdapterSource(digest, adapter=adapter), trainer)
    _go_live(pool, tenant, args, live.entry, live.change)
    pool.files.write(tenant.run, adapter, Path(args.directory), _facts(pool, tenant, args, digest))
    seconds = exported - started + live.load_seconds
    attest_seconds = scored - exported + live.attest_seconds
    return Published(version, digest, adapter.bytes, seconds, attest_seconds, live.attestation)


async def _live(pool: Pool, tenant: Tenant, version: str, source: AdapterSource, trainer: np.ndarray) -> Live:
    """Loaded and attested against what the trainer said; from the beginning when the engine died and has come back."""
    tries = 0
    while True:
        try:
            async with pool.phases.serving(tenant.run), pool.engine.settled():
                begun = time.perf_counter()
                entry = await pool.loaded.publish(version, source)
                loaded = time.perf_counter()
                attestation, change = await _attested(pool, tenant, entry, trainer)
                return Live(entry, attestation, change, loaded - begun, time.perf_counter() - loaded)
        except EngineGone:
            tries += 1
            if tries == TRIES:
                raise


def _check_number(tenant: Tenant, args: Publish) -> None:
    if args.number <= tenant.number:
        raise Conflict(
            f"{tenant.run}@{args.number} cannot follow {tenant.run}@{tenant.number}", hint="Version numbers only grow."
        )


async def _export(pool: Pool, tenant: Tenant) -> tuple[Adapter, str]:
    adapter = await pool.trainer.export(tenant.run)

    def checked() -> str:
        validate(adapter, pool.trainer.modules())
        return adapter.digest()

    return adapter, await asyncio.to_thread(checked)


async def _attested(pool: Pool, tenant: Tenant, entry: Entry, trainer: np.ndarray) -> tuple[Attestation, np.ndarray]:
    try:
        attestation, change = await pool.attester.attest(
            entry.engine_name, entry.digest, trainer, tenant.canaries, tenant.change
        )
        if attestation.verdict == "failed":
            raise AttestationFailed(
                f"{entry.version} failed its attestation: {attestation.detail}",
                hint=UNLOADED,
            )
        return attestation, change
    except BaseException:
        await pool.loaded.refuse(entry)
        raise


def _go_live(pool: Pool, tenant: Tenant, args: Publish, entry: Entry, change: np.ndarray) -> None:
    pool.loaded.adopt(entry)
    for gone in tenant.advance(args.number, entry, change):
        pool.loaded.release(gone)


def _facts(pool: Pool, tenant: Tenant, args: Publish, digest: str) -> dict[str, object]:
    return {
        "run": tenant.run,
        "version": args.number,
        "step": args.step,
        "parent": args.parent,
        "sha256": digest,
        "model": pool.info.model,
        "base_checksum": pool.info.base_checksum,
    }
