"""How processes of lorad start."""

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lorad.startup import quick_imports

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
