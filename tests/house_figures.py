"""Count by room what the house has too much of: chopped functions, pronouns, riddles and the like.

    python -m tests.house_figures                 lowers tests/data/house.json to what the code has today
    python -m tests.house_figures FIGURE [ROOM]   shows the places that a figure counts

A room is a folder of `lorad/`, `cli`, `tui`, `migrations`, or `lorad` for the modules beside the folders. A
figure only falls: the command leaves one that has risen as it is, and exits with 1. A room that is not in the
file has none; where code moves to another room, its share of the figure is moved in the file by hand. A
figure that is not in the file at all begins with what the code has today.
"""

import argparse
import ast
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "data" / "house.json"
WHOLE = "all"  # stands for a room where a figure is of the whole tree
DENSITY = 48  # functions per 1,000 lines that every room may have
SLACK = {"functions": 1}  # how far a figure may be below its number; 0 for the others
SHORT = 5  # lines in the body of a helper that reads better where it is called
PRONOUNS = {
    *("found", "told", "there", "one", "those", "given"),
    *("made", "held", "wanted", "known", "some", "here"),
}
RIDDLE = re.compile(r"[\w`)]: (?:of|that|those)\b", re.IGNORECASE)
FRAGMENT = re.compile(r"(Of|Those|That|As|By|With|To|It|And|But|From|For)\b")  # how half a sentence begins
# a field of a docstring that begins in the line of another
CROWDED = re.compile(r"^\w+(?:, \w+)*: .*[.;] (?!none:)([a-z]\w*(?:, \w+)*):", re.MULTILINE)
PRIVATE = re.compile(r"_(?!_)")
EVERYWHERE = {"main", "app", "log"}  # public names that every module may have

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Place = tuple[int, str]  # a line and what stands there
_Numbers = Mapping[str, Mapping[str, int]]  # by figure and room


@cache
def own_code() -> tuple[Path, ...]:
    """List every file of the package once."""
    linked = [path for room in ("cli", "tui", "migrations") for path in (ROOT / room).rglob("*.py")]
    inside = (ROOT / "lorad").rglob("*.py")
    own = [path for path in inside if not any(parent.is_symlink() for parent in path.parents)]
    return tuple(sorted(linked + own))


def room_of(path: Path) -> str:
    """Return the room that a file stands in."""
    parts = path.relative_to(ROOT).parts
    return f"lorad/{parts[1]}" if parts[0] == "lorad" and len(parts) > 2 else parts[0]


@cache
def tree_of(path: Path) -> ast.Module:
    """Parse a file once."""
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """List all nodes of a file's tree."""
    return tuple(ast.walk(tree_of(path)))


def body_lines(function: _Function) -> int:
    """Count the lines of a function's body without its docstring."""
    first = function.body[1] if ast.get_docstring(function) and len(function.body) > 1 else function.body[0]
    return (function.end_lineno or 0) - first.lineno + 1


# -- what a figure counts in a file --------------------------------------------------------------------------
def functions(path: Path) -> Iterator[_Place]:
    """Yield every function and method."""
    for node in nodes_of(path):
        if isinstance(node, _Function):
            yield node.lineno, node.name


