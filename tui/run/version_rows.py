"""Versions of a run as rows: the tree that they make with its origin and the runs that were
forked from it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from lorad.records.runs import Run
from lorad.records.versions import Version
from lorad.text import age, coarse_age, one_line, size
from lorad.tui.widgets.columns import Column

DEEPEST = 12  # levels; what forks further in is drawn as deep as this
_RAIL, _JOINT = "│ ", "├─"
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


class _Row(NamedTuple):
    """rails: what stands before the sign of the node, two cells a level."""

    key: str
    rails: str


def drawn(
    parents: Mapping[str, str | None], tip: str | None = None, leaves: Collection[str] = ()
) -> list[_Row]:
    """Lay out the tree so that every node appears once.

    parents: by node, oldest first, each parent before its children; a parent that is not there counts as
        none.
    tip: its ancestors are the trunk, without rails; elsewhere a line continues with what grew last.
    leaves: no line continues with one of them if it can continue with something else.

    A branch stands right above the node that it grew from, its first node beside a joint.
    """
    heirs, others, roots = _lines(parents, tip, leaves)
    inherits = set(heirs.values())
    # (node, level, whether its line is yet to be laid)
    rows, todo = list[_Row](), [(root, 0, True) for root in roots]
    while todo:
        node, level, is_whole = todo.pop()
        if not is_whole:
            rows.append(_Row(node, _rails(level, node not in inherits)))
            continue
        for one in _line(node, heirs):  # the last to be put there is taken first
            todo.append((one, level, False))
            todo += [(branch, level + 1, True) for branch in others.get(one, ())]
    return rows


def _line(node: str, heirs: Mapping[str, str]) -> list[str]:
    """Return the nodes of a line from its first node on."""
    line = [node]
    while (heir := heirs.get(line[-1])) is not None:
        line.append(heir)
    return line


def _rails(level: int, is_first: bool) -> str:
    if not level:
        return ""
    level = min(level, DEEPEST)
    return _RAIL * (level - 1) + (_JOINT if is_first else _RAIL)


def _lines(
    parents: Mapping[str, str | None], tip: str | None, leaves: Collection[str]
) -> tuple[dict[str, str], dict[str, list[str]], Sequence[str]]:
    """Return who continues the line of each node, who else grew from it, and the roots; oldest first."""
    children, newest, roots = dict[str, list[str]](), {key: n for n, key in enumerate(parents)}, list[str]()
    for key, parent in parents.items():
        (children.setdefault(parent, []) if parent is not None and parent in parents else roots).append(key)
    for key in reversed(list(parents)):
        if (parent := parents[key]) is not None and parent in newest:
            newest[parent] = max(newest[parent], newest[key])
    trunk = set(_ancestors(parents, tip))
    heirs = {
        key: max(grown, key=lambda one: (one in trunk, one not in leaves, newest[one]))
        for key, grown in children.items()
        if key != tip
    }
    others = {key: [one for one in grown if one != heirs.get(key)] for key, grown in children.items()}
    return heirs, others, roots


def _ancestors(parents: Mapping[str, str | None], node: str | None) -> Iterator[str]:
    """Yield the node and its ancestors."""
    while node is not None and node in parents:
        yield node
        node = parents[node]


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


def layout(known: History) -> list[_Row]:
    """Newest first; see `drawn`."""
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
    return drawn(parents, tip, leaves)


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

    def _row(self, row: _Row, version: Version | None, known: History, counts: bool) -> tuple[Any, Cells]:
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


def _stranger(row: _Row, known: History) -> Cells:
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
