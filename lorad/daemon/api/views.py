"""Rows as clients see them: the shapes of `lorad.client`."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from lorad.bounds import SPEC_BODY_BYTES
from lorad.box.paths import AttemptDir
from lorad.daemon import pool as daemon_pool
from lorad.daemon.context import Context, request_of
from lorad.daemon.pools.threads import told_runtime
from lorad.daemon.process.processes import read_status
from lorad.daemon.queue.preempt import told_of
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
T = TypeVar("T", bound=Struct)
OfRun = TypeVar("OfRun", bound=Run)


class _History(Struct, frozen=True):
    """What took place in a run."""

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
    """Make an answer of a row's fields of the same names; `more` are fields that the row lacks or has
    otherwise.
    """
    names = _fields_in_both(kind, type(row))
    return kind(**{name: getattr(row, name) for name in names if name not in more}, **more)


@lru_cache
def _fields_in_both(kind: type[Struct], row: type[Struct]) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if hasattr(row, name))


def extended(kind: type[T], answer: Struct, **more: Any) -> T:
    """Make a Struct that has further fields, or others of the same names."""
    return kind(**asdict(answer) | more)


def run_view(ctx: Context, row: RunSummary) -> Run:
    return _viewed(row, _waiting_of(ctx, row))


def listed_view(ctx: Context, row: RunSummary) -> Run:
    """Make the view of a row in a list, once for as long as the run does not change."""
    return _kept_view(row, _waiting_of(ctx, row))


def _waiting_of(ctx: Context, row: RunSummary) -> str:
    return told_of(ctx, row, row.waiting if row.state in ("queued", "starting") or row.serving else "")


def _viewed(row: RunSummary, waiting: str) -> Run:
    return of_row(Run, row, waiting=waiting)


_kept_view = lru_cache(maxsize=2048)(_viewed)


def with_place(ctx: Context, run: OfRun) -> OfRun:
    """Add where a queued run stands in the queue, and when it starts; of an active one what it is doing."""
    if run.state in (RunState.STARTING, RunState.RUNNING, RunState.STOPPING):
        doing = ctx.processes.doing.get(run.name, "")
        return replace(run, doing=doing) if doing else run
    place = ctx.queue.places.get(run.name) if run.state == RunState.QUEUED else None
    if place is None:
        return run
    starts_at, after = ctx.queue.foreseen[1].get(run.name, (None, ""))
    return replace(run, queue=replace(place, starts_at=starts_at, after=after))


def history(rows: Rows, row: RunRow) -> _History:
    """Read what took place in a run; it takes its time where that was much."""
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
        begun = _beginning(began)
    return _History(
        attempts=_attempts_of(rows, row),
        trainable=trainable,
        warnings=messages,
        best=_best_of(rows, row),
        sets=sets,
        results=results(rows, row.name),
        expected=_expected_of(rows, row),
        begun=begun,
        files=files_of(row),
    )


def _best_of(rows: Rows, row: RunRow) -> Best | None:
    """Find the best evaluation, by `checkpoint.best_by`; None without any, or for a spec of another lorad."""
    try:
        best_by = from_json(row.spec.encode()).checkpoint.best_by
    except msgspec.MsgspecError:
        return None
    metric, best = best_evals(rows, row.name, best_by)
    return Best(best[0].version, best[0].step, metric, best[0].figures[metric]) if best else None


def _expected_of(rows: Rows, row: RunRow) -> list[Expected]:
    """Judge the expectations of a run by the facts that count; none for a spec of another lorad."""
    try:
        expectations = from_json(row.spec.encode()).expect
    except msgspec.MsgspecError:
        return []
    figures = partial(figures_at, rows, row.name)
    is_over = row.state == RunState.ENDED
    return [
        judged(expectation, row.steps, row.step, figures, is_over=is_over) for expectation in expectations
    ]


def show_view(ctx: Context, row: RunRow, history: _History) -> RunDetails:
    try:
        request = request_of(row)
    except LoradError:  # it was not kept
        request = None
    reference = request and request.reference
    return extended(
        RunDetails,
        with_place(ctx, run_view(ctx, row)),
        directory=row.directory,
        cwd=asked_in(row),
        reference=reference and KlReference(reference.name, reference.sha256),
        rate=request and request.facts.rate,
        serving=row.serving,
        spec=json.loads(row.spec),
        data_format=request.facts.data_format if request else "",
        processes=_processes_of(ctx, row),
        **{key: getattr(history, key) for key in history.__struct_fields__},
    )


def asked_in(row: RunRow) -> str | None:
    """Find the directory where relative paths of the run's spec begin; None where it was not kept."""
    try:
        return request_of(row).cwd
    except LoradError:
        return None


def _attempts_of(rows: Rows, row: RunRow) -> list[Attempt]:
    """Describe the attempts of a run.

    changed, before: dotted keys whose values differ from the attempt before, for attempts that kept their
        spec, with the values of both.
    """
    described: list[Attempt] = []
    before: dict[str, Any] | None = None  # a spec as JSON
    for attempt in runs.attempts(rows, row.name):
        spec = spec_at(row.dir.attempt(attempt.attempt))
        plain = msgspec.to_builtins(spec) if spec else None
        pair = (before, plain) if before and plain else ({}, {})
        ways = {"changed": _differences(*pair), "before": _differences(*pair[::-1])}
        described.append(replace(attempt, **ways))
        before = plain
    return described


