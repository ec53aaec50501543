"""What every test gets: one thread, no network, and a LORAD_HOME of its own that leaves no process behind."""

import os

# Before anything imports torch: two threads are slower than one on a shared box, and results must not depend
# on them.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.update(TEXTUAL_FPS="20")  # nobody watches: drawing every screen sixty times a second costs a tenth

import contextlib
import functools
import gc
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from tests.kit.leftovers import kill_leftovers, newest_pid
from tests.kit.suite.changed import pytest_addoption
from tests.kit.suite.connections import watch
from tests.kit.warm.plugin import pytest_configure, pytest_xdist_setupnodes

__all__ = ["pytest_addoption", "pytest_configure", "pytest_xdist_setupnodes"]

# What is measured of products beside other tests is no choice for this user's own runs.
os.environ["LORAD_CACHE"] = str(Path(tempfile.gettempdir()) / f"lorad-tests-{os.getuid()}")
watch()
with contextlib.suppress(ImportError):  # on a machine that is lent for the day on a GPU
    from hypothesis.internal.conjecture import providers

    # It would draw from the constants of every module that is imported by then: looking for them takes each
    # worker four seconds in a fresh clone, and what is drawn would depend on which tests came before.
    providers._get_local_constants = lambda: providers._local_constants
gc.set_threshold(100_000, 50, 100)  # of the time of a screen's test, collecting is a fifth
gc.disable()  # while modules are imported, which live as long as this process: see lorad.startup

# the files that take longest begin first: of several at a time, none is left over at the end
FIRST = (
    "test_builtin_conformance",
    "test_fused_conformance",
    "test_verifiers",
    "test_snapshots",
    "test_docs_run",
    "test_examples",
    "test_environments",
    "test_faults",
    "test_gpu_day",
)

_ALL_SECOND_TIER = re.compile(rb"^pytestmark = (\[[^]]*)?pytest\.mark\.system\b(?!\()", re.M)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test of the tier are not imported: each worker collects all that are."""
    tier = config.getoption("markexpr")
    if collection_path.suffix != ".py":
        return None
    is_of_the_other = (tier.startswith("system") and not has_second_tier(collection_path)) or (
        "not system" in tier and is_all_second_tier(collection_path)
    )
    return is_of_the_other or None


@functools.cache
def has_second_tier(file: Path) -> bool:
    return b"mark.system" in file.read_bytes()


def is_all_second_tier(file: Path) -> bool:
    """Whether a file gives all its tests the mark."""
    return has_second_tier(file) and bool(_ALL_SECOND_TIER.search(file.read_bytes()))


def pytest_itemcollected(item: pytest.Item) -> None:
    """The cases that a mark `system` excepts are of `make test`, too."""
    if item.get_closest_marker("system") and not has_second_tier(item.path):
        raise pytest.UsageError(f"{item.path} does not say mark.system: `make test-system` would not find it")
    case = getattr(item, "callspec", None)
    for mark in item.iter_markers("system"):
        but = mark.kwargs.get("but", ())
        if case is not None and case.id in ([but] if isinstance(but, str) else but):
            item.own_markers.remove(mark)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix the files, by their names, so that at any time some wait for processes beside some that compute."""
    place = {
        path: (path.stem not in FIRST, crc32(f"{path.parent.name}/{path.name}".encode()), path)
        for path in {item.path for item in items}
    }
    items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def whole_collection() -> Iterator[None]:
    """What fixtures of a file left open is found at the file's end: looking at all that lives takes long."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def products_by_rule() -> Iterator[None]:
    """A pool in this process measures products; those of the next file have the forms of the rule again."""
    yield
    if forms := sys.modules.get("lorad.models.products.forms"):
        forms.choose_by(forms.by_rule)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh LORAD_HOME whose path is short enough for sockets; what a test started in it is killed at its
    end.
    """
    directory, since = Path(tempfile.mkdtemp(prefix="lr-")), newest_pid()
    monkeypatch.setenv("LORAD_HOME", str(directory))
    monkeypatch.setenv("XDG_STATE_HOME", str(directory / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(directory / "config"))  # where the user names other boxes
    monkeypatch.setenv("LORAD_HOST", "")  # a command in this process sets it
    monkeypatch.delenv("LORAD_HOST")
    yield directory
    if any(directory.iterdir()):
        kill_leftovers(directory, since)
    shutil.rmtree(directory, ignore_errors=True)
    gc.collect(1)  # what a test made and left open is found at its own end, not in a later one
