"""How much room a pool on a CPU says it has for adapters."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lorad.backends.activations import ADAPTERS, CPU_CACHE
from lorad.box.machine import NO_LIMIT, read_machine
from lorad.pool import capacity
from lorad.pool.capacity import memory_for_adapters
from tests.kit.pool_kit import config_of

MARGIN = 64 << 20  # by which this process may grow meanwhile


def room(monkeypatch: pytest.MonkeyPatch, left: int) -> int:
    """Compute the room of a pool whose share of the machine leaves so many bytes beside what runs already."""
    config = config_of(Path("/"), memory_fraction=0.5)
    mine = psutil.Process()  # and what other tests in this process left running
    taken = sum(process.memory_info().rss for process in (mine, *mine.children(recursive=True)))
    machine = replace(read_machine(), memory=2 * (taken + left))
    monkeypatch.setattr(capacity, "read_machine", lambda: machine)
    return memory_for_adapters(config)


def test_the_cache_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert room(monkeypatch, 4 * CPU_CACHE) == pytest.approx(3 * CPU_CACHE, abs=MARGIN)


def test_small_machine_has_room_for_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert room(monkeypatch, CPU_CACHE // 2) == pytest.approx(CPU_CACHE // 2 // ADAPTERS, abs=MARGIN)


def test_no_limit_means_no_room_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert room(monkeypatch, NO_LIMIT) == 0
