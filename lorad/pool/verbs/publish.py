"""`publish`: export, load, attest; only then the version is current. Its files follow in the background."""

import asyncio
import time
from pathlib import Path

from lorad.adapters.adapter import Adapter
from lorad.adapters.validate import validate
from lorad.engines.base import AdapterSource
from lorad.errors import AdapterRefused, Conflict
from lorad.pool.attest.amplified import Prediction
from lorad.pool.attest.canaries import Canaries
from lorad.pool.attest.prediction import Files
from lorad.pool.attest.verdict import Claim
from lorad.pool.state import Pool
from lorad.pool.tenants import Tenant
from lorad.pool.verbs.bring_in import Live, bring
from lorad.protocol.calls import Call, Publish, Published


async def publish(pool: Pool, call: Call, args: Publish) -> Published:
    """Raises AdapterRefused, AttestationFailed, StorageError (of an earlier version); the old version serves
    then.
    """
    tenant = pool.tenant(call)
    if args.number <= tenant.number:
        raise Conflict(
            f"{tenant.run}@{args.number} cannot follow {tenant.run}@{tenant.number}",
            hint="Version numbers only grow.",
        )
    await pool.files.room(tenant.run)
    pool.files.check(tenant.run)
    version = f"{tenant.run}@{args.number}"
    is_amplified = await _amplifies(pool, tenant)
    async with pool.phases.with_base(tenant.run):
        started = time.perf_counter()
        adapter, digest = await _export(pool, tenant, args)
        exported = time.perf_counter()
        claim = await _claim(pool, tenant, is_amplified=is_amplified)
    scored = time.perf_counter()
    source = AdapterSource(digest, adapter=adapter)
    live = await bring(
        pool, version, source, claim, lambda more: _predict(pool, tenant, more=more), run=tenant.run
    )
    _go_live(pool, tenant, args, live, claim, adapter)
    pool.files.write(tenant.run, adapter, Path(args.directory), _facts(pool, tenant, args, digest, live))
    seconds = exported - started + live.load_seconds
    attest_seconds = scored - exported + live.attest_seconds
    return Published(version, digest, adapter.bytes, seconds, attest_seconds, live.entry.verdict)


async def _export(pool: Pool, tenant: Tenant, args: Publish) -> tuple[Adapter, str]:
    adapter = await pool.trainer.export(tenant.run)

    def checked() -> str:
        validate(adapter, pool.trainer.modules())
        return adapter.digest()

    try:
        return adapter, await asyncio.to_thread(checked)
    except AdapterRefused as error:
        raise AdapterRefused(
            f"{tenant.run}@{args.number} at step {args.step}: {error.message}", hint=error.hint
        ) from None


async def _amplifies(pool: Pool, tenant: Tenant) -> bool:
    """Return whether this version is amplified; then the one before it is on disk."""
    attester = pool.attester
    will_return = pool.info.mode == "timesliced" and not attester.returned_the_same
    is_due = will_return or tenant.proof.is_due(tenant.spec.amplified_every, attester.returns)
    if attester.is_direct_enough or not is_due:
        return False
    await pool.files.flush(tenant.run)
    return True


async def _claim(pool: Pool, tenant: Tenant, *, is_amplified: bool) -> Claim:
    few = pool.attester.few(tenant.canaries)
    return Claim(
        few,
        await pool.attester.predictor.plain(tenant.run, few),
        tenant.change,
        tenant.current,
        await _amplified(pool, tenant, tenant.canaries) if is_amplified else None,
        proven=tenant.proof.returns,
    )


async def _predict(pool: Pool, tenant: Tenant, *, more: bool) -> Prediction | None:
    await pool.files.flush(tenant.run)
    canaries = await pool.attester.twice(tenant.canaries, tenant.run) if more else tenant.canaries
    async with pool.phases.with_base(tenant.run):
        return await _amplified(pool, tenant, canaries)


async def _amplified(pool: Pool, tenant: Tenant, canaries: Canaries) -> Prediction | None:
    return await pool.attester.predictor.amplified(tenant.run, canaries, tenant.files, tenant.proof.times)


def _go_live(pool: Pool, tenant: Tenant, args: Publish, live: Live, claim: Claim, adapter: Adapter) -> None:
    tenant.proof.count(live.outcome, pool.attester.returns)
    pool.loaded.adopt(live.entry)
    files = Files(Path(args.directory), adapter.config, tenant.spec.lora_type)
    for gone in tenant.advance(args.number, live.entry, claim.change, files):
        pool.loaded.release(gone)


def _facts(pool: Pool, tenant: Tenant, args: Publish, digest: str, live: Live) -> dict[str, object]:
    return {
        "run": tenant.run,
        "version": args.number,
        "step": args.step,
        "parent": args.parent,
        "sha256": digest,
        "delivered_sha256": live.entry.verdict.delivered_sha256,
        "model": pool.info.model,
        "base_checksum": pool.info.base_checksum,
    }
