"""Rows as clients see them: the shapes of `lorad.client`."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from lorad.daemon.context import Context, attempt_dir, request_of, run_dir
from lorad.daemon.pool import Pool
from lorad.daemon.preempt import told_of
from lorad.daemon.processes import read_status
from lorad.daemon.runtime import told_runtime
from lorad.daemon.versions import has_files, is_loaded
from lorad.errors import LoradError
from lorad.paths import AttemptDir
from lorad.protocol.status import PoolStatus
from lorad.spec_text import from_json
from lorad.specs import Spec
from lorad.store import events, runs
from lorad.store.db import Rows
from lorad.store.rows import RunRow, RunSummary, VersionRow

RUN_KEYS = """
name state reason detail waiting step steps reward eval_first eval_last version owner pool created_at started_at
ended_at attempt priority preempted rates signals recent origin base
"""
VERSION_KEYS = "run version step sha256 path rank alpha parent created_at pinned aliases attested attestation bytes"
WARNINGS = 20
OWN = "trainer."  # of versions in PoolInfo


def run_view(row: RunSummary) -> dict[str, Any]:
    waiting = told_of(row, row.waiting if row.state in ("queued", "starting") or row.serving else "")
    return {key: getattr(row, key) for key in RUN_KEYS.split()} | {"waiting": waiting}


def history(rows: Rows, row: RunRow) -> dict[str, Any]:
    """What took place in a run; takes its time where that was much."""
    warnings = events.of_kind(rows, row.name, "warning", since=row.created_at, limit=WARNINGS)
    return {
        "attempts": attempts_of(rows, row),
        "trainable": trainable(rows, row),
        "warnings": [warning.get("message", "") for warning in reversed(warnings)],
    }


def show_view(ctx: Context, row: RunRow, history: dict[str, Any]) -> dict[str, Any]:
    return run_view(row) | {
        "directory": row.directory,
        "cwd": asked_in(row),
        "reference": reference_of(row),
        "sweep": row.sweep,
        "serving": bool(row.serving),
        "spec": json.loads(row.spec),
        "processes": processes_of(ctx, row),
        **history,
    }


def asked_in(row: RunRow) -> str | None:
    """Where relative paths of its spec begin; None where that is not kept."""
    try:
        return request_of(row).cwd
    except LoradError:
        return None


def reference_of(row: RunRow) -> dict[str, Any] | None:
    """{name, sha256} of what KL is measured against; None where that is the base."""
    try:
        there = request_of(row).reference
    except LoradError:
        return None
    return None if there is None else {"name": there.name, "sha256": there.sha256}


def attempts_of(rows: Rows, row: RunRow) -> list[dict[str, Any]]:
    """`changed`: dotted keys whose values are others than in the attempt before; of attempts that kept their spec."""
    found: list[dict[str, Any]] = []
    before: dict[str, Any] | None = None
    for attempt in runs.attempts(rows, row.name):
        spec = spec_at(run_dir(row).attempt(attempt.attempt))
        plain = msgspec.to_builtins(spec) if spec else None
        found.append(msgspec.to_builtins(attempt) | {"changed": differences(before, plain) if before and plain else {}})
        before = plain
    return found


def spec_at(attempt: AttemptDir) -> Spec | None:
    """What the attempt went by; None where it is not kept, or cannot be read."""
    try:
        return from_json(attempt.spec.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None


def differences(before: Any, after: Any, key: str = "") -> dict[str, Any]:
    """Of two plain mappings: dotted key -> the value after."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return {} if before == after else {key: after}
    return {
        changed: value
        for name in after
        for changed, value in differences(before.get(name), after[name], f"{key}.{name}" if key else name).items()
    }


def trainable(rows: Rows, row: RunRow) -> dict[str, Any] | None:
    """Parameters of the adapter and of its base, as the newest attempt that began told them; None before that."""
    attempts = events.of_kind(rows, row.name, "attempt", since=row.created_at, limit=1)
    if not attempts:
        return None
    told = attempts[0]
    own, base = told.get("parameters", 0), told.get("base_parameters", 0)
    return {"parameters": own, "base": base or None, "share": own / (own + base) if base else None}


def processes_of(ctx: Context, row: RunRow) -> list[dict[str, Any]]:
    """What works for an active run now, shims included: {role, pid}."""
    if row.state not in ("starting", "running", "stopping"):
        return []
    attempts = {"driver": attempt_dir(row)}
    if pool := ctx.pools.get(row.pool or ""):
        attempts["pool"] = pool.attempt()
    found = []
    for role, attempt in attempts.items():
        if (state := ctx.processes.inspect(attempt)).phase == "alive":
            status = read_status(attempt) or {}
            found += [{"role": role, "pid": state.pid}, {"role": f"{role} shim", "pid": status.get("shim_pid")}]
    return found


def version_view(ctx: Context, row: VersionRow) -> dict[str, Any]:
    """`path` is None while, or after, there are no files."""
    path = row.path if has_files(row.path) else None
    return {key: getattr(row, key) for key in VERSION_KEYS.split()} | {"loaded": is_loaded(ctx, row), "path": path}


def pool_view(ctx: Context, pool: Pool) -> dict[str, Any]:
    status = believed(ctx, pool)
    return {
        "pool": pool.id,
        "state": pool.state,
        "model": pool.setup.model,
        "pid": pool.process.pid,
        "device": pool.setup.names[0],
        "mode": pool.setup.mode,
        "threads": pool.setup.threads,
        "runtime": told_runtime(pool.attempt()),
        "tenants": [tenant.run for tenant in status.tenants] if status else [],
        "runs": [
            {"run": tenant.run, "phase": tenant.phase, "bytes": tenant.bytes, "waited": tenant.waited}
            for tenant in (status.tenants if status else ())
        ],
        "capacity": msgspec.to_builtins(status.capacity) if status and status.capacity else None,
        "loaded": status.loaded if status else [],
        "engine_tokens_per_second": status.engine_tokens_per_second if status else 0.0,
        "trainer_tokens_per_second": status.trainer_tokens_per_second if status else 0.0,
        "engine": engine_view(pool.setup.engine, status),
        "trainer": trainer_view(pool.setup.trainer, status),
        "devices": list(pool.setup.names),
        "memory_bytes": status.rss_bytes if status else None,
        "idle_seconds": pool.idle_seconds,
    }


def believed(ctx: Context, pool: Pool) -> PoolStatus | None:
    """What a pool says, without what a shared daemon's user claims of runs that are not theirs."""
    if pool.status is None or not ctx.system:
        return pool.status
    own = {*runs.names(ctx.store, owner_uid=pool.setup.owner)}
    tenants = [tenant for tenant in pool.status.tenants if tenant.run in own]
    loaded = [name for name in pool.status.loaded if name.rpartition("@")[0] in own]
    return msgspec.structs.replace(pool.status, tenants=tenants, loaded=loaded)


def trainer_view(name: str, status: PoolStatus | None) -> dict[str, Any]:
    """The backend's name, the versions of what trains apart from the pool, and how it is; as `engine_view`."""
    if status is None or status.trainer is None:
        return {"name": name}
    versions = status.info.versions.items()
    software = {key.removeprefix(OWN): version for key, version in versions if key.startswith(OWN)}
    return {"name": name, "software": software, **msgspec.to_builtins(status.trainer)}


def engine_view(name: str, status: PoolStatus | None) -> dict[str, Any]:
    """The backend's name, the versions of what serves, and what it does; no more than the name before it answers."""
    if status is None or status.engine is None:
        return {"name": name}
    return {"name": name, "software": status.info.versions.get(name), **msgspec.to_builtins(status.engine)}
