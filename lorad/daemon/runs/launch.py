"""Start the processes of a run that was placed: the pool's, unless it is warm, and the driver's."""

import json
import os
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec

from lorad.daemon.context import Context, request_of, spec_of
from lorad.daemon.pools.life import start_pool
from lorad.daemon.pools.threads import why_threads
from lorad.daemon.process.as_user import as_user
from lorad.daemon.process.commands import own_secrets
from lorad.daemon.process.processes import write_json
from lorad.daemon.process.user_files import hand_over, make_attempt, make_run, own_directory
from lorad.protocol.driver_params import FILE as PARAMS
from lorad.protocol.driver_params import DriverParams
from lorad.store.rows import RunRow
from lorad.store.versions import first_number

_GRANTED_SECONDS = 365 * 86400.0  # for a cluster to grant nodes; `queue/cluster.py` judges the wait


def launch(ctx: Context, run: RunRow) -> None:
    """Start the pool and the driver, unless they are up; the driver waits for the pool's socket itself.

    Repeated after a crash at any point, it starts nothing twice.
    """
    attempt = run.attempt_dir
    state = ctx.processes.inspect(attempt)
    if state.is_up:
        ctx.loop.watch(attempt.root, partial(ctx.processes.watch, attempt))
    if state.phase != "absent":
        return
    pool = ctx.pools[run.pool or ""]
    joins = not start_pool(ctx, pool, why_threads(run))  # where it was up, for other runs
    request = request_of(run)
    user = ctx.user(run.owner_uid)
    make_run(run.dir, user)
    spec = spec_of(run)
    if spec.algorithm.kind == "tinker" and user is not None:  # the door writes requests there
        own_directory(run.dir.tinker, user)
    make_attempt(attempt, user)
    reference = request.reference
    if reference is not None:  # its copy lies in the run's directory, which may have been moved
        reference = msgspec.structs.replace(reference, directory=str(run.dir.reference))
    # A fork begins with its checkpoint, or with weights alone, by lora.adapter_path. In a run that is no fork
    # the directory is left from a fork that failed.
    origin = run.dir.origin
    has_start = run.origin and origin.is_dir() and spec.lora.adapter_path is None
    params = DriverParams(
        run=run.name,
        run_dir=str(run.dir.root),
        attempt=run.attempt,
        steps=run.steps or spec.trainer.steps,
        resume_step=run.resume_step,
        pool=pool.id,
        pool_socket=pool.setup.socket,
        cwd=request.cwd,
        pool_timeout=ctx.patience.pool_ready if pool.setup.nodes is None else _GRANTED_SECONDS,
        first_version=first_number(ctx.store, run.name),
        spec=str(attempt.work / attempt.spec.name),
        origin=run.origin or "",
        start_from=str(origin) if has_start else None,
        bases=request.bases,
        date=datetime.fromtimestamp(run.created_at).isoformat(),
        reference=reference,
    )
    write_json(attempt.spec, json.loads(run.spec))  # `resume` and `fork` read it later
    hand_over(attempt, {PARAMS: msgspec.to_builtins(params), attempt.spec.name: json.loads(run.spec)}, user)
    with as_user(user):
        cwd = Path(request.cwd) if os.path.isdir(request.cwd) else run.dir.root
    about = {"role": "driver", "run": run.name, "attempt": run.attempt, "pool_attempt": pool.number}
    secrets = {name: str(path) for name, path in ctx.config.secrets.items()}
    about |= {"joins": joins, "secret_files": secrets, "ends_all": True}
    commands = ctx.processes.commands
    argv = commands.lane if spec.algorithm.kind == "tinker" else commands.driver
    env = commands.environment(ctx.home) | own_secrets(user)
    ctx.processes.start(attempt, [*argv, str(attempt.work)], env, cwd, about=about, user=user)
    ctx.loop.watch(attempt.root, partial(ctx.processes.watch, attempt))
