"""Which weights an adapter was made on.

Another base with the same shapes would take the adapter without an error.
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
    """List the bases that the attempts of a run recorded, newest first; without any, what came with its
    adapter.
    """
    attempts = events.of_kind(ctx.store, run.name, "attempt")
    recorded = [{key: attempt[key] for key in _KEYS if key in attempt} for attempt in attempts]
    return [base for place, base in enumerate(recorded) if base not in recorded[:place]] or request_of(
        run
    ).bases


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
    """Raises Conflict when the weight files of the pool's base are not those that the run's versions are made
    for.
    """
    digests = [base["model_sha256"] for base in bases_of(ctx, run) if base.get("model_sha256")]
    for base in base_in(pool):
        if digests and base["model_sha256"] not in digests:
            raise Conflict(
                f"the weights of {pool.setup.model} are not those that the versions of {run.name} were made "
                "on",
                hint=f"Put the model back; `lorad verify {run.name}` says more.",
            )
