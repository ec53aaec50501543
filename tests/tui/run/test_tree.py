"""The tree of versions, and what differs between two texts."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorad.records.runs import Run
from lorad.records.versions import Version
from lorad.tui import text_diff
from lorad.tui.run.version_rows import DEEPEST, LIMIT, drawn, forks, history, layout
from tests.kit.tui_samples import a_version
from tests.kit.tui_world import shaped

Parents = dict[str, str | None]


def chain(*numbers: int) -> Parents:
    """Each grew from the one before."""
    return {str(number): str(before) for before, number in pairwise(numbers)}


def lines(parents: Parents, tip: str | None = None, leaves: tuple[str, ...] = ()) -> list[str]:
    return [row.rails + row.key for row in drawn(parents, tip, leaves)]


def test_history_without_forks_is_not_indented() -> None:
    rows = drawn({"0": None} | chain(*range(5000)), "4999")
    assert [row.key for row in rows] == [str(number) for number in reversed(range(5000))]
    assert not any(row.rails for row in rows)


def test_branch_stands_above_its_origin() -> None:
    parents: Parents = {"0": None} | chain(0, 1, 2, 3) | chain(1, 4, 5)
    assert lines(parents, "5") == ["5", "4", "│ 3", "├─2", "1", "0"]
    assert lines(parents, "3") == ["3", "2", "│ 5", "├─4", "1", "0"]


def test_branches_of_branches_are_further_in() -> None:
    parents: Parents = {"0": None} | chain(0, 1, 2, 3) | chain(2, 4) | chain(0, 5)
    assert lines(parents, "5") == ["5", "│ 4", "│ ├─3", "│ 2", "├─1", "0"]


def test_leaf_never_continues_a_branching_line() -> None:
    parents: Parents = {"0": None} | chain(0, 1) | {"fork": "0", "late": "1"}
    assert lines(parents, "1", ("fork", "late")) == ["├─late", "1", "├─fork", "0"]
    assert lines({"0": None, "1": "0", "fork": "0"}, None, ("fork",)) == ["1", "├─fork", "0"]


def test_node_with_a_missing_parent_is_a_root() -> None:
    assert lines({"7": "6", "8": "7", "9": None}) == ["9", "8", "7"]


def test_any_depth_is_drawn_with_bounded_indent() -> None:
    parents: Parents = {"0": None}
    for number in range(1, 3000, 2):  # each grew from the branch before
        parents |= {str(number): str(max(number - 2, 0)), str(number + 1): str(max(number - 2, 0))}
    rows = drawn(dict.fromkeys(parents) | parents, None)
    assert len(rows) == len(parents) and max(len(row.rails) for row in rows) <= 2 * DEEPEST


def test_version_with_impossible_parent_is_a_root() -> None:
    parents = {0: 0, 1: 2, 2: 1}
    versions = [shaped(Version, a_version(number, parent=parent)) for number, parent in parents.items()]
    rows = layout(history(versions, Run("a", "running", version=2), {}))
    assert [row.key for row in rows] == ["2", "1", "0"]


def test_newest_and_held_versions_are_always_shown() -> None:
    versions = [shaped(Version, a_version(number, pinned=number == 3)) for number in range(LIMIT + 10)]
    known = history(versions, Run("a", "running", version=LIMIT + 9), {})
    assert known.left_out == 9 and known.versions[0].version == 3 and len(layout(known)) == LIMIT + 1


def test_forks_are_found_by_their_origin() -> None:
    origins = {"c": "a@7", "b": "/data/a@1x", "d": None, "e": "b@1"}
    runs = [Run(name, "running", origin=origin) for name, origin in origins.items()]
    assert forks(runs, "a") == {"c": 7}


WORDS = st.lists(st.sampled_from(["a", "b", "ha", " ", "\n", "漢"]), max_size=30).map("".join)


@given(WORDS, WORDS)
def test_difference_contains_both_texts(before: str, after: str) -> None:
    pieces = text_diff.words(before, after)
    assert "".join(piece.text for piece in pieces if piece.op != text_diff.NEW) == before
    assert "".join(piece.text for piece in pieces if piece.op != text_diff.GONE) == after


def test_unchanged_words_are_not_marked() -> None:
    told = "".join(op + text for op, text in text_diff.words("the quick brown fox", "the slow brown fox"))
    assert told == "=the -quick+slow= brown fox"


@pytest.mark.parametrize("other", ["x ", "ha x "])
def test_long_unlike_texts_count_as_replaced(other: str) -> None:
    before, after = "ha " * 50_000, other * 40_000 + "!"
    pieces = text_diff.words(before, after)
    assert len(pieces) <= 4 and sum(len(piece.text) for piece in pieces if piece.op != text_diff.NEW) == len(
        before
    )
