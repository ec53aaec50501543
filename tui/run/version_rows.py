"""Versions of a run as rows: the tree that they make with its origin and the runs forked from it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.text import Text

from lorad.records.runs import Run
from lorad.records.versions import Version
from lorad.text import age, coarse_age, one_line, size
from lorad.tui.widgets.columns import Cells, TableColumn

DEEPEST = 12  # levels; what forks further in is drawn as deep as this
_RAIL = "│ "
_JOINT = "├─"
LIMIT = 5000  # versions that are shown, the newest, and those that are held
COLUMNS = (
    TableColumn("version", 8, 44, 0),
    TableColumn("step", 4, 9, 2, right=True),
    TableColumn("state", 9, 34, 0),
    TableColumn("served as", 9, 28, 4),
    TableColumn("attested", 8, 14, 3),
    TableColumn("rank/alpha", 10, 12, 8),
    TableColumn("size", 7, 10, 6, right=True),
    TableColumn("sha256", 12, 12, 7),
    TableColumn("age", 4, 5, 5, right=True),
)
ORIGIN = "origin"  # keys of rows that are no versions; a version's is its number
FORK = "fork "
_ATTESTED = {"passed": ("✔", "green"), "inconclusive": ("≈", "yellow"), "failed": ("✖", "bold red")}


class _Row(NamedTuple):
    """The row of a node. rails: what stands before its sign, two cells a level."""

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
    children = dict[str, list[str]]()
    newest = {key: n for n, key in enumerate(parents)}
    roots = list[str]()
    for key, parent in parents.items():
        (children.setdefault(parent, []) if parent is not None and parent in parents else roots).append(key)
    for key in reversed(list(parents)):
        if (parent := parents[key]) is not None and parent in newest:
            newest[parent] = max(newest[parent], newest[key])
    trunk = set[str]()
    above = tip
    while above is not None and above in parents:
        trunk.add(above)
        above = parents[above]
    heirs = {  # who continues the line of each node
        key: max(grown, key=lambda child: (child in trunk, child not in leaves, newest[child]))
        for key, grown in children.items()
        if key != tip
    }
    others = {key: [child for child in grown if child != heirs.get(key)] for key, grown in children.items()}
    inherits = set(heirs.values())
    # (node, level, whether its line is yet to be laid)
    rows = list[_Row]()
    todo = [(root, 0, True) for root in roots]
    while todo:
        node, level, is_whole = todo.pop()
        if not is_whole:
            last = _RAIL if node in inherits else _JOINT
            rows.append(_Row(node, _RAIL * (min(level, DEEPEST) - 1) + last if level else ""))
            continue
        member: str | None = node
        while member is not None:  # along the line; the last to be put there is taken first
            todo.append((member, level, False))
            todo += [(branch, level + 1, True) for branch in others.get(member, ())]
            member = heirs.get(member)
    return rows


class History(NamedTuple):
    """The versions of a run, and what they came from and led to.

    Attributes:
        versions: The versions that are shown, oldest first; `left_out` more are not.
        origin: What the run came from, or "".
        forks: The runs that were forked, and the number of the version that each was forked from.
    """

    versions: Sequence[Version]
    left_out: int
    current: int | None
    origin: str
    forks: Mapping[str, int]


def history(versions: Sequence[Version], run: Run, forks: Mapping[str, int]) -> History:
    ordered = sorted(versions, key=lambda version: version.version)
    old = ordered[: max(len(ordered) - LIMIT, 0)]
    shown = [version for version in old if version.pinned or version.aliases or version.loaded]
    shown += ordered[len(old) :]
    return History(shown, len(ordered) - len(shown), run.version, run.origin or "", forks)


def forks(runs: Sequence[Run], run: str) -> dict[str, int]:
    """Return the runs that were forked from `run`, with the version each came from; oldest first."""
    numbers = dict[str, int]()
    for fork in reversed(runs):
        name, _, number = (fork.origin or "").rpartition("@")
        if name == run and number.isdecimal():
            numbers[fork.name] = int(number)
    return numbers


def layout(history: History) -> list[_Row]:
    """Lay out the tree of a run's versions, newest first; see `drawn`."""
    parents: dict[str, str | None] = {ORIGIN: None} if history.origin else {}
    for version in history.versions:
        number = version.version
        parent = version.parent
        before = str(parent) if isinstance(parent, int) and parent < number else None
        parents[str(number)] = ORIGIN if before is None and history.origin else before
    leaves = {f"{FORK}{name}": str(n) for name, n in history.forks.items() if str(n) in parents}
    tip = None if history.current is None else str(history.current)
    return drawn(parents | leaves, tip, leaves)


@dataclass(eq=False)
class Painter:
    """Makes cells, and again only of what changed: there are thousands."""

    _last_made: dict[str, tuple[Any, Cells]] = field(default_factory=dict)

    def rows(self, history: History) -> dict[str, Cells]:
        """Return the rows by key, newest first."""
        laid = layout(history)
        versions = {str(version.version): version for version in history.versions}
        counting = {row.key for row in laid if not row.rails}  # what came to be what the run is now
        rows = dict[str, tuple[Any, Cells]]()
        for row in laid:
            version = versions.get(row.key)
            is_current = version is not None and version.version == history.current
            counts = row.key in counting
            since = coarse_age(version.created_at if version else None)
            facts = (row, version, is_current, counts, history.origin, since)
            before = self._last_made.get(row.key)
            if before is not None and before[0] == facts:
                rows[row.key] = before
            elif version is not None:
                rows[row.key] = facts, _cells(version, row.rails, is_current=is_current, counts=counts)
            else:
                name = Text(f"{row.rails}◇ {one_line(history.origin)}")
                if row.key != ORIGIN:
                    name = Text.assemble((row.rails, "dim"), "→ ", one_line(row.key.removeprefix(FORK)))
                state = Text("origin" if row.key == ORIGIN else "forked run")
                blank = {column.key: Text() for column in COLUMNS}
                rows[row.key] = facts, blank | {"version": name, "state": state}
        self._last_made = rows
        return {key: cells for key, (_, cells) in rows.items()}


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
    row = {key: Text(value) for key, value in plain.items()}
    name = Text.assemble((rails, "dim"), (f"{sign} @{version.version}", style))
    states = {
        ("◉ current", "bold green"): is_current,
        ("⚑ pinned", "yellow"): version.pinned,
        ("▲ loaded", "cyan"): version.loaded,
        ("∅ no files", "dim"): version.path is None,
    }
    state = Text(" ").join(Text(*look) for look, holds in states.items() if holds)
    word = str(version.attested or "not yet")
    sign, style = _ATTESTED.get(word, ("◌", "dim"))
    return {**row, "version": name, "state": state, "attested": Text(f"{sign} {one_line(word)}", style)}


def facts(version: Version) -> Text:
    """Describe a version with all that its row has no room for."""
    parent = version.parent
    attestation = version.attestation[:400]
    return Text.assemble(
        (f"{one_line(version.run)}@{version.version} ", "bold"),
        f"step {version.step} · {'from @' + str(parent) if parent is not None else 'the first'} · ",
        one_line(f"{age(version.created_at)} ago · {size(version.bytes)} · {attestation}"),
        f"\nsha256 {one_line(version.sha256)}\n",
        one_line(str(version.path or "Its files are deleted.")),
    )
