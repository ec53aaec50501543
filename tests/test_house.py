"""The rules of the house that no checker knows: its rooms, its sizes, what start-up may cost."""

from __future__ import annotations

import ast
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"lorad", "cli", "tui", "migrations", "tests", "examples"}
LONGEST_FILE, LONGEST_FUNCTION = 300, 40  # lines

TORCH = {"torch", "transformers", "peft"}
SLOW = TORCH | {"textual", "numpy", "sqlite_utils", "httpx", "aiohttp", "pyarrow", "yaml", "asyncio"}
HEAVY_ROOMS = ("__main__", "models", "trainers", "engines", "pool")
START_UP_LIMIT = 20  # times the CPU time of a bare interpreter

IMPORT_LIGHT_MODULES = """
import pkgutil, lorad
for module in pkgutil.walk_packages(lorad.__path__, "lorad."):
    if module.name.split(".")[1] not in {heavy} and not module.name.endswith((".__main__", "rl.loss")):
        __import__(module.name)
"""


def loaded_after(code: str) -> set[str]:
    """The top-level packages that a fresh interpreter holds after `code`."""
    report = "\nimport sys; print('\\n'.join({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code + report], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def own_files() -> list[Path]:
    return [path for room in ROOMS - {"lorad"} for path in (ROOT / room).rglob("*.py")] + [
        path for path in (ROOT / "lorad").rglob("*.py") if not any(parent.is_symlink() for parent in path.parents)
    ]


def test_every_top_level_folder_is_one_of_the_fixed_rooms() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {name.partition("/")[0] for name in listed if "/" in name}
    assert {folder for folder in folders if not folder.startswith(".")} - ROOMS == set()


@pytest.mark.parametrize("room", ["cli", "tui", "migrations"])
def test_the_package_links_to_the_top_level_room(room: str) -> None:
    assert os.readlink(ROOT / "lorad" / room) == f"../{room}"


def test_every_folder_with_code_is_a_package_so_that_the_wheel_holds_it() -> None:
    folders = {path.parent for path in own_files() if path.relative_to(ROOT).parts[0] not in ("tests", "examples")}
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_no_file_is_too_long_to_read_in_one_sitting() -> None:
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in own_files()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}


def long_functions(path: Path) -> Iterator[str]:
    """Every function over the limit; its docstring does not count."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            lines = (node.end_lineno or 0) - first.lineno + 1 + (node.body[0].lineno - node.lineno)
            if lines > LONGEST_FUNCTION:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines"


def test_no_function_is_longer_than_a_screen() -> None:
    assert [found for path in own_files() for found in long_functions(path)] == []


def test_no_light_module_loads_torch() -> None:
    assert loaded_after(IMPORT_LIGHT_MODULES.format(heavy=HEAVY_ROOMS)) & TORCH == set()


@pytest.mark.parametrize("module", ["lorad.cli.app", "lorad.client"])
def test_a_command_starts_without_the_slow_packages(module: str) -> None:
    assert loaded_after(f"import {module}") & SLOW == set()


def cpu_seconds(command: list[str]) -> float:
    """User and system time of one process; what it leaves running is not counted."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{command} exited with {process.returncode}"
    return usage.ru_utime + usage.ru_stime


def test_lorad_list_costs_at_most_twenty_bare_interpreters() -> None:
    lorad, bare = [sys.executable, "-m", "lorad"], [sys.executable, "-c", "pass"]
    subprocess.run([*lorad, "daemon", "start"], cwd=ROOT, check=True, capture_output=True)
    pairs = [(cpu_seconds([*lorad, "list"]), cpu_seconds(bare)) for _ in range(7)]
    ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    assert ours <= START_UP_LIMIT * theirs, f"lorad list {ours * 1e3:.0f} ms, bare Python {theirs * 1e3:.0f} ms"
