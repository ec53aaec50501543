"""Rules of the house that read the trees of all files, and its ratchets: what there is too much of may only
become less, room by room.
"""

import ast
import importlib.metadata
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import house_figures
from tests.house_figures import (
    FIGURES,
    PRIVATE,
    ROOT,
    body_lines,
    complaints,
    kept,
    lowered,
    main,
    nodes_of,
    own_code,
    today,
)

LONGEST_FUNCTION = 60  # lines

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


def long_functions(path: Path) -> Iterator[str]:
    """Yield every function whose body, signature and docstring left out, is over the limit."""
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > LONGEST_FUNCTION:
            yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {body_lines(node)} lines"


def test_no_function_is_longer_than_a_screen() -> None:
    assert [place for path in own_code() for place in long_functions(path)] == []


def private_names_taken(path: Path) -> Iterator[str]:
    """Yield the private names of other modules of lorad that a file imports or reads."""
    nodes = nodes_of(path)
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    taken = [
        (node, alias) for node in imports for alias in node.names if (node.module or "").startswith("lorad")
    ]
    modules = set()
    for statement, alias in taken:
        place = ROOT / (statement.module or "").replace(".", "/") / alias.name
        if place.is_dir() or place.with_suffix(".py").exists():
            modules.add(alias.asname or alias.name)
        if PRIVATE.match(alias.name):
            yield f"{path.relative_to(ROOT)}:{statement.lineno} {alias.name}"
    for node in nodes:
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node.value) in modules
            and PRIVATE.match(node.attr)
        ):
            yield f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"


def test_no_module_uses_a_private_name_of_another() -> None:
    assert [found for path in own_code() for found in private_names_taken(path)] == []


SQL = re.compile(
    r"\b(?:SELECT\s.+\sFROM|INSERT\s+(?:OR\s+\w+\s+)?INTO|UPDATE\s+\w+\s+SET|DELETE\s+FROM|PRAGMA\s)",
    re.DOTALL,
)


def text_of(node: ast.AST) -> str:
    """The text that a literal makes, with a letter for what is put into it; empty for what is no text."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "x" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def sql_in(path: Path) -> Iterator[str]:
    """Every text of a file that is a statement of SQL."""
    for node in nodes_of(path):
        if isinstance(node, ast.JoinedStr | ast.Constant) and SQL.search(text_of(node)):
            yield f"{path.relative_to(ROOT)}:{node.lineno}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            if any(name.partition(".")[0] in ("sqlite3", "sqlite_utils") for name in names):
                yield f"{path.relative_to(ROOT)}:{node.lineno} imports {', '.join(names)}"


def test_only_the_store_speaks_sql() -> None:
    rooms = (ROOT / "lorad" / "store", ROOT / "migrations")
    others = [path for path in own_code() if not any(room in path.parents for room in rooms)]
    assert [found for path in others for found in sql_in(path)] == []


def imported_packages() -> set[str]:
    """The top-level names of all that lorad imports and neither Python nor lorad has."""
    nodes = [node for path in own_code() for node in nodes_of(path)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"lorad"}


def test_every_imported_package_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {re.split(r"[^A-Za-z0-9_-]", line)[0].lower() for lines in groups for line in lines}
    elsewhere = {"megatron": ["megatron-core"]}  # in an environment of its own
    owners = elsewhere | dict(importlib.metadata.packages_distributions())
    undeclared = {
        name
        for name in imported_packages()
        if declared.isdisjoint(d.lower().replace("_", "-") for d in owners.get(name, [name]))
    }
    assert undeclared == set()
