"""A few seconds of `make fuzz`, with seeds of their own."""

from pathlib import Path

import pytest

from faults.fuzz import pelt
from faults.fuzz_moves import explore
from lorad.http import bounded

pytestmark = pytest.mark.system


async def test_no_request_is_a_defect_or_hangs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "LOOK", 0.1)
    found = await pelt(home, seconds=3.0, seed=1)
    assert {"200", "404", "422"} <= set(found)


def test_lives_of_runs_keep_to_the_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert explore(1.0, seed=1, steps=25).examples
