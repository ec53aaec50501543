"""Describe what an action destroys, for the question before it; "" if nothing is lost, or the daemon will
refuse.

Each function asks the daemon, so it runs on a thread.
"""

from lorad.client.client import Client
from lorad.records.versions import Checkpoint
from lorad.states import RunState
from lorad.text import counted, size
from lorad.tui.actions.action import Values

_QUEUED = "It has not begun: it leaves the queue and ends. It can be resumed later."


def of_stop(client: Client, run: str, _: Values) -> str:
    row = client.show(run)
    if RunState(row.state).is_over:
        return ""
    if row.state == RunState.QUEUED:
        return _QUEUED
    return "It finishes the step it is at, writes a checkpoint and ends. It can be resumed later."


def of_kill(client: Client, run: str, _: Values) -> str:
    row = client.show(run)
    if RunState(row.state).is_over:
        return ""
    if row.state == RunState.QUEUED:
        return _QUEUED
    saved = _newest(client.checkpoints(run))
    step = row.step
    begins = f"its checkpoint of step {saved}" if saved is not None else "the beginning: it has no checkpoint"
    again = f" {_steps(saved or 0, step)} done again then." if step > (saved or 0) else ""
    return f"Its driver is ended at once, in the middle of a step. Resuming will start from {begins}.{again}"


def of_resume(client: Client, run: str, values: Values) -> str:
    """Describe what was done since a checkpoint that is older than the newest."""
    start = values.get("from", "").strip()
    row = client.show(run)
    reached = row.step
    if (
        not start
        or not RunState(row.state).is_over
        or int(start) >= max(reached, 1)
        or int(start) == _newest(client.checkpoints(run))
    ):
        return ""
    return (
        f"It continues from step {start}: {_steps(int(start), reached).lower()} done again, and what came of "
        f"{'it' if reached == int(start) + 1 else 'them'} does not count any more, nor do later checkpoints. "
        "Versions stay."
    )


def of_rm(client: Client, run: str, _: Values) -> str:
    row = client.show(run)
    if not RunState(row.state).is_over:
        return ""
    versions = client.adapters(run)
    checkpoints = client.checkpoints(run)
    aliases = [name for version in versions for name in version.aliases]
    parts = [
        counted(len(versions), "version"),
        f"{counted(len(checkpoints), 'checkpoint')} ({size(sum(saved.bytes for saved in checkpoints))})",
        f"the samples and logs of {counted(row.step, 'step')}",
    ]
    served = f" Served now as: {', '.join(aliases)}." if aliases else ""
    return f"{', '.join(parts[:-1])} and {parts[-1]} are deleted for good.{served}"


def of_unpin(client: Client, version: str, _: Values) -> str:
    name, _at, number = version.partition("@")
    rows = client.adapters(name) if number.isdecimal() else []
    row = next((row for row in rows if str(row.version) == number), None)
    if row is not None and not row.pinned:
        return ""
    aliases = f" {', '.join(row.aliases)} still holds it." if row is not None and row.aliases else ""
    return f"It may be unloaded, and its files deleted once nothing needs them.{aliases}"


def of_rollback(client: Client, alias: str, _: Values) -> str:
    moves = client.alias_moves(alias)
    if len(moves) < 2 or moves[1].version is None:
        return ""
    now, before = (f"{move.run}@{move.version}" for move in moves[:2])
    return (
        f"{alias} serves {before} again instead of {now}. Nothing is deleted; the next rollback undoes "
        "this one."
    )


def of_unalias(client: Client, alias: str, _: Values) -> str:
    return f"From then on requests for {alias} fail: there is no such model. The version stays."


def of_end(client: Client, pool: str, _: Values) -> str:
    return f"The base of {pool} is loaded again when a run or a request needs it, which takes its time."


def _newest(checkpoints: list[Checkpoint]) -> int | None:
    return max((saved.step for saved in checkpoints), default=None)


def _steps(saved: int, step: int) -> str:
    return f"Step {step} is" if step == saved + 1 else f"Steps {saved + 1} to {step} are"
