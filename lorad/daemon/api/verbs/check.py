"""Check a spec without queueing it, and take in the files that a client on another machine sends along."""

import asyncio
import re
import time
import uuid

import msgspec

from lorad.adapters.directory import TEMPORARY, discard
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.control import replaceable
from lorad.daemon.api.views import of_row
from lorad.daemon.context import Context, Request
from lorad.daemon.pools.as_owner import in_thread, on_behalf
from lorad.daemon.process.processes import write_json
from lorad.daemon.process.users import Caller
from lorad.daemon.queue.forecast import forecast
from lorad.daemon.queue.limits import refuse_priority
from lorad.daemon.runs.create import read_spec, refuse_used
from lorad.daemon.runs.preflight import preflight
from lorad.daemon.runs.rate import rated
from lorad.daemon.runs.reference import Staged, clear, refuse_other_model, staged
from lorad.daemon.storage.bundles import bundles_of, take_in
from lorad.daemon.storage.footprint import footprint, short_of_disk
from lorad.errors import Conflict, SpecError
from lorad.records.checks import Bundle, Check, Start
from lorad.records.requests import BundleRequest, RunRequest, TrialRequest
from lorad.spec.model import Spec, to_json
from lorad.states import RunState
from lorad.store.rows import RunRow

_SHA256 = re.compile("[0-9a-f]{64}")


async def check(ctx: Context, call: Call) -> Check:
    """Preflight a spec and forecast its start. Raises what `run` raises; only a name in use is a warning."""
    body = call.json(RunRequest)
    spec = await read_spec(ctx, call.caller, body)
    warnings = []
    if not body.replace or replaceable(ctx, call.caller, str(spec.name)) is None:
        try:
            refuse_used(ctx, spec)
        except Conflict as error:
            warnings.append(f"{error.message}, so `lorad run` refuses this name. {error.hint}")
    refuse_priority(ctx, call.caller, spec)
    reference = await staged(ctx, call.caller, spec, body.cwd)
    try:
        spec, request = await prepare_request(ctx, call.caller.uid, spec, body, reference, look=True)
    finally:
        clear(reference)
    facts = request.facts
    start = await _start(ctx, call.caller, spec, request)
    files = footprint(spec, facts, ctx.runs_root)
    group = spec.algorithm.group_size if spec.algorithm.kind == "rl" else 1
    return of_row(
        Check,
        facts,
        name=str(spec.name),
        spec=msgspec.to_builtins(spec),
        modules=len(facts.modules),
        algorithm=f"{spec.algorithm.name}: {spec.algorithm.in_words}",
        memory_share=spec.pool.memory_fraction,
        rows=facts.dataset_size,
        left_out=facts.dropped,
        held_out=facts.eval_size,
        samples_per_step=spec.data.prompts_per_step * group,
        files=files,
        warnings=[*warnings, *facts.warnings, *short_of_disk(files)],
        start=start,
    )


async def prepare_request(
    ctx: Context,
    uid: int,
    spec: Spec,
    body: RunRequest | TrialRequest,
    reference: Staged | None = None,
    *,
    look: bool = False,
) -> tuple[Spec, Request]:
    """Preflight a spec as a user, fill in the keys that it leaves open, and make the request of its run.

    look: whether the data are described, too.

    Raises what `preflight` raises, and SpecError for a reference on another model.
    """
    directory = reference and reference.directory
    facts = await preflight(ctx, spec, body.cwd, uid, directory, body=body, look=look)
    spec, facts = rated(spec, facts)
    refuse_other_model(reference, facts)
    model = facts.model_path, facts.model_dtype, facts.parameters
    compared = reference and reference.reference
    return spec, Request(body.cwd, body.source, body.overrides, *model, facts, reference=compared)


async def _start(ctx: Context, caller: Caller, spec: Spec, request: Request) -> Start:
    """Forecast the start by a row and a directory that exist for as long as that takes."""
    place = ctx.runs_root / f"{TEMPORARY}check-{uuid.uuid4().hex[:8]}"
    row = RunRow(
        name=str(spec.name),
        owner=caller.name,
        owner_uid=caller.uid,
        state=RunState.QUEUED,
        priority=spec.resources.priority,
        group=spec.resources.group or "",
        created_at=time.time(),
        spec=to_json(spec).decode(),
        directory=str(place),
    )
    try:
        place.mkdir(parents=True, mode=0o700)
        write_json(place / "request.json", msgspec.to_builtins(request))
        return forecast(ctx, row)
    finally:
        await asyncio.to_thread(discard, place)


async def send_files(ctx: Context, call: Call) -> Bundle:
    """Take in a part of a bundle, and say how much has come, or where it is."""
    sha256 = call.request.match_info["bundle"]
    if not _SHA256.fullmatch(sha256):
        raise SpecError(f"{sha256[:80]!r} is no sha256", hint="Name a bundle by 64 digits of 0-9 and a-f.")
    part = call.json(BundleRequest)
    directory = await in_thread(ctx, call.caller.uid, bundles_of, ctx, call.caller.uid)
    return await on_behalf(ctx, call.caller.uid, take_in, directory, sha256, part)
