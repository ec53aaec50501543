"""Re-hash everything that a run wrote, and attest again what is loaded of it."""

from pathlib import Path

from lorad.daemon.api.call import Call
from lorad.daemon.context import Context, request_of, spec_of
from lorad.daemon.pools.as_owner import in_thread, on_behalf
from lorad.daemon.pools.life import refresh
from lorad.daemon.record.verify import VerifiedRun, check_files
from lorad.daemon.runs.versions import believed_pools, in_hand
from lorad.daemon.serving.borrow_pool import attested, load_of
from lorad.daemon.storage.budget import GONE
from lorad.errors import LoradError, NotFound
from lorad.records.daemon import Verification, VerificationCheck
from lorad.states import RunState
from lorad.store import events, runs
from lorad.store.checkpoints import checkpoints
from lorad.store.rows import RunRow
from lorad.store.versions import versions
from lorad.text import counted


async def verify(ctx: Context, call: Call) -> Verification:
    """Check a run's files and versions. Raises NotFound; what is wrong with the run is part of the answer."""
    run = runs.get(ctx.store, call.run)
    rows = versions(ctx.store, run.name)
    present = checkpoints(ctx.store, run.name)
    works = not RunState(run.state).is_over
    spared = events.has_kind(ctx.store, run.name, GONE)  # some of its samples went for the disk budget
    needed = {row.version for row in rows if row.pinned or row.aliases}
    if not works:
        needed |= {row.version for row in present}
    spec = spec_of(run)
    subject = VerifiedRun(
        directory=run.dir,
        model_path=Path(request_of(run).model_path),
        quantize=spec.model.quantize,
        digests={row.version: row.sha256 for row in rows},
        needed=frozenset(needed),
        checkpoints=frozenset(row.path for row in present),
        keep_samples=spec.checkpoint.keep_samples or int(spared),
        keep_evals=spec.checkpoint.keep_evals or int(spared),
        works=works,
        spared=spared,
    )
    checks = await on_behalf(ctx, run.owner_uid, check_files, subject)
    checks.append(await attest_again(ctx, run))
    return Verification(call.run, checks, sum(len(check.problems) for check in checks))


async def attest_again(ctx: Context, run: RunRow) -> VerificationCheck:
    """Attest again the versions of the run that a pool has loaded now."""
    await refresh(ctx)
    problems = []
    count = 0
    rows = {row.name: row for row in versions(ctx.store, run.name)}
    for pool in believed_pools(ctx, run.owner_uid):
        for name in rows.keys() & set(pool.status.loaded if pool.status else []):
            count += 1
            with in_hand(ctx, rows[name]):
                try:
                    question = ctx, pool, "attest_again", load_of(rows[name])
                    attestation = await in_thread(ctx, pool.setup.owner, attested, *question)
                    if attestation.verdict == "failed":
                        problems.append(f"{name} in pool {pool.id}: {attestation.detail}")
                except NotFound:
                    continue  # the version was unloaded meanwhile
                except LoradError as error:
                    problems.append(f"{name} in pool {pool.id}: {error.message}")
    return VerificationCheck("attestation", f"{counted(count, 'version')} loaded now", problems)
