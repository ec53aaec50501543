"""Real trainers and engines, which `make test-backends` installs; at the end the pairs of them as a table."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.kit.world import World, world
from tests.trainers.real.pairs import ENGINES, TRAINERS, missing, python_of

TAIL = 40  # lines of each log under a test that failed
WIDTH = 30


HERE = Path(__file__).parent
WHOLE_RUNS = {"test_matrix", "test_whole_run", "test_episodes", "test_routes"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each worker the ranks of one class or file at a time, and begin with what is long: whole runs,
    then what shares a server. Comes before xdist's own hook, which reads the groups.
    """
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.stem != "test_matrix":
            item.add_marker(pytest.mark.xdist_group(item.nodeid.rpartition("::")[0]))
    items.sort(key=lambda item: (item.path.stem not in WHOLE_RUNS, item.path.is_relative_to(HERE)))


@pytest.fixture(scope="session")
def megatron_python() -> str:
    """The interpreter of Megatron's virtual environment."""
    if absent := missing("megatron"):
        pytest.skip(f"{absent[0]} names no interpreter: `make test-backends` installs the real Megatron")
    return python_of("megatron")


@pytest.fixture
def made() -> Iterator[World]:
    """A home of its own; when the test fails, the end of every log in it is shown."""
    with world() as home:
        yield home


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    made = getattr(item, "funcargs", {}).get("made")
    if report.failed and isinstance(made, World):
        for log in sorted(path for path in made.home.root.rglob("*") if is_log(path)):
            tail = log.read_text(errors="replace").splitlines()[-TAIL:]
            report.sections.append((f"the end of {log.relative_to(made.home.root)}", "\n".join(tail)))
    return report


def is_log(path: Path) -> bool:
    return path.is_file() and (path.name == "log" or path.suffix == ".log") and path.stat().st_size > 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Rows are trainers, columns engines; the cells are what the tests recorded as `cell`."""
    cells: dict[str, str] = {}
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            properties = dict(report.user_properties)
            if pair := properties.get("pair"):
                cells[pair] = properties.get("cell", outcome) if outcome == "passed" else outcome
    if not cells:
        return
    terminalreporter.section("trainers (rows) and engines (columns)")
    terminalreporter.write_line(" " * 10 + "".join(engine.ljust(WIDTH) for engine in ENGINES))
    for trainer in TRAINERS:
        row = (cells.get(f"{trainer}-{engine}", "not asked for").ljust(WIDTH) for engine in ENGINES)
        terminalreporter.write_line(trainer.ljust(10) + "".join(row))
    for pair in sorted(pair for pair in cells if pair.endswith("-moe")):
        terminalreporter.write_line(f"{pair}: {cells[pair]}")
