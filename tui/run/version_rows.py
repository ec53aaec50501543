"""Versions of a run as rows: the tree that they make with its origin and the runs that were
forked from it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from lorad.client.shapes import Run, Version
from lorad.text import age, coarse_age, one_line, size
from lorad.tui.run import version_tree
from lorad.tui.widgets.columns import Column

Cells = dict[str, Text]
LIMIT = 5000  # versions that are shown, the newest, and those that are held

COLUMNS = (
    Column("version", 8, 44, 0),
    Column("step", 4, 9, 2, right=True),
    Column("state", 9, 34, 0),
    Column("served as", 9, 28, 4),
    Column("attested", 8, 14, 3),
    Column("rank/alpha", 10, 12, 8),
    Column("size", 7, 10, 6, right=True),
    Column("sha256", 12, 12, 7),
    Column("age", 4, 5, 5, right=True),
)
ORIGIN, FORK = "origin", "fork "  # keys of rows that are no versions; a version's is its number
_ATTESTED = {"passed": ("✔", "green"), "inconclusive": ("≈", "yellow"), "failed": ("✖", "bold red")}


class History(NamedTuple):
    """versions: oldest first, of `left_out` more than these. current: a number. origin: what the run came
    from, or "".
    forks: runs, and the number that each was forked from."""

    versions: Sequence[Version]
    left_out: int
    current: int | None
    origin: str
    forks: Mapping[str, int]


def history(versions: Sequence[Version], run: Run, forks: Mapping[str, int]) -> History:
    found = sorted(versions, key=lambda version: version.version)
    held = {one.version for one in found if one.pinned or one.aliases or one.loaded}
    kept = [one for n, one in enumerate(found) if n >= len(found) - LIMIT or one.version in held]
    return History(kept, len(found) - len(kept), run.version, run.origin or "", forks)


def forks(runs: Sequence[Run], run: str) -> dict[str, int]:
    """Return the runs that were forked from `run`, with the version each came from; oldest first."""
    found = dict[str, int]()
    for one in reversed(runs):
        name, _, number = (one.origin or "").rpartition("@")
        if name == run and number.isdecimal():
            found[one.name] = int(number)
    return found


def layout(known: History) -> list[version_tree.Row]:
    """Newest first; see `tree.drawn`."""
    parents: dict[str, str | None] = {ORIGIN: None} if known.origin else {}
    for one in known.versions:
        number, parent = one.version, one.parent
        before = str(parent) if isinstance(parent, int) and parent < number else None
        parents[str(number)] = ORIGIN if before is None and known.origin else before
    parents |= {
        f"{FORK}{name}": str(number) for name, number in known.forks.items() if str(number) in parents
    }
    leaves = {key for key in parents if key.startswith(FORK)}
    tip = None if known.current is None else str(known.current)
    return version_tree.drawn(parents, tip, leaves)


class Painter:
    """Makes cells, and again only of what changed: there are thousands."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Any, Cells]] = {}

    def rows(self, known: History) -> dict[str, Cells]:
        """Return the rows by key, newest first."""
        laid = layout(known)
        versions = {str(one.version): one for one in known.versions}
        counts = {row.key for row in laid if not row.rails}  # what came to be what the run is now
        made = {row.key: self._row(row, versions.get(row.key), known, row.key in counts) for row in laid}
        self._made = made
        return {key: cells for key, (_, cells) in made.items()}

    def _row(
        self, row: version_tree.Row, version: Version | None, known: History, counts: bool
    ) -> tuple[Any, Cells]:
        is_current = version is not None and version.version == known.current
        facts = (
            row,
            version,
            is_current,
            counts,
            known.origin,
            coarse_age(version.created_at if version else None),
        )
        before = self._made.get(row.key)
        if before is not None and before[0] == facts:
            return before
        if version is None:
            return facts, _stranger(row, known)
        return facts, _cells(version, row.rails, is_current=is_current, counts=counts)


def _stranger(row: version_tree.Row, known: History) -> Cells:
    """Return the row of a node that is not a version of this run."""
    empty = {column.key: Text() for column in COLUMNS}
    if row.key == ORIGIN:
        return {**empty, "version": Text(f"{row.rails}◇ {one_line(known.origin)}"), "state": Text("origin")}
    name = Text.assemble((row.rails, "dim"), "→ ", one_line(row.key.removeprefix(FORK)))
    return {**empty, "version": name, "state": Text("forked run")}


def _cells(version: Version, rails: str, *, is_current: bool, counts: bool) -> Cells:
    sign, style = ("◉", "bold green") if is_current else ("●", "") if counts else ("○", "dim")
    plain = {
        "step": str(version.step),
        "served as": one_line(", ".join(version.aliases)),
        "rank/alpha": f"{version.rank}/{version.alpha:g}",
        "size": size(version.bytes),
        "sha256": one_line(version.sha256)[:12],
        "age": coarse_age(version.created_at),
    }
    row = {key: Text(value, no_wrap=True, overflow="ellipsis") for key, value in plain.items()}
    name = Text.assemble(
        (rails, "dim"), (f"{sign} @{version.version}", style), no_wrap=True, overflow="ellipsis"
    )
    return {**row, "version": name, "state": _state(version, is_current), "attested": _attested(version)}


def _state(version: Version, is_current: bool) -> Text:
    """Signs and words."""
    parts = [
        ("◉ current", "bold green") if is_current else ("", ""),
        ("⚑ pinned", "yellow") if version.pinned else ("", ""),
        ("▲ loaded", "cyan") if version.loaded else ("", ""),
        ("∅ no files", "dim") if version.path is None else ("", ""),
    ]
    return Text(" ", no_wrap=True, overflow="ellipsis").join([Text(*part) for part in parts if part[0]])


def _attested(version: Version) -> Text:
    word = str(version.attested or "not yet")
    sign, style = _ATTESTED.get(word, ("◌", "dim"))
    return Text(f"{sign} {one_line(word)}", style=style, no_wrap=True, overflow="ellipsis")


def facts(version: Version) -> Text:
    """All that a row has no room for."""
    parent, attestation = version.parent, version.attestation[:400]
    return Text.assemble(
        (f"{one_line(version.run)}@{version.version} ", "bold"),
        f"step {version.step} · {'from @' + str(parent) if parent is not None else 'the first'} · ",
        one_line(f"{age(version.created_at)} ago · {size(version.bytes)} · {attestation}"),
        f"\nsha256 {one_line(version.sha256)}\n",
        one_line(str(version.path or "Its files are deleted.")),
    )
