"""Check a spec as `run` does, and say what would become of it: nothing is queued, and nothing stays. And take
in the files that a client on another machine sends along with one.
"""

import asyncio
import re
import time
import uuid

import msgspec

from lorad.adapters.directory import TEMPORARY, discard
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.control import replaceable
from lorad.daemon.context import Context, Request
from lorad.daemon.pools.as_owner import in_thread, on_behalf
from lorad.daemon.process.processes import write_json
from lorad.daemon.process.users import Caller
from lorad.daemon.queue.forecast import forecast
from lorad.daemon.queue.limits import refuse_priority
from lorad.daemon.runs.create import asked_for, refuse_used
from lorad.daemon.runs.preflight import preflight
from lorad.daemon.runs.rate import rated
from lorad.daemon.runs.reference import clear, refuse_other_model, staged
from lorad.daemon.storage.bundles import bundles_of, take_in
from lorad.daemon.storage.footprint import footprint, short_of_disk
from lorad.errors import Conflict, SpecError
from lorad.records.checks import Bundle, Check, Start
from lorad.records.requests import BundleRequest, RunRequest
from lorad.spec.model import Spec, to_json
from lorad.states import RunState
from lorad.store.rows import RunRow

_SHA256 = re.compile("[0-9a-f]{64}")


async def check(ctx: Context, call: Call) -> Check:
    """Preflight a spec and forecast its start.

    A name that is in use is a warning: all else is worth knowing, too. Raises what `run` raises besides:
    SpecError, StorageError, NotAllowed.
    """
    body = call.json(RunRequest)
    spec = await asked_for(ctx, call.caller, body)
    warnings = []
    if not body.replace or replaceable(ctx, call.caller, str(spec.name)) is None:
        try:
            refuse_used(ctx, spec)
        except Conflict as error:
            warnings.append(f"{error.message}, so `lorad run` refuses this name. {error.hint}")
    refuse_priority(ctx, call.caller, spec)
    reference = await staged(ctx, call.caller, spec, body.cwd)
    try:
        directory = reference and reference.directory
        facts = await preflight(ctx, spec, body.cwd, call.caller.uid, directory, body=body, look=True)
        spec, facts = rated(spec, facts)
        refuse_other_model(reference, facts)
        kept = reference and reference.reference
    finally:
        clear(reference)
    model = facts.model_path, facts.model_dtype, facts.parameters
    request = Request(body.cwd, body.source, body.overrides, *model, facts, reference=kept)
    start = await _start(ctx, call.caller, spec, request)
    files = footprint(spec, facts, ctx.runs_root)
    shared = ("model_path", "model_dtype", "parameters", "adapter_parameters", "rate", "memory_needed")
    more = ("memory_parts", "memory_available", "data_format", "look", "eval_scored", "eval_likely")
    group = spec.algorithm.group_size if spec.algorithm.kind == "rl" else 1
    return Check(
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
        **{key: getattr(facts, key) for key in (*shared, *more)},
    )


async def _start(ctx: Context, caller: Caller, spec: Spec, request: Request) -> Start:
    """Forecast the start; what the queue reads of a run is on disk for as long as that takes."""
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
    """Take in a part of a bundle of the caller's, and say how much has come, or where it is.

    Raises SpecError, Conflict, StorageError.
    """
    sha256 = call.request.match_info["bundle"]
    if not _SHA256.fullmatch(sha256):
        raise SpecError(f"{sha256[:80]!r} is no sha256", hint="Name a bundle by 64 digits of 0-9 and a-f.")
    part = call.json(BundleRequest)
    directory = await in_thread(ctx, call.caller.uid, bundles_of, ctx, call.caller.uid)
    return await on_behalf(ctx, call.caller.uid, take_in, directory, sha256, part)
