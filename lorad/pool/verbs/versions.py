"""Versions of a run, and versions for others than their run: `publish`, `load_version`, `let_go`, `unload`.

A version of a run is exported, loaded, attested; only then it is current. Its files follow in the
background.
"""

import asyncio
import time
from pathlib import Path

from lorad.adapters.adapter import Adapter
from lorad.adapters.peft import read_peft
from lorad.adapters.validate import validate
from lorad.engines.base import AdapterSource
from lorad.errors import AdapterRefused, Conflict, IntegrityError
from lorad.models.turns import caller
from lorad.pool.attest.amplified import Prediction, Rerouted
from lorad.pool.attest.canaries import Canaries
from lorad.pool.attest.prediction import VersionOnDisk
from lorad.pool.attest.verdict import Claim
from lorad.pool.loaded import PoolVersion
from lorad.pool.state import Pool
from lorad.pool.tenants import Tenant
from lorad.pool.verbs.bring_in import Live, Predictors, attest_loaded, bring
from lorad.pool.verbs.generate import payer_of
from lorad.protocol import calls

_CHANGED = "Its files were changed, and nothing was loaded; use another version."


async def load_version(pool: Pool, _: calls.Call, args: calls.LoadVersion) -> calls.Loaded:
    """Load a version from its files for others than its run.

    Raises AdapterRefused, IntegrityError (the files are not `sha256`), AttestationFailed, Conflict (no room).
    """
    caller().payer = payer_of(args.version)
    entry = await pool.loaded.serve(args.version, args.sha256, lambda: _bring(pool, args), keep=args.keep)
    return calls.Loaded(entry.verdict)


async def attest_reference(pool: Pool, reference: calls.LoadVersion) -> calls.Attestation:
    """Load an adapter that nobody samples from, and return its verdict. Raises as `load_version`."""
    entry = await _bring(pool, reference)
    await pool.loaded.refuse(entry)
    return entry.verdict


async def let_go(pool: Pool, _: calls.Call, args: calls.LetGo) -> calls.Nothing:
    pool.loaded.let_go(args.version)
    return calls.Nothing()


async def unload(pool: Pool, call: calls.Call, args: calls.Unload) -> calls.Nothing:
    """Release one of a run's versions. Raises Conflict when it is not one of its loaded ones."""
    tenant = pool.tenant(call)
    entry = tenant.attested(args.version)
    tenant.versions.remove(entry)
    pool.loaded.release(entry)
    return calls.Nothing()


async def attest_again(pool: Pool, _: calls.Call, args: calls.LoadVersion) -> calls.Loaded:
    """Attest a loaded version once more.

    Raises NotFound (not loaded), IntegrityError (loaded, or on disk, are other bytes).
    """
    with pool.loaded.use(args.version) as entry:
        if entry.digest != args.sha256:
            raise IntegrityError(
                f"{args.version} is loaded as sha256 {entry.digest}, not {args.sha256}", hint=_CHANGED
            )
        source, claim, predict = await _read_claim(pool, args)
        return calls.Loaded(await attest_loaded(pool, entry, source, claim, predict))


async def _bring(pool: Pool, args: calls.LoadVersion) -> PoolVersion:
    source, claim, predict = await _read_claim(pool, args)
    return (await bring(pool, args.version, source, claim, predict)).entry


async def _read_claim(pool: Pool, args: calls.LoadVersion) -> tuple[AdapterSource, Claim, Predictors]:
    """Read the files of a version, and compute what the trainer makes of them, to compare the engine with."""

    def read() -> tuple[Adapter, str]:
        adapter = read_peft(Path(args.directory))
        validate(adapter, pool.trainer.modules())
        return adapter, adapter.digest()

    adapter, digest = await asyncio.to_thread(read)
    if digest != args.sha256:
        raise IntegrityError(
            f"{args.directory}: its tensors have sha256 {digest}, {args.version} is {args.sha256}",
            hint=_CHANGED,
        )
    files = VersionOnDisk(Path(args.directory), adapter.config)
    predictor = pool.attester.predictor
    every = await pool.attester.any_canaries()
    few = every.few or every

    async def anew(more: bool) -> Prediction | None:
        canaries = await pool.attester.twice(every) if more else every
        async with pool.phases.with_base(""), predictor.slot_of(files) as slot:
            return await predictor.amplified(slot, canaries, None)

    async def with_routes(seen: Rerouted) -> list[Prediction]:
        async with pool.phases.with_base(""), predictor.slot_of(files) as slot:
            return await predictor.with_routes(slot, seen, None)

    async with pool.phases.with_base(""), predictor.slot_of(files) as slot:
        trainer = await predictor.logprobs(slot, few)
        is_amplified = not pool.attester.is_direct_enough
        prediction = await predictor.amplified(slot, every, None) if is_amplified else None
    claim = Claim(few, trainer, prediction=prediction)
    return AdapterSource(digest, adapter=adapter), claim, Predictors(anew, with_routes)


async def publish(pool: Pool, call: calls.Call, args: calls.Publish) -> calls.Published:
    """Make a version of the slot the run's current one.

    Raises AdapterRefused, AttestationFailed, StorageError (of an earlier version); the old version serves
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
        few = tenant.canaries.few or tenant.canaries
        claim = Claim(
            few,
            await pool.attester.predictor.logprobs(tenant.run, few),
            tenant.change,
            tenant.current,
            await _amplified(pool, tenant, tenant.canaries) if is_amplified else None,
            proven=tenant.proof.returns,
        )
    scored = time.perf_counter()

    async def anew(more: bool) -> Prediction | None:
        await pool.files.flush(tenant.run)
        canaries = await pool.attester.twice(tenant.canaries, tenant.run) if more else tenant.canaries
        async with pool.phases.with_base(tenant.run):
            return await _amplified(pool, tenant, canaries)

    async def with_routes(seen: Rerouted) -> list[Prediction]:
        async with pool.phases.with_base(tenant.run):
            return await pool.attester.predictor.with_routes(tenant.run, seen, tenant.files)

    source = AdapterSource(digest, adapter=adapter)
    live = await bring(pool, version, source, claim, Predictors(anew, with_routes), run=tenant.run)
    tenant.proof.count(live.outcome, pool.attester.returns)
    pool.loaded.adopt(live.entry)
    files = VersionOnDisk(Path(args.directory), adapter.config, tenant.spec.lora_type)
    for gone in tenant.advance(args.number, live.entry, claim.trainer - few.trainer, files):
        pool.loaded.release(gone)
    pool.files.write(tenant.run, adapter, Path(args.directory), _facts(pool, tenant, args, digest, live))
    seconds = exported - started + live.load_seconds
    attest_seconds = scored - exported + live.attest_seconds
    verdict = live.entry.verdict
    return calls.Published(version, digest, adapter.bytes, seconds, attest_seconds, verdict, adapter.norm())


async def _export(pool: Pool, tenant: Tenant, args: calls.Publish) -> tuple[Adapter, str]:
    adapter = await pool.trainer.export(tenant.run)

    def checked() -> str:
        validate(adapter, pool.trainer.modules())
        adapter.norm()  # which is kept with it
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


async def _amplified(pool: Pool, tenant: Tenant, canaries: Canaries) -> Prediction | None:
    return await pool.attester.predictor.amplified(tenant.run, canaries, tenant.files, tenant.proof.times)


def _facts(pool: Pool, tenant: Tenant, args: calls.Publish, digest: str, live: Live) -> dict[str, object]:
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
