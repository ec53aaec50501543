"""How processes of lorad start."""

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lorad.startup import quick_imports
from tests.kit.world import REPOSITORY

STARTS = ["lorad.cli.app", "lorad.driver.__main__", "lorad.preflight.__main__", "lorad.gateway.__main__"]
LOOK = f"""
import gc, importlib
for start in {STARTS}:
    before = gc.get_freeze_count()
    importlib.import_module(start)
    print(start, gc.isenabled() and gc.get_freeze_count() > before)
"""


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_collector_rests_only_during_imports(is_on: bool) -> None:
    (gc.enable if is_on else gc.disable)()
    with pytest.raises(ImportError), quick_imports():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() == is_on


def test_each_process_freezes_what_it_imports() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{start} True" for start in STARTS], done.stderr


@pytest.mark.parametrize(
    ("start", "slow"),
    [
        ("lorad.preflight.__main__", "aiohttp"),
        ("lorad.preflight.__main__", "asyncio"),
        ("lorad.driver.__main__", "asyncio"),
        ("lorad.driver.user.reward_child", "asyncio"),
        ("tests.kit.fakes.daemon_fakes", "numpy"),
    ],
)
def test_what_starts_often_leaves_slow_packages_out(start: str, slow: str) -> None:
    look = f"import sys, {start}; print({slow!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout == "False\n", done.stderr
