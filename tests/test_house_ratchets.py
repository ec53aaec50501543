"""Ratchets of the house: what there is too much of may only become less, room by room."""

import json
from pathlib import Path

import pytest

from tests import house_figures
from tests.house_figures import FIGURES, complaints, kept, lowered, main, today

PLANTED = {  # a file with one violation, and one that looks alike and has none
    "functions": ("def sort(): ...\n", "sort = sorted\n"),
    "once_called_helpers": (
        "def _rest(x):\n    return x - 1\n\nprint(_rest(2))\n",
        "def _rest(x):\n    return x - 1\n\nprint(_rest(2), _rest(3), map(_rest, []))\n",
    ),
    "tuple_assignments": ("first, last = 1, 9\n", "low, high = high, low\nname, age = row\n"),
    "conditional_statements": ("(add if x else drop)(y)\n", "z = add(y) if x else drop(y)\n"),
    "pronoun_locals": (
        "def find(rows, those): return rows\n",
        "class Row:\n    found: int\n\nsum(one for one in rows if one)\n",
    ),
    "small_docstrings": ('"""the rows of a run."""\n', '"""The rows of a run."""\n'),
    "fragments": ('"""Of a run: its rows."""\n', '"""Office hours."""\n'),
    "riddles": (
        '"""Rows.\n\nseconds: that they took.\n"""\n',
        '"""Rows.\n\nseconds: the time that they took.\n"""\n',
    ),
    "crowded_fields": (
        '"""Rows.\n\nage: seconds. size: bytes.\n"""\n',
        '"""Rows.\n\nage: seconds; None: not known.\nsize: bytes.\n"""\n',
    ),
    "unshared_names": ("ROWS = 3\n", "_ROWS = 3\n"),
}


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a house of two empty files, whose numbers are in no file yet."""
    files = (tmp_path / "lorad/rl/planted.py", tmp_path / "lorad/pool/other.py")
    for path in (*files, tmp_path / "pyproject.toml"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n")
    monkeypatch.setattr(house_figures, "ROOT", tmp_path)
    monkeypatch.setattr(house_figures, "FILE", tmp_path / "house.json")
    monkeypatch.setattr(house_figures, "own_code", lambda: files)
    monkeypatch.setattr("sys.argv", ["house_figures"])
    return tmp_path


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_of_the_house_only_falls(figure: str) -> None:
    assert complaints(figure, today(figure), kept()[figure]) == []


@pytest.mark.parametrize("figure", PLANTED)
def test_a_planted_violation_is_counted(house: Path, figure: str) -> None:
    violation, _ = PLANTED[figure]
    (house / "lorad/rl/planted.py").write_text(violation)
    (sentence,) = complaints(figure, today(figure), {})
    amount = 1000 if figure == "functions" else 1
    assert sentence.startswith(f"{figure} of lorad/rl rose to {amount}, at most")


@pytest.mark.parametrize("figure", PLANTED)
def test_what_looks_like_a_violation_is_none(house: Path, figure: str) -> None:
    _, innocent = PLANTED[figure]
    (house / "lorad/rl/planted.py").write_text(innocent)
    assert complaints(figure, today(figure), {}) == []


def test_classes_of_two_files_share_a_name(house: Path) -> None:
    (house / "lorad/rl/planted.py").write_text("class Row: ...\nclass _Own: ...\n")
    (house / "lorad/pool/other.py").write_text("class Row: ...\n")
    assert today("shared_class_names") == {"all": 1}


def test_a_fallen_figure_asks_to_be_lowered() -> None:
    (sentence,) = complaints("riddles", {"cli": 2}, {"cli": 3})
    assert sentence == (
        "riddles of cli fell to 2, and the file still allows 3: `python -m tests.house_figures` lowers it"
    )
    assert complaints("functions", {"cli": 60}, {"cli": 61}) == []
    assert len(complaints("functions", {"cli": 60}, {"cli": 62})) == 1


def test_a_rewrite_lowers_and_never_raises() -> None:
    now = {"riddles": {"cli": 1, "tui": 5, "new": 2}, "fragments": {"cli": 4}}
    before = {"riddles": {"cli": 3, "tui": 4, "gone": 7}}
    assert lowered(now, before) == {"riddles": {"cli": 1, "tui": 4}, "fragments": {"cli": 4}}


def test_the_command_names_what_has_risen(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (house / "house.json").write_text('{"tuple_assignments": {}}')
    (house / "lorad/rl/planted.py").write_text("first, last = 1, 9\n")
    assert main() == 1
    assert "tuple_assignments of lorad/rl rose to 1, at most 0" in capsys.readouterr().err
    assert json.loads((house / "house.json").read_text())["tuple_assignments"] == {}
