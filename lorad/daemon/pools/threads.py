"""Choose the threads of pools, and keep those of a run in `runtime.json` in its directory.

A deterministic run has the threads of its first attempt in all attempts: N steps, a kill, a resume under
another load and M steps are N + M steps bit for bit. The file is on disk before the first attempt begins.
Where it was removed, the setup of the run's pool is used instead.
"""

import os
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from lorad.box.runtime import Decision, Overrides, choose_threads
from lorad.daemon.context import Context, unreadable
from lorad.daemon.process.processes import write_json
from lorad.spec.model import Spec
from lorad.store import events
from lorad.store.rows import RunRow

FILE = "runtime.json"
UNKNOWN = Decision("run", "as the run had that it was made for")


class _Kept(Struct, frozen=True):
    """The content of `runtime.json`: the threads of a run, and why so many.

    In the file of a run that is not deterministic are those of its newest attempt.
    """

    threads: int
    reason: Decision


def threads_of(
    ctx: Context, run: RunRow, spec: Spec, parameters: int, kinds: Iterable[str]
) -> dict[str, tuple[int, Decision]]:
    """Choose the threads of a run's next attempt on each kind of device, and say why so many.

    parameters: the number of parameters of the model.

    Raises StorageError when the run's file is damaged.
    """
    machine = ctx.gpus.machine()
    fixed = None  # as many as the first attempt had, where the run is deterministic
    if spec.deterministic is not False:
        pool = ctx.pools.get(run.pool or "")
        kept = _read_kept(run)
        fixed = kept.threads if kept else pool.setup.threads if pool else None
    overrides = Overrides(fixed, spec.pool.threads, ctx.config.runtime, os.environ)
    slots = len(ctx.gpus.devices) if ctx.gpus.devices[0].is_cpu else 1
    return {kind: choose_threads(parameters, machine, kind, overrides, slots) for kind in kinds}


def keep_runtime(ctx: Context, run: RunRow, threads: int, why: Decision) -> None:
    """Write down the threads of an attempt; warn when this machine is too small for the first one."""
    if why.source != "run" or _read_kept(run) is None:
        write_json(run.dir.root / FILE, msgspec.to_builtins(_Kept(threads, why)))
    if why.source == "run" and threads > (usable := ctx.gpus.machine().usable):
        since = f"this run computes with {threads} threads since its first attempt"
        message = f"{since}, and only {usable} can run here: slower, with the same results"
        events.append(ctx.store, run.name, "warning", {"message": message})


def why_threads(run: RunRow) -> Decision:
    kept = _read_kept(run)
    return kept.reason if kept else UNKNOWN


def _read_kept(run: RunRow) -> _Kept | None:
    """Read the file of a run; None where it has none. Raises StorageError."""
    path = run.dir.root / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        hint = "Remove it: the run then computes with as many threads as its pool has."
        raise unreadable(path, error, f"{hint} Or put a backup in its place.") from error
