"""What every test gets: one thread, no network, and a LORAD_HOME of its own that leaves no process behind."""

import os

# Before anything imports torch: two threads are slower than one on a shared box, and results must not depend
# on them.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import gc
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.leftovers import kill_leftovers, newest_pid

gc.set_threshold(100_000, 50, 100)  # of the time of a screen's test, collecting is a fifth
gc.disable()  # while modules are imported, which live as long as this process: see lorad.startup

LONGEST = (
    "gpu_day/test_gpu_day",
    *("end_to_end/test_docs_run", "end_to_end/test_switches", "store/test_migrations", "queue/test_preempt"),
    *(
        "runs/test_health",
        "runs/test_sweep",
        "serving/test_aliases",
        "serving/test_serve",
        "record/test_repair",
    ),
    *(
        "daemon/test_system_mode",
        "tui/test_snapshots",
        "tui/test_tmux",
        "tui/test_serving",
        "tui/test_new_run",
    ),
    *("tui/test_samples", "tui/test_tui"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest begin first: of several at a time, none is left over at the end."""
    items.sort(key=lambda item: f"{item.path.parent.name}/{item.path.stem}" not in LONGEST)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def whole_collection() -> Iterator[None]:
    """What fixtures of a file left open is found at the file's end: looking at all that lives takes long."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh LORAD_HOME whose path is short enough for sockets; what a test started in it is killed at its
    end.
    """
    directory, since = Path(tempfile.mkdtemp(prefix="lr-")), newest_pid()
    monkeypatch.setenv("LORAD_HOME", str(directory))
    monkeypatch.setenv("XDG_STATE_HOME", str(directory / "state"))
    yield directory
    if any(directory.iterdir()):
        kill_leftovers(directory, since)
    shutil.rmtree(directory, ignore_errors=True)
    gc.collect(1)  # what a test made and left open is found at its own end, not in a later one
