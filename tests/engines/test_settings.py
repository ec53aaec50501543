"""What a server is started with, by what it is asked for."""

import dataclasses

import pytest

from lorad.box.machine import read_machine
from lorad.engines.remote import settings
from lorad.models.directory import resolve
from lorad.protocol.pool_setup import ServerSetup

SETUP = ServerSetup(
    python="python", max_rank=512, targets=("down_proj", "gate_proj", "up_proj"), context_length=64
)


@pytest.mark.parametrize(("memory", "most"), [(1 << 40, 64), (4 << 30, 56), (1 << 30, 14), (1 << 28, 8)])
def test_large_versions_are_loaded_in_smaller_numbers(
    monkeypatch: pytest.MonkeyPatch, memory: int, most: int
) -> None:
    """A quarter of the host's memory is for them, and for the server's copies."""
    machine = dataclasses.replace(read_machine(), memory=memory)
    monkeypatch.setattr(settings, "read_machine", lambda: machine)
    tiny = resolve("builtin:tiny")
    found = settings.settings_of(
        SETUP, model=tiny, dtype="float32", device="cpu", threads=1, memory_fraction=0.5, sleep=False
    )
    assert found.max_versions == most
