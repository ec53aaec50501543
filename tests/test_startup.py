"""How processes of lorad start."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lorad.startup import quick_imports

STARTS = ("lorad.cli.app", "lorad.driver.__main__", "lorad.preflight", "lorad.gateway.__main__")


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_rests_during_imports_and_is_as_before(is_on: bool) -> None:
    (gc.enable if is_on else gc.disable)()
    with pytest.raises(ImportError), quick_imports():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() == is_on


def test_what_a_process_imports_is_out_of_later_collections() -> None:
    look = (
        f"import gc; import {', '.join(STARTS)}; print(gc.isenabled(), gc.get_freeze_count() > len(gc.get_objects()))"
    )
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout == "True True\n"
