"""The check of `lorad doctor` for processes that outlived their run or pool."""

from collections.abc import Iterator

import msgspec

from lorad.box.paths import Home
from lorad.children.interpreter import Finding
from lorad.cli.doctor.database import without_daemon
from lorad.client.box_shapes import Orphan
from lorad.client.client import Client
from lorad.errors import DaemonUnreachable, LoradError

_SHOWN = 8
_HINT = (
    "Nothing needs them: `kill PID` ends one, `lorad daemon stop` and `lorad doctor --repair` all; runs "
    "continue meanwhile, and the memory and devices that orphans hold become free."
)


class _Orphans(msgspec.Struct):
    """What the daemon's code prints about orphans."""

    orphans: list[Orphan]


def orphan_checks(home: Home) -> Iterator[Finding]:
    """Check for orphans. Without a daemon the search runs here.

    It yields nothing for a user who may not see them (a shared daemon shows them to its admins only).
    """
    try:
        found = Client(home).orphans()
    except DaemonUnreachable:
        found = without_daemon(home, "--orphans", _Orphans).orphans
    except LoradError:
        return
    shown = [orphan_in_words(orphan) for orphan in found[:_SHOWN]]
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    detail = "none" if not found else "outlived their run or pool: " + "; ".join([*shown, *more])
    yield Finding("orphans", not found, detail, _HINT, {"orphans": msgspec.to_builtins(found)})


def end_orphans(home: Home) -> list[Orphan]:
    """End all orphans of a home that has no daemon, and return them."""
    return without_daemon(home, "--end-orphans", _Orphans).orphans


def orphan_in_words(orphan: Orphan) -> str:
    return f"pid {orphan.pid} of {orphan.user}: {orphan.command}"
