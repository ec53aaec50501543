"""The check of `lorad doctor` for processes that outlived their run or pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from lorad.box.paths import Home
from lorad.cli.doctor.database import told
from lorad.client.box_shapes import Orphan
from lorad.client.client import Client
from lorad.errors import DaemonUnreachable, LoradError

SHOWN = 8
HINT = (
    "Nothing needs them: `kill PID` ends one, `lorad daemon stop` and `lorad doctor --repair` all; runs "
    "continue meanwhile, and the memory and devices that orphans hold become free."
)


def orphan_checks(home: Home) -> Iterator[tuple[str, bool, str, str, dict[str, Any]]]:
    """Yield name, ok, detail, hint and facts of the check for orphans.

    Without a daemon the search runs here. It yields nothing for a user who may not see them (a shared daemon
    shows them to its admins only).
    """
    try:
        found = Client(home).orphans()
    except DaemonUnreachable:
        found = msgspec.convert(told(home, "--orphans")["orphans"], list[Orphan])
    except LoradError:
        return
    shown = [orphan_in_words(orphan) for orphan in found[:SHOWN]]
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    detail = "none" if not found else "outlived their run or pool: " + "; ".join([*shown, *more])
    yield "orphans", not found, detail, HINT, {"orphans": msgspec.to_builtins(found)}


def ended_orphans(home: Home) -> list[Orphan]:
    """End all of a home that has no daemon: those that were."""
    return msgspec.convert(told(home, "--end-orphans")["orphans"], list[Orphan])


def orphan_in_words(orphan: Orphan) -> str:
    return f"pid {orphan.pid} of {orphan.user}: {orphan.command}"
