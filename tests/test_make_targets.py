"""Every `make` target starts from an empty clone: what it imports is in what its setup installs."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.rows import MEASURES
from tests.kit.world import REPOSITORY

pytestmark = pytest.mark.system

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PROGRAMS = {"lint-imports": "import-linter"}  # where a program is not called as what installs it
ELSEWHERE = {
    "sglang",
    "vllm",
    "megatron",
    "ray",
    "transformer_engine",
}  # imported in environments of their own
OURS = {"lorad", "tests", "benchmarks", "faults"}
NAMED = re.compile(r"(tests|benchmarks|faults)(\.\w+)+")
OTHERS = {*OURS, *sys.stdlib_module_names, *ELSEWHERE}
TARGETS = re.findall(r"^([a-z0-9 -]+):(?!=)(?!.*:=)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
NAMES = sorted({name for names in TARGETS for name in names.split()} - {"help", "clean", "setup"})


@cache
def commands(target: str) -> str:
    """What make would do in a clone without an environment."""
    argv = ["make", "-n", target, "VENV=/nonexistent"]
    env = {"PATH": os.environ["PATH"]}  # without what `make test` was told
    return subprocess.run(argv, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=True).stdout


def installed(requirements: Iterable[str]) -> set[str]:
    """The distributions that pip installs for these, by canonical names; of one that is not here, itself
    alone.
    """
    found: set[str] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name == "lorad":
            waiting += [(Requirement(text), "") for key in requirement.extras for text in EXTRAS[key]]
        elif name not in found:
            found.add(name)
            waiting += [
                (Requirement(text), key) for text in requires(name) for key in (requirement.extras or {""})
            ]
    return found


@cache
def requires(distribution: str) -> list[str]:
    try:
        return metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []


@cache
def by_package() -> Mapping[str, list[str]]:
    """The distributions that install each package that can be imported."""
    return metadata.packages_distributions()


@cache
def file_of(module: str) -> Path | None:
    path = REPOSITORY.joinpath(*module.split("."))
    return next((found for found in (path / "__init__.py", path.with_suffix(".py")) if found.is_file()), None)


@cache
def imported(path: Path) -> frozenset[str]:
    """Modules. In lorad, what a function imports may be missing; in tests it, and what a string names, is
    needed.
    """
    tree = ast.parse(path.read_text())
    nodes = at_once(tree.body) if path.is_relative_to(REPOSITORY / "lorad") else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update((str(node.module), *(f"{node.module}.{name.name}" for name in node.names)))
        elif isinstance(node, ast.Constant) and re.fullmatch(
            r"(tests|benchmarks|faults)(\.\w+)+", str(node.value)
        ):
            found.add(str(node.value))
    return frozenset(found)


def at_once(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.Try):
            yield from at_once(node.body)


def foreign(roots: Iterable[str]) -> dict[str, str]:
    """What is imported on the way from `roots` and is not in this repository -> by which file."""
    waiting, seen, found = list(roots), set[str](), dict[str, str]()
    while waiting:
        module = waiting.pop()
        if module in seen or module == "__future__":
            continue
        seen.add(module)
        top = module.partition(".")[0]
        if top not in OURS:
            continue
        if (path := file_of(module)) is None:
            continue
        waiting.append(module.rpartition(".")[0] or module)
        for name in imported(path):
            found.setdefault(name.partition(".")[0], str(path.relative_to(REPOSITORY)))
            waiting.append(name)
    return found


def roots_of(text: str) -> list[str]:
    """The modules that the commands run."""
    roots = [*re.findall(r" -m ((?:tests|benchmarks|faults)\b[\w.]*)", text), "lorad.cli.app"]
    if "benchmarks.bench " in text:
        roots += [f"benchmarks.{measure.module}" for measure in MEASURES.values()]
    for match in re.findall(r"-m pytest(.*)", text):
        named = [REPOSITORY / word for word in match.split() if word.startswith("tests/")] or [
            REPOSITORY / "tests"
        ]
        files = [file for path in named for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
        roots += [
            ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
            for file in files
            if file.name == "conftest.py" or file.name.startswith("test_")
        ]
    return roots


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", NAMES)
def test_a_target_imports_only_what_its_setup_installs(target: str) -> None:
    text = commands(target)
    extras = [extra for extra in re.findall(r"^\.ci/setup ?(\S*)$", text, re.MULTILINE) if extra]
    there = installed([*PROJECT["dependencies"], *(f"lorad[{extra}]" for extra in extras)])
    programs = {PROGRAMS.get(name, name) for name in re.findall(r"/nonexistent/bin/([\w-]+)", text)}
    distributions = by_package()
    lacking = {
        name: where
        for name, where in foreign(roots_of(text)).items()
        if name not in OTHERS
        and not there & {canonicalize_name(each) for each in distributions.get(name, [name])}
    }
    assert not lacking, f"make {target} installs {extras or 'lorad alone'}, which lacks {lacking}"
    assert not programs - there - {"python", "lorad"}


def test_an_extra_installs_what_lorad_imports() -> None:
    files = [file for folder in ("lorad", "cli", "tui") for file in (REPOSITORY / folder).rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    names = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    there = {name.partition(".")[0] for name in names}
    there |= {"sqlalchemy", "alembic", "httpx"}  # mlflow-skinny and renderers import them
    there |= {"protobuf"} & {"protobuf" for name in names if name.startswith("google.protobuf")}
    for extra in EXTRAS.keys() - {"dev", "bench"}:
        for text in EXTRAS[extra]:
            name = Requirement(text).name
            assert there & {name.replace("-", "_"), name.partition("-")[0]}, extra