def spec_at(attempt: AttemptDir) -> Spec | None:
    """Read the spec of the attempt; None where it was not kept, or cannot be read."""
    try:
        return from_json(read_file(attempt.spec, SPEC_BODY_BYTES))
    except (OSError, msgspec.MsgspecError):
        return None


def _differences(before: Any, after: Any, key: str = "") -> dict[str, Any]:
    """Compare two specs as JSON: dotted key -> the value in the second, whatever its type."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return {} if before == after else {key: after}
    return {
        changed: value
        for name in after
        for changed, value in _differences(
            before.get(name), after[name], f"{key}.{name}" if key else name
        ).items()
    }


def _beginning(began: Mapping[str, Any]) -> Beginning | None:
    """Read what an attempt began with; None where its driver wrote something else."""
    files = began.get("inputs")
    inputs = files if isinstance(files, dict) else {}
    digests = {
        key: one["sha256"] for key, one in inputs.items() if isinstance(one, dict) and one.get("sha256")
    }
    try:
        return msgspec.convert({**began, "inputs": digests}, Beginning)
    except msgspec.ValidationError:
        return None


def _processes_of(ctx: Context, row: RunRow) -> list[RunProcess]:
    """List the processes that an active run has now, shims included."""
    if row.state not in ("starting", "running", "stopping"):
        return []
    attempts = {"driver": row.attempt_dir}
    if pool := ctx.pools.get(row.pool or ""):
        attempts["pool"] = pool.attempt()
    processes = []
    for role, attempt in attempts.items():
        if (state := ctx.processes.inspect(attempt)).phase == "alive":
            status = read_status(attempt) or {}
            processes += [RunProcess(role, state.pid), RunProcess(f"{role} shim", status.get("shim_pid"))]
    return processes


def version_view(ctx: Context, row: VersionRow, results: Sequence[Result] = ()) -> Version:
    """Describe a version; `path` is None while there are no files, or after they were deleted."""
    path = row.path if has_files(row.path) else None
    return of_row(Version, row, loaded=is_loaded(ctx, row), path=path, results=[*results])


def pool_view(ctx: Context, pool: daemon_pool.Pool) -> Pool:
    status = _believed(ctx, pool)
    tenants = status.tenants if status else []
    runtime = None  # what the process of the pool was started with, where that was kept
    with contextlib.suppress(msgspec.ValidationError):
        runtime = msgspec.convert(told_runtime(pool.attempt()), PoolRuntime | None)
    trainer = PoolTrainer(pool.setup.trainer)
    if status is not None and status.trainer is not None:
        versions = status.info.versions.items()  # of what trains apart from the pool
        software = {key.removeprefix(_OWN): version for key, version in versions if key.startswith(_OWN)}
        trainer = extended(PoolTrainer, status.trainer, name=pool.setup.trainer, software=software)
    return Pool(
        pool=pool.id,
        state=pool.state,
        model=pool.setup.model,
        pid=pool.process.pid,
        device=(*pool.holds, pool.where)[0],
        mode=pool.setup.mode,
        threads=pool.setup.threads,
        runtime=runtime,
        tenants=[tenant.run for tenant in tenants],
        runs=[PoolRun(tenant.run, tenant.phase, tenant.bytes, tenant.waited) for tenant in tenants],
        capacity=status.capacity if status else None,
        loaded=status.loaded if status else [],
        engine_tokens_per_second=status.engine_tokens_per_second if status else 0.0,
        trainer_tokens_per_second=status.trainer_tokens_per_second if status else 0.0,
        engine=engine_view(pool.setup.engine, status),
        trainer=trainer,
        devices=list(pool.holds),
        memory_bytes=status.rss_bytes if status else None,
        idle_seconds=pool.idle_seconds,
        nodes=[node.node for node in pool.nodes],
        waiting=pool.waits_for,
    )


def _believed(ctx: Context, pool: daemon_pool.Pool) -> PoolStatus | None:
    """Take a pool's status, in a shared daemon without what it claims about runs of other owners."""
    if pool.status is None or not ctx.users.shared:
        return pool.status
    own = {*runs.names(ctx.store, owner_uid=pool.setup.owner)}
    tenants = [tenant for tenant in pool.status.tenants if tenant.run in own]
    loaded = [name for name in pool.status.loaded if name.rpartition("@")[0] in own]
    return msgspec.structs.replace(pool.status, tenants=tenants, loaded=loaded)


def engine_view(name: str, status: PoolStatus | None) -> PoolEngine:
    """Describe the backend that serves: its versions, and what it does; its name alone before it answers."""
    if status is None or status.engine is None:
        return PoolEngine(name)
    return extended(PoolEngine, status.engine, name=name, software=status.info.versions.get(name))
