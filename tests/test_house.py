"""The rules of the house that no checker knows: its rooms, its sizes, what start-up may cost.

Those that read the trees of all files are in `test_house_ratchets.py`, which parses them once.
"""

import os
import re
import signal
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.house_figures import ROOT, own_code
from tests.kit.leftovers import kill_leftovers

ROOMS = {"lorad", "cli", "tui", "migrations", "tests", "benchmarks", "faults", "examples", "docs"}
LONGEST_FILE = 500  # lines
MOST_FILES = 20  # of Python, in a folder


TORCH = {"torch", "transformers", "peft"}
SLOW = TORCH | {
    "textual",
    "pydantic",
    "numpy",
    "sqlite_utils",
    "httpx",
    "aiohttp",
    "pyarrow",
    "yaml",
    "asyncio",
    "rich",
}
HEAVY = (
    "lorad.backends.engine_trial",
    "lorad.models",
    "lorad.trainers",
    "lorad.engines",
    "lorad.pool",
    "lorad.rl.loss",
    "lorad.rl.value_loss",
    "lorad.rl.template_child",
)
START_UP_LIMIT = 20  # times the CPU time of a bare interpreter


def loaded_after(code: str) -> set[str]:
    """The top-level packages that a fresh interpreter holds after `code`."""
    report = "\nimport sys; print('\\n'.join({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code + report], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_top_level_folders_are_the_fixed_rooms() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    folders = {name.partition("/")[0] for name in listed if "/" in name}
    assert {folder for folder in folders if not folder.startswith(".")} - ROOMS == set()


@pytest.mark.parametrize("room", ["cli", "tui", "migrations"])
def test_the_package_links_to_the_top_level_room(room: str) -> None:
    assert os.readlink(ROOT / "lorad" / room) == f"../{room}"


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in own_code()}
    assert [
        str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()
    ] == []


def test_no_file_is_over_500_lines() -> None:
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in own_code()}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_no_folder_has_too_many_files() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    sizes = Counter(str(Path(name).parent) for name in listed if (ROOT / name).is_file())
    assert {folder for folder, files in sizes.items() if files > MOST_FILES} == set()


TEST = re.compile(r"^\s*(?:async )?def test_(\w+)", re.MULTILINE)
LONGEST_NAME = 8  # words of a test's name


def test_names_of_tests_are_short_sentences() -> None:
    named = [
        (path.name, name)
        for path in (ROOT / "tests").rglob("*.py")
        for name in TEST.findall(path.read_text())
    ]
    assert [found for found in named if len(found[1].split("_")) > LONGEST_NAME] == []


def test_no_group_is_repeated_possessively() -> None:
    """Before 3.11.5 Python matches too much with `(...)*+`; `(?>(...)*)` means the same."""
    repeated = re.compile(r"\)(?:[*+?]|\{[\d,]+\})\+")
    assert repeated.search(r"(?:ab?c)*+") and not repeated.search(r"(?>(?:ab?c)*)")
    assert [str(path) for path in own_code() if repeated.search(path.read_text())] == []


def light_modules() -> list[str]:
    """Every module of the light half, by its importable name."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in own_code()
    ]
    modules = [name if name.split(".")[0] == "lorad" else f"lorad.{name}" for name in names]
    return [name for name in modules if not name.startswith(HEAVY) and not name.endswith("__main__")]


@pytest.mark.system
def test_no_light_module_loads_torch() -> None:
    assert loaded_after("\n".join(f"import {name}" for name in light_modules())) & TORCH == set()


@pytest.mark.parametrize("module", ["lorad.cli.app", "lorad.cli.commands.dashboard", "lorad.client.client"])
def test_a_command_starts_without_the_slow_packages(module: str) -> None:
    assert loaded_after(f"import {module}") & SLOW == set()


def cpu_seconds(command: list[str]) -> float:
    """User and system time of one process; what it leaves running is not counted."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{command} exited with {process.returncode}"
    return usage.ru_utime + usage.ru_stime


@pytest.mark.system
def test_lorad_list_costs_at_most_twenty_bare_interpreters() -> None:
    lorad, bare = [sys.executable, "-m", "lorad"], [sys.executable, "-c", "pass"]
    subprocess.run([*lorad, "daemon", "start"], cwd=ROOT, check=True, capture_output=True)
    pairs = [(cpu_seconds([*lorad, "list"]), cpu_seconds(bare)) for _ in range(7)]
    ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    assert ours <= START_UP_LIMIT * theirs, (
        f"lorad list {ours * 1e3:.0f} ms, bare Python {theirs * 1e3:.0f} ms"
    )


@pytest.mark.system
def test_what_a_test_leaves_running_is_killed(home: Path) -> None:
    code = "import time; print('up', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdout.readline()  # before, /proc may not have its environment yet
        kill_leftovers(home)
        assert process.wait(timeout=10) == -signal.SIGKILL
