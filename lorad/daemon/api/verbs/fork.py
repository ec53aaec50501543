"""Queue a run that begins with the weights of a version and, from a checkpoint, with Adam's moments."""

import itertools
import os
import uuid
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from lorad.adapters.directory import MANIFEST, TEMPORARY, discard, read_manifest, verify
from lorad.box.paths import RunDir
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.resume import fit_lora_type
from lorad.daemon.api.views import extend, run_view, spec_at
from lorad.daemon.context import Context, Request, request_of, spec_of
from lorad.daemon.pools.as_owner import in_thread, on_behalf
from lorad.daemon.process.as_user import as_user
from lorad.daemon.process.user_files import files_into, own_directory
from lorad.daemon.process.users import User
from lorad.daemon.queue.limits import refuse_priority
from lorad.daemon.runs import reference
from lorad.daemon.runs.bases import bases_of
from lorad.daemon.runs.create import create, make_directory, refuse_used
from lorad.daemon.runs.preflight import preflight
from lorad.daemon.runs.rate import rated
from lorad.daemon.runs.reference import Begins, Staged
from lorad.daemon.runs.versions import await_files, find_version, has_files, in_hand
from lorad.errors import Conflict, LoradError, NotFound, SpecError, StorageError
from lorad.files import fsync
from lorad.records.requests import ForkRequest
from lorad.records.runs import Forked
from lorad.spec.model import Spec
from lorad.spec.text import key_of_override, merged, override
from lorad.store import events, runs
from lorad.store.checkpoints import checkpoints
from lorad.store.rows import RunRow, VersionRow

_NAME_LENGTH = 63
_FREE = frozenset({"lora.dropout", "lora.type"})  # keys of `lora` that do not change the adapter's shape


class _ForkStart(NamedTuple):
    """What a fork begins with.

    trained: the spec of the attempt that made the checkpoint.
    """

    origin: str
    directory: Path
    step: int
    trained: Spec | None = None


async def fork(ctx: Context, call: Call) -> Forked:
    """Queue a run that begins with a version of another one.

    Raises NotFound (no such version, no checkpoint of it), SpecError, Conflict (the name), IntegrityError.
    """
    body = call.json(ForkRequest)
    version = find_version(ctx, call.caller, call.request.match_info["version"])
    parent = runs.get(ctx.store, version.run)
    # read before anything is awaited: the parent may be removed meanwhile
    request_before = replace(request_of(parent), bases=bases_of(ctx, parent))
    written = parent.dir.spec_text
    text = written.read_text() if written.exists() else ""  # the spec as the user wrote it
    anew = await in_thread(ctx, call.caller.uid, _other_kind, parent, body)
    body = replace(body, fresh=body.fresh or bool(anew))
    if body.fresh:
        await await_files(ctx, version)
    start = _find_start(ctx, parent, version, body.fresh)
    spec = await in_thread(ctx, call.caller.uid, _make_spec, parent, body, start)
    name = msgspec.json.encode(body.name or spec.name or _free_name(ctx, parent.name)).decode()
    spec = await in_thread(ctx, call.caller.uid, override, spec, [f"name={name}"])
    refuse_used(ctx, spec)
    refuse_priority(ctx, call.caller, spec)
    with in_hand(ctx, version):
        staged = await copy_start(ctx, start, spec, (parent.owner_uid, call.caller.uid))
    kl: Staged | None = None
    try:
        keys = {key_of_override(text) for text in body.overrides}
        has_own = spec.algorithm.kl.reference in (None, "start")  # `start` is each run's own
        inherits = not has_own and keys.isdisjoint({"algorithm", "algorithm.kl", "algorithm.kl.reference"})
        begins = Begins(staged, parent, request_before.reference if inherits else None)
        kl = await reference.staged(ctx, call.caller, spec, request_before.cwd, begins)
        request_before = replace(request_before, overrides=merged(request_before.overrides, body.overrides))
        request, spec = await _prepare_request(ctx, call.caller.uid, request_before, spec, body, staged, kl)
        refuse_used(ctx, spec)
        row = _create(ctx, call, spec, request, (start, staged, text), kl)
    finally:
        discard(staged)
        reference.clear(kl)
    ctx.loop.poke()
    return extend(Forked, run_view(ctx, row), warnings=[*anew, *request.facts.warnings])


