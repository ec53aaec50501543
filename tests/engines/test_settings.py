"""What a server is started with, by what it is asked for."""

import dataclasses

import msgspec
import pytest

from lorad.box.machine import read_machine
from lorad.engines.remote import settings
from lorad.engines.remote.dialect import ServerSettings, visible_devices
from lorad.errors import SpecError
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


def on_gpus(servers: int, device: str, devices: int) -> ServerSettings:
    """Make the settings of servers that have two GPUs each."""
    return settings.settings_of(
        msgspec.structs.replace(SETUP, tp=2, servers=servers),
        model=resolve("builtin:tiny"),
        dtype="float32",
        device=device,
        devices=devices,
        threads=1,
        memory_fraction=0.8,
        sleep=False,
    )


def test_servers_apart_begin_after_the_trainer() -> None:
    own = on_gpus(servers=2, device="cuda:3", devices=4)
    assert own.memory_fraction == 0.8
    assert [visible_devices(settings.local_settings(own, index)) for index in (0, 1)] == ["3,4", "5,6"]


def test_servers_of_a_node_share_its_devices() -> None:
    """Each has the next ones, by the names that the node gave them."""
    own = on_gpus(servers=6, device="cuda:0", devices=8)
    assert own.memory_fraction == 0.4  # of servers that share a device
    found = [
        settings.node_settings(own, index, "h1", ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]) for index in range(3)
    ]
    assert [visible_devices(each) for each in found] == ["GPU-a,GPU-b", "GPU-c,GPU-d", "GPU-a,GPU-b"]
    with pytest.raises(SpecError, match="a server needs 2 devices, and h1 gave 1"):
        settings.node_settings(own, 0, "h1", ["GPU-a"])
