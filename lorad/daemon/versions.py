"""Which version somebody means."""

from __future__ import annotations

import re

from lorad.daemon.context import Context
from lorad.errors import NotFound, SpecError
from lorad.store import runs
from lorad.store.db import Row
from lorad.store.versions import get_version


def find_version(ctx: Context, name: str) -> Row:
    """`run@number`, or a run's name for its current version. Raises NotFound, SpecError."""
    run, at, number = name.partition("@")
    if not at:
        current = runs.get(ctx.store, run)["version"]
        if current is None:
            raise NotFound(f"run {run} has no version yet", hint=f"`lorad logs {run}` tells how far it is.")
        return get_version(ctx.store, run, current)
    if not re.fullmatch(r"[0-9]{1,9}", number):
        raise SpecError(f"{name} is not a version", hint="A version is written run@number, as in sorter@12.")
    return get_version(ctx.store, run, int(number))
