"""`load_version`, `let_go` and `unload`: versions for others than their run, and those that their run is done
with.
"""

import asyncio
from pathlib import Path

from lorad.adapters.adapter import Adapter
from lorad.adapters.peft import read_peft
from lorad.adapters.validate import validate
from lorad.engines.base import AdapterSource
from lorad.errors import IntegrityError
from lorad.pool.attest.amplified import Prediction
from lorad.pool.attest.prediction import Files
from lorad.pool.attest.verdict import Claim
from lorad.pool.loaded import Entry
from lorad.pool.state import Pool
from lorad.pool.verbs.bring_in import Predict, again, bring
from lorad.protocol.calls import Attestation, Call, LetGo, Loaded, LoadVersion, Nothing, Unload

_CHANGED = "Its files were changed, and nothing was loaded; use another version."


async def load_version(pool: Pool, _: Call, args: LoadVersion) -> Loaded:
    """Raises AdapterRefused, IntegrityError (the files are not `sha256`), AttestationFailed, Conflict (no
    room).
    """
    entry = await pool.loaded.serve(args.version, args.sha256, lambda: _bring(pool, args), keep=args.keep)
    return Loaded(entry.verdict)


async def attest_reference(pool: Pool, wanted: LoadVersion) -> Attestation:
    """Return the verdict on an adapter that nobody samples from: as of a version that is loaded, which then
    goes again.

    Raises what `load_version` raises.
    """
    entry = await _bring(pool, wanted)
    await pool.loaded.refuse(entry)
    return entry.verdict


async def let_go(pool: Pool, _: Call, args: LetGo) -> Nothing:
    pool.loaded.let_go(args.version)
    return Nothing()


async def unload(pool: Pool, call: Call, args: Unload) -> Nothing:
    """Release one of a run's versions. Raises Conflict when it is not one of its loaded ones."""
    tenant = pool.tenant(call)
    entry = tenant.attested(args.version)
    tenant.versions.remove(entry)
    pool.loaded.release(entry)
    return Nothing()


async def attest_again(pool: Pool, _: Call, args: LoadVersion) -> Loaded:
    """Raises NotFound (not loaded), IntegrityError (loaded, or on disk, are other bytes)."""
    with pool.loaded.use(args.version) as entry:
        if entry.digest != args.sha256:
            raise IntegrityError(
                f"{args.version} is loaded as sha256 {entry.digest}, not {args.sha256}", hint=_CHANGED
            )
        adapter = await _read(pool, args)
        claim, predict = await _claim(pool, args, adapter)
        return Loaded(await again(pool, entry, AdapterSource(args.sha256, adapter=adapter), claim, predict))


async def _bring(pool: Pool, args: LoadVersion) -> Entry:
    adapter = await _read(pool, args)
    claim, predict = await _claim(pool, args, adapter)
    return (
        await bring(pool, args.version, AdapterSource(args.sha256, adapter=adapter), claim, predict)
    ).entry


async def _claim(pool: Pool, args: LoadVersion, adapter: Adapter) -> tuple[Claim, Predict]:
    """Compute what the trainer makes of the same files, for the engine to be compared with."""
    files, predictor = Files(Path(args.directory), adapter.config), pool.attester.predictor
    every = await pool.attester.any_canaries()
    few = pool.attester.few(every)

    async def predict(more: bool) -> Prediction | None:
        canaries = await pool.attester.twice(every) if more else every
        async with pool.phases.with_base(""), predictor.opened(files) as slot:
            return await predictor.amplified(slot, canaries, None)

    async with pool.phases.with_base(""), predictor.opened(files) as slot:
        trainer = await predictor.plain(slot, few)
        is_amplified = not pool.attester.is_direct_enough
        prediction = await predictor.amplified(slot, every, None) if is_amplified else None
    return Claim(few, trainer, prediction=prediction), predict


async def _read(pool: Pool, args: LoadVersion) -> Adapter:
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
    return adapter