def once_called_helpers(path: Path) -> Iterator[_Place]:
    """Yield the short private functions and methods that their own file calls once and names nowhere else."""
    nodes = nodes_of(path)
    named = Counter(_name_of(node) for node in nodes)
    called = {_name_of(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if not isinstance(node, _Function) or not PRIVATE.match(node.name) or node.decorator_list:
            continue
        if node.name.endswith("_"):  # a hook that others call, such as `_repr_html_`
            continue
        if named[node.name] == 1 and node.name in called and body_lines(node) <= SHORT:
            yield node.lineno, node.name


def _name_of(node: ast.AST) -> str:
    """Return the last part of a dotted name; "" for other nodes."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def tuple_assignments(path: Path) -> Iterator[_Place]:
    """Yield `a, b = x, y`, but no swaps: there the same values stand on both sides."""
    for node in nodes_of(path):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        values = sorted(map(ast.unparse, node.value.elts))
        several = [target.elts for target in node.targets if isinstance(target, ast.Tuple | ast.List)]
        if any(len(names) > 1 and sorted(map(ast.unparse, names)) != values for names in several):
            yield node.lineno, ast.unparse(node)


def conditional_statements(path: Path) -> Iterator[_Place]:
    """Yield `x() if c else y()` and `(x if c else y)()` where nobody takes the value."""
    for node in nodes_of(path):
        if isinstance(node, ast.Expr):
            value = node.value.value if isinstance(node.value, ast.Await) else node.value
            value = value.func if isinstance(value, ast.Call) else value
            if isinstance(value, ast.IfExp):
                yield node.lineno, ast.unparse(node)


def pronoun_locals(path: Path) -> Iterator[_Place]:
    """Yield where a pronoun becomes the name of a parameter or a local variable outside of comprehensions."""
    nodes, excepted = nodes_of(path), set[ast.AST]()  # fields, constants, and what a comprehension binds
    for node in nodes:
        if isinstance(node, ast.comprehension):
            excepted |= set(ast.walk(node.target))
        if isinstance(node, ast.Module | ast.ClassDef):
            assignments = [part for part in node.body if isinstance(part, ast.Assign | ast.AnnAssign)]
            excepted |= {name for part in assignments for name in ast.walk(part)}
    for node in nodes:
        if isinstance(node, ast.arg) and node.arg in PRONOUNS:
            yield node.lineno, node.arg
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Store) or node in excepted:
            continue
        if node.id in PRONOUNS:
            yield node.lineno, node.id


def docstrings(path: Path) -> Iterator[_Place]:
    """Yield every docstring."""
    for node in nodes_of(path):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def small_docstrings(path: Path) -> Iterator[_Place]:
    """Yield the docstrings that begin with a small letter or a symbol."""
    for line, text in docstrings(path):
        if not text[0].isupper() and not text[0].isdigit():
            yield line, text.splitlines()[0]


def fragments(path: Path) -> Iterator[_Place]:
    """Yield the docstrings that begin as half a sentence does."""
    for line, text in docstrings(path):
        if FRAGMENT.match(text):
            yield line, text.splitlines()[0]


def riddles(path: Path) -> Iterator[_Place]:
    """Yield the parts of docstrings that explain a name by `x: of …`, `x: that …` or `x: those …`."""
    for line, text in docstrings(path):
        for match in RIDDLE.finditer(text):
            yield line, " ".join(text[max(0, match.start() - 20) : match.end() + 40].split())


def crowded_fields(path: Path) -> Iterator[_Place]:
    """Yield the fields of docstrings that do not begin a line of their own."""
    for line, text in docstrings(path):
        for match in CROWDED.finditer(text):
            yield line, match[0]


def unshared_names(path: Path) -> Iterator[_Place]:
    """Yield the public names that stand in no other file that names their module."""
    if room_of(path) == "migrations":  # found by their numbers
        return
    module = path.parent.name if path.stem in ("__init__", "__main__") else path.stem
    others = [words for other, words in _words(own_code()).items() if other != path and module in words]
    for line, name in _defined_names(path):
        if not name.startswith("_") and name not in EVERYWHERE and not any(name in words for words in others):
            yield line, name


@cache
def _words(own: tuple[Path, ...]) -> dict[Path, frozenset[str]]:
    """Map each file of code and tests to all of its words, also those of its texts."""
    others = (path for folder in ("tests", "benchmarks", "faults") for path in (ROOT / folder).rglob("*.py"))
    paths = [*own, *others, ROOT / "pyproject.toml"]
    return {path: frozenset(re.findall(r"\w+", path.read_text())) for path in paths}


def _defined_names(path: Path) -> Iterator[_Place]:
    """Yield what a module defines: functions, classes and constants, but no type variables."""
    for node in tree_of(path).body:
        if isinstance(node, ast.ClassDef | _Function):
            yield node.lineno, node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign) and "TypeVar(" not in ast.unparse(node):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (name for target in targets for name in ast.walk(target)):
                if isinstance(name, ast.Name):
                    yield node.lineno, name.id


COUNTED: dict[str, Callable[[Path], Iterator[_Place]]] = {
    "functions": functions,
    "once_called_helpers": once_called_helpers,
    "tuple_assignments": tuple_assignments,
    "conditional_statements": conditional_statements,
    "pronoun_locals": pronoun_locals,
    "small_docstrings": small_docstrings,
    "fragments": fragments,
    "riddles": riddles,
    "crowded_fields": crowded_fields,
    "unshared_names": unshared_names,
}
SHARED = "shared_class_names"
FIGURES = (*COUNTED, SHARED)


# -- the numbers ---------------------------------------------------------------------------------------------
def shared_class_names() -> Iterator[str]:
    """Yield the names that classes of two or more files have, with the files."""
    files = defaultdict[str, set[str]](set)
    for path in own_code():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                files[node.name].add(str(path.relative_to(ROOT)))
    for name, places in sorted(files.items()):
        if len(places) > 1:
            yield f"{name}: {', '.join(sorted(places))}"


def places(figure: str) -> dict[str, list[str]]:
    """List what a figure counts, by room."""
    if figure == SHARED:
        return {WHOLE: list(shared_class_names())}
    by_room = defaultdict[str, list[str]](list)
    for path in own_code():
        lines = [f"{path.relative_to(ROOT)}:{line} {text}" for line, text in COUNTED[figure](path)]
        by_room[room_of(path)] += lines
    return by_room


def today(figure: str) -> dict[str, int]:
    """Count a figure by room, functions per 1,000 lines; rooms with no more than the least are left out."""
    amounts = {room: len(lines) for room, lines in places(figure).items()}
    if figure == "functions":
        lines = Counter[str]()
        for path in own_code():
            lines[room_of(path)] += path.read_text().count("\n")
        amounts = {room: math.ceil(1000 * amount / lines[room]) for room, amount in amounts.items()}
    return {room: amount for room, amount in sorted(amounts.items()) if amount > least(figure)}


def least(figure: str) -> int:
    """Return the number of a room that is not in the file."""
    return DENSITY if figure == "functions" else 0


def kept() -> dict[str, dict[str, int]]:
    """Read the numbers of the file."""
    numbers: dict[str, dict[str, int]] = json.loads(FILE.read_text())
    return numbers


def complaints(figure: str, now: Mapping[str, int], before: Mapping[str, int]) -> list[str]:
    """Say of each room where a figure has risen, and where it has fallen and its number was not lowered."""
    sentences = []
    for room in sorted({*now, *before}):
        amount = now.get(room, least(figure))
        limit = before.get(room, least(figure))
        if amount > limit:
            sentences.append(
                f"{figure} of {room} rose to {amount}, at most {limit} are allowed: "
                f"`python -m tests.house_figures {figure} {room}` lists them"
            )
        if amount < limit - SLACK.get(figure, 0):
            sentences.append(
                f"{figure} of {room} fell to {amount}, and the file still allows {limit}: "
                "`python -m tests.house_figures` lowers it"
            )
    return sentences


def lowered(now: _Numbers, before: _Numbers) -> dict[str, dict[str, int]]:
    """Return the lower one of both numbers; a figure that was not counted before begins with that of now."""
    numbers = {}
    for figure, amounts in now.items():
        limits = before.get(figure, amounts)
        lower = {room: min(limit, amounts.get(room, least(figure))) for room, limit in limits.items()}
        numbers[figure] = {room: limit for room, limit in lower.items() if limit > least(figure)}
    return numbers


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", nargs="?", choices=FIGURES)
    parser.add_argument("room", nargs="?")
    options = parser.parse_args()
    if options.figure:
        for room, lines in places(options.figure).items():
            if options.room in (None, room):
                print(*lines, sep="\n")
        return 0
    now = {figure: today(figure) for figure in FIGURES}
    before = kept() if FILE.exists() else {}
    after = lowered(now, before)
    FILE.write_text(json.dumps(after, indent=1) + "\n")
    risen = [line for figure in FIGURES for line in complaints(figure, now[figure], after[figure])]
    for line in risen:
        print(line, file=sys.stderr)
    return 1 if risen else 0


if __name__ == "__main__":
    sys.exit(main())
