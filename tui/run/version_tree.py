"""A history with its branches as rows of text, newest first, drawn compactly: as long as nothing forks, no
row is further in than the one before."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

DEEPEST = 12  # levels; what forks further in is drawn as deep as this
_RAIL, _JOINT = "│ ", "├─"


class Row(NamedTuple):
    """rails: what stands before the sign of the node, two cells a level."""

    key: str
    rails: str


def drawn(
    parents: Mapping[str, str | None], tip: str | None = None, leaves: Collection[str] = ()
) -> list[Row]:
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
    rows, todo = list[Row](), [(root, 0, True) for root in roots]
    while todo:
        node, level, is_whole = todo.pop()
        if not is_whole:
            rows.append(Row(node, _rails(level, node not in inherits)))
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
