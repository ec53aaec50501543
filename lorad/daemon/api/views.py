"""Make the answers of requests out of rows and of what the daemon knows besides."""

import contextlib
import json
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from lorad.bounds import SPEC_BODY_BYTES
from lorad.box.paths import AttemptDir
from lorad.daemon import pool as daemon_pool
from lorad.daemon.access import name_for
from lorad.daemon.context import Context, request_of
from lorad.daemon.process.processes import read_object, read_status
from lorad.daemon.runs.versions import has_files, is_loaded
from lorad.daemon.storage.footprint import files_of
from lorad.errors import LoradError
from lorad.files import read_file
from lorad.protocol.evals import Expected, SetScore, judged
from lorad.protocol.status import PoolStatus
from lorad.records.measured import Result
from lorad.records.pools import Pool, PoolEngine, PoolRun, PoolRuntime, PoolTrainer
from lorad.records.runs import (
    Attempt,
    Beginning,
    Best,
    KeptFiles,
    KlReference,
    Run,
    RunDetails,
    RunProcess,
    Trainable,
)
from lorad.records.versions import Version
from lorad.spec.model import Spec
from lorad.spec.text import from_json
from lorad.states import RunState
from lorad.store import events, runs
from lorad.store.db import Rows
from lorad.store.metrics import best_evals, evals, figures_at
from lorad.store.rows import RunRow, RunSummary, VersionRow
from lorad.store.versions import results

_WARNINGS = 20
_OWN = "trainer."  # prefix of the trainer's keys in PoolInfo.versions
_OF_STATUS = ("capacity", "loaded", "engine_tokens_per_second", "trainer_tokens_per_second")
T = TypeVar("T", bound=Struct)
OfRun = TypeVar("OfRun", bound=Run)


class _History(Struct, frozen=True):
    """The fields of RunDetails that the database and files of a run have."""

    attempts: list[Attempt]
    trainable: Trainable | None
    warnings: list[str]
    best: Best | None
    sets: dict[str, list[SetScore]]
    results: list[Result]
    expected: list[Expected]
    begun: Beginning | None
    files: KeptFiles | None


def of_row(kind: type[T], row: Struct, **more: Any) -> T:
    """Make an answer of `more` fields, and of a row's fields of the same names."""
    names = [name for name in kind.__struct_fields__ if name not in more and hasattr(type(row), name)]
    return kind(**{name: getattr(row, name) for name in names}, **more)


def extend(kind: type[T], answer: Struct, **more: Any) -> T:
    """Make a Struct with all fields of another one and `more`, which go before."""
    return kind(**asdict(answer) | more)


def run_view(ctx: Context, row: RunSummary) -> Run:
    return of_row(Run, row, waiting=_waiting_of(ctx, row))


def listed_view(ctx: Context, row: RunSummary) -> Run:
    """Make the view of a row in a list, once while the run does not change."""
    return _kept_view(row, _waiting_of(ctx, row))


def _waiting_of(ctx: Context, row: RunSummary) -> str:
    """Say why a run waits, and for which run it made room."""
    waiting = row.waiting if row.state in ("queued", "starting") or row.serving else ""
    if row.yielded:
        return f"stops at its next step: {row.yielded}"
    if not row.preempted:
        return waiting
    other = name_for(ctx, row, row.preempted)
    if row.state == RunState.STOPPING:
        return f"being preempted by {other}"
    return "; ".join(part for part in (f"preempted by {other}", waiting) if part)


@lru_cache(maxsize=2048)
def _kept_view(row: RunSummary, waiting: str) -> Run:
    return of_row(Run, row, waiting=waiting)


def with_place(ctx: Context, run: OfRun) -> OfRun:
    """Add the place of a queued run and when it starts, or what an active run is doing."""
    if run.state in (RunState.STARTING, RunState.RUNNING, RunState.STOPPING):
        doing = ctx.processes.doing.get(run.name, "")
        return replace(run, doing=doing) if doing else run
    place = ctx.queue.places.get(run.name) if run.state == RunState.QUEUED else None
    if place is None:
        return run
    starts_at, after = ctx.queue.foreseen[1].get(run.name, (None, ""))
    return replace(run, queue=replace(place, starts_at=starts_at, after=after))


def history(rows: Rows, row: RunRow) -> _History:
    """Read what took place in a run, which may take a while."""
    warnings = events.of_kind(rows, row.name, "warning", limit=_WARNINGS)
    messages = [warning.get("message", "") for warning in reversed(warnings)]
    sets: dict[str, list[SetScore]] = {}  # the first and the last evaluation of each
    for evaluation in evals(rows, row.name):
        for name, score in evaluation.sets.items():
            sets[name] = [sets.get(name, [score])[0], score]
    trainable = None
    begun = None
    for began in events.of_kind(rows, row.name, "attempt", limit=1):
        own = began.get("parameters", 0)
        base = began.get("base_parameters", 0)
        trainable = Trainable(own, base or None, own / (own + base) if base else None)
        files = began.get("inputs")
        inputs = (files if isinstance(files, dict) else {}).items()
        digests = {
            key: about["sha256"] for key, about in inputs if isinstance(about, dict) and about.get("sha256")
        }
        with contextlib.suppress(msgspec.ValidationError):  # its driver wrote something else
            begun = msgspec.convert({**began, "inputs": digests}, Beginning)
    spec = None
    with contextlib.suppress(msgspec.MsgspecError):  # one of another lorad
        spec = from_json(row.spec.encode())
    best = None
    expected: list[Expected] = []
    if spec is not None:
        metric, ranked = best_evals(rows, row.name, spec.checkpoint.best_by)
        if ranked:
            best = Best(ranked[0].version, ranked[0].step, metric, ranked[0].figures[metric])
        figures = partial(figures_at, rows, row.name)
        is_over = row.state == RunState.ENDED
        expected = [judged(wish, row.steps, row.step, figures, is_over=is_over) for wish in spec.expect]
    return _History(
        attempts=_attempts_of(rows, row),
        trainable=trainable,
        warnings=messages,
        best=best,
        sets=sets,
        results=results(rows, row.name),
        expected=expected,
        begun=begun,
        files=files_of(row),
    )