def _other_kind(parent: RunRow, body: ForkRequest) -> list[str]:
    """Say that Adam starts from zero if the fork minimises another kind of loss. Raises SpecError."""
    before = spec_of(parent)
    algorithm = override(before, body.overrides).algorithm
    if body.fresh or algorithm.kind == before.algorithm.kind:
        return []
    return [f"only weights are taken: Adam's moments are of {before.algorithm.name}, not of {algorithm.name}"]


def _find_start(ctx: Context, parent: RunRow, version: VersionRow, fresh: bool) -> _ForkStart:
    """Find the newest checkpoint that holds `version`. Raises NotFound, which lists the versions with one."""
    if fresh:
        return _ForkStart(version.name, Path(version.path), version.step)
    present = [row for row in checkpoints(ctx.store, parent.name) if has_files(row.path)]
    holding = [row for row in present if row.version == version.version]
    if not holding:
        names = ", ".join(f"{row.run}@{row.version}" for row in present)
        says = f"These have one: {names}. " if names else f"No version of {parent.name} has one. "
        raise NotFound(
            f"no checkpoint holds {version.name}, so its optimizer's state is gone",
            hint=f"{says}With --fresh only the weights are taken, and Adam starts from zero.",
        )
    trained = spec_at(parent.dir.attempt(holding[-1].attempt))
    return _ForkStart(version.name, Path(holding[-1].path), holding[-1].step, trained)


def _make_spec(parent: RunRow, body: ForkRequest, start: _ForkStart) -> Spec:
    """Make the fork's spec of the parent's, without a name unless one is set.

    Raises SpecError for overrides that change what defines the adapter.
    """
    before = spec_of(parent)
    for text in body.overrides:
        key = key_of_override(text)
        is_of_lora = key.partition(".")[0] == "lora" and key not in _FREE
        if (is_of_lora or key in ("model", "model.path")) and override(before, [text]) != before:
            why = f"{key} is part of what the adapter is, and a fork continues with the existing one"
            raise SpecError(f"override {text}: {why}", hint="Leave it out, or start a new run with it.")
    before = replace(before, name=None, lora=replace(before.lora, adapter_path=None))
    rate = request_of(parent).facts.rate
    if rate is not None and before.trainer.lr == rate.lr:  # what fits another algorithm is another rate
        before = replace(before, trainer=replace(before.trainer, lr=None))
        if before.algorithm.critic.lr == rate.critic:
            critic = replace(before.algorithm.critic, lr=None)
            before = replace(before, algorithm=replace(before.algorithm, critic=critic))
    more = [] if body.steps is None else [f"trainer.steps={body.steps}"]
    spec = override(before, [*body.overrides, *more])
    if not body.fresh:
        rank = before.algorithm.critic.rank
        both = before.algorithm.has_critic and spec.algorithm.has_critic
        if both and spec.algorithm.critic.rank != rank:
            hint = "Leave it out, or --fresh takes the policy's weights alone and begins with a new critic."
            problem = f"the critic that the fork takes along has rank {rank or before.lora.rank}"
            raise SpecError(problem, key="algorithm.critic.rank", hint=hint)
        spec = fit_lora_type(spec, body.overrides, start.trained)
    return spec


def _free_name(ctx: Context, parent: str) -> str:
    """Choose a name that is free: `sorter-fork`, `sorter-fork-2`, …"""
    for number in itertools.count(1):
        suffix = "-fork" if number == 1 else f"-fork-{number}"
        name = parent[: _NAME_LENGTH - len(suffix)] + suffix
        if not runs.exists(ctx.store, name) and not (ctx.runs_root / name).exists():
            break
    return name


