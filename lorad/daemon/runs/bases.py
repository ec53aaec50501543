"""Find out which weights an adapter was made on: another base of the same shapes would take it without an
error.
"""

from typing import Any

import msgspec

from lorad.daemon.context import Context, request_of
from lorad.daemon.pool import Pool
from lorad.errors import Conflict
from lorad.protocol.inputs import Input
from lorad.store import events
from lorad.store.rows import RunRow

# keys of an attempt's record that describe the base
_KEYS = ("model_sha256", "base_checksum", "trainer", "sizes")


def bases_of(ctx: Context, run: RunRow) -> list[dict[str, Any]]:
    """List the bases that a run's attempts recorded, newest first, or those that came with its adapter."""
    attempts = events.of_kind(ctx.store, run.name, "attempt")
    recorded = [{key: attempt[key] for key in _KEYS if key in attempt} for attempt in attempts]
    bases = [base for place, base in enumerate(recorded) if base not in recorded[:place]]
    return bases or request_of(run).bases


def inputs_of(ctx: Context, run: RunRow) -> dict[str, Input]:
    """List the files that the newest attempt read, as they were when it began."""
    attempts = events.of_kind(ctx.store, run.name, "attempt", limit=1)
    try:
        return msgspec.convert(attempts[0].get("inputs", {}) if attempts else {}, dict[str, Input])
    except msgspec.ValidationError:  # a journal that somebody wrote
        return {}


def base_in(pool: Pool) -> list[dict[str, Any]]:
    """Describe the base of an adapter that the pool serves; [] where the pool does not report it."""
    sha256 = pool.status.info.model_sha256 if pool.status else ""
    return [{"model_sha256": sha256}] if sha256 else []


def refuse_other_base(ctx: Context, run: RunRow, pool: Pool) -> None:
    """Raise Conflict when the run's versions were made on other weights than those of the pool's base."""
    digests = [base["model_sha256"] for base in bases_of(ctx, run) if base.get("model_sha256")]
    if digests and any(base["model_sha256"] not in digests for base in base_in(pool)):
        right = f"those that the versions of {run.name} were made on"
        raise Conflict(
            f"the weights of {pool.setup.model} are not {right}",
            hint=f"Put the model back; `lorad verify {run.name}` says more.",
        )