def show_view(ctx: Context, row: RunRow, history: _History) -> RunDetails:
    try:
        request = request_of(row)
    except LoradError:  # it was not kept
        request = None
    reference = request and request.reference
    attempts = {}
    if row.state in (RunState.STARTING, RunState.RUNNING, RunState.STOPPING):
        attempts["driver"] = row.attempt_dir
        if pool := ctx.pools.get(row.pool or ""):
            attempts["pool"] = pool.attempt()
    processes = []  # that it has now, shims included
    for role, attempt in attempts.items():
        if (state := ctx.processes.inspect(attempt)).phase == "alive":
            status = read_status(attempt) or {}
            processes += [RunProcess(role, state.pid), RunProcess(f"{role} shim", status.get("shim_pid"))]
    return extend(
        RunDetails,
        with_place(ctx, run_view(ctx, row)),
        directory=row.directory,
        cwd=request.cwd if request else None,
        reference=reference and KlReference(reference.name, reference.sha256),
        rate=request and request.facts.rate,
        serving=row.serving,
        spec=json.loads(row.spec),
        data_format=request.facts.data_format if request else "",
        processes=processes,
        **{key: getattr(history, key) for key in history.__struct_fields__},
    )


def _attempts_of(rows: Rows, row: RunRow) -> list[Attempt]:
    """List the attempts of a run, with the keys of the spec that changed where both attempts kept theirs."""
    described: list[Attempt] = []
    before: dict[str, Any] | None = None  # a spec as JSON
    for attempt in runs.attempts(rows, row.name):
        spec = spec_at(row.dir.attempt(attempt.attempt))
        plain = msgspec.to_builtins(spec) if spec else None
        if before and plain:
            changed = _differences(before, plain)
            attempt = replace(attempt, changed=changed, before=_differences(plain, before))
        described.append(attempt)
        before = plain
    return described


def spec_at(attempt: AttemptDir) -> Spec | None:
    """Read the spec of an attempt; None where it was not kept, or cannot be read."""
    try:
        return from_json(read_file(attempt.spec, SPEC_BODY_BYTES))
    except (OSError, msgspec.MsgspecError):
        return None


def _differences(before: Any, after: Any, key: str = "") -> dict[str, Any]:
    """Compare two specs as JSON: dotted key -> the value in the second, whatever its type."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return {} if before == after else {key: after}
    changed: dict[str, Any] = {}
    for name, value in after.items():
        changed |= _differences(before.get(name), value, f"{key}.{name}" if key else name)
    return changed


def version_view(ctx: Context, row: VersionRow, results: Sequence[Result] = ()) -> Version:
    """Describe a version; `path` is None where it has no files."""
    path = row.path if has_files(row.path) else None
    return of_row(Version, row, loaded=is_loaded(ctx, row), path=path, results=[*results])


def pool_view(ctx: Context, pool: daemon_pool.Pool) -> Pool:
    status = pool.status
    if status is not None and ctx.users.shared:  # without what it claims about runs of other owners
        own = {*runs.names(ctx.store, owner_uid=pool.setup.owner)}
        believed = [tenant for tenant in status.tenants if tenant.run in own]
        loaded = [name for name in status.loaded if name.rpartition("@")[0] in own]
        status = replace(status, tenants=believed, loaded=loaded)
    tenants = status.tenants if status else []
    runtime = None  # what the process of the pool was started with, where that was kept
    with contextlib.suppress(msgspec.ValidationError):
        command = read_object(pool.attempt().command)
        runtime = msgspec.convert(command.get("runtime"), PoolRuntime | None)
    trainer = PoolTrainer(pool.setup.trainer)
    if status is not None and status.trainer is not None:
        versions = status.info.versions.items()  # of what trains apart from the pool
        software = {key.removeprefix(_OWN): version for key, version in versions if key.startswith(_OWN)}
        trainer = extend(PoolTrainer, status.trainer, name=pool.setup.trainer, software=software)
    figures = {name: getattr(status, name) for name in _OF_STATUS} if status else {}
    return of_row(
        Pool,
        pool.setup,
        state=pool.state,
        pid=pool.process.pid,
        device=(*pool.holds, pool.where)[0],
        runtime=runtime,
        tenants=[tenant.run for tenant in tenants],
        runs=[PoolRun(tenant.run, tenant.phase, tenant.bytes, tenant.waited) for tenant in tenants],
        engine=engine_view(pool.setup.engine, status),
        trainer=trainer,
        devices=list(pool.holds),
        memory_bytes=status.rss_bytes if status else None,
        idle_seconds=pool.idle_seconds,
        nodes=[node.node for node in pool.nodes],
        waiting=pool.waits_for,
        **figures,
    )


def engine_view(name: str, status: PoolStatus | None) -> PoolEngine:
    """Describe the backend that serves; its name alone before it answers."""
    if status is None or status.engine is None:
        return PoolEngine(name)
    return extend(PoolEngine, status.engine, name=name, software=status.info.versions.get(name))