async def copy_start(ctx: Context, start: _ForkStart, spec: Spec, uids: tuple[int, int]) -> Path:
    """Copy what the fork begins with, verified, into a directory of its own that nothing deletes from. Where
    one user owns both runs the files, which never change, are linked instead, without an await in which
    `prune` could delete them.

    uids: the owners of both runs.

    Raises NotFound, IntegrityError, StorageError.
    """
    staged = ctx.runs_root / f"{TEMPORARY}{spec.name}-{uuid.uuid4().hex[:12]}"
    owner, caller = map(ctx.user, uids)
    if not has_files(start.directory):
        raise NotFound(f"the files of {start.origin} are not there", hint="`lorad adapters` shows which are.")
    try:
        staged.mkdir(mode=0o700)
        if caller is not None:
            own_directory(staged, caller)
        if not (uids[0] == uids[1] and _link(start.directory, staged, caller)):
            await in_thread(ctx, uids[1], _copy, start.directory, staged, owner, caller)
        await on_behalf(ctx, uids[1], verify, staged)
    except OSError as error:
        discard(staged)
        where = error.filename or staged
        hint = "Free some space, or mend the permissions; "
        hint += "a checkpoint may have been deleted just now: try again."
        raise StorageError(f"{where}: {error.strerror}", hint=hint) from error
    except LoradError:
        discard(staged)
        raise
    return staged


def _link(source: Path, target: Path, user: User | None) -> bool:
    """Link the files of a version into a new directory, or leave it empty and return False if that fails."""
    with as_user(user):
        try:
            for name in (*read_manifest(source).files, MANIFEST):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(source / name, target / name, follow_symlinks=False)
            for path in (*target.rglob("*"), target):
                fsync(path)
        except OSError:
            for path in target.iterdir():
                if path.is_dir():
                    discard(path)
                else:
                    path.unlink()
            return False
    return True


def _copy(source: Path, target: Path, owner: User | None, reader: User | None) -> None:
    with as_user(owner):
        names = (*read_manifest(source).files, MANIFEST)
    files_into(source, target, names, owner, reader)


async def _prepare_request(
    ctx: Context, uid: int, before: Request, spec: Spec, body: ForkRequest, staged: Path, kl: Staged | None
) -> tuple[Request, Spec]:
    """Preflight a run with the fork's weights, and return its request and its spec. Raises SpecError."""
    weights = replace(spec, lora=replace(spec.lora, adapter_path=str(staged)))
    facts = await preflight(ctx, weights, before.cwd, uid, kl and kl.directory)
    reference.refuse_other_model(kl, facts)
    spec, facts = rated(spec, facts)
    before = replace(before, reference=kl and kl.reference)
    if body.fresh:
        own = RunDir(ctx.runs_root / str(spec.name)).origin
        spec = replace(spec, lora=replace(spec.lora, adapter_path=str(own)))
    return replace(before, model_path=facts.model_path, facts=facts), spec


def _create(
    ctx: Context,
    call: Call,
    spec: Spec,
    request: Request,
    origin: tuple[_ForkStart, Path, str],
    kl: Staged | None,
) -> RunRow:
    """Put the origin into the run's directory, and create the run. Raises StorageError, Conflict."""
    start, staged, text = origin
    directory = make_directory(ctx, spec, text, request)
    own = RunDir(directory).origin
    discard(own)  # left by a run that was never made
    try:
        staged.rename(own)
        fsync(directory)
    except OSError as error:
        raise Conflict(f"{own} cannot be made: {error.strerror}", hint="Choose another name.") from error
    reference.settle(kl, directory)
    with ctx.store.write():
        row = create(ctx, spec, directory, call.caller, request.facts.warnings)
        runs.set_fields(ctx.store, row.name, origin=start.origin)
        fresh = spec.lora.adapter_path is not None
        facts = {"from": start.origin, "step": start.step, "fresh": fresh, "by": call.caller.name}
        events.append(ctx.store, row.name, "forked", facts)
        return runs.get(ctx.store, row.name)
