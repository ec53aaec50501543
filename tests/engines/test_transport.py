"""The directories that adapters travel in, and the error of a server that did not start."""

import errno
from pathlib import Path
from typing import Any

import pytest

from lorad.adapters.adapter import Adapter
from lorad.adapters.directory import sha256_of
from lorad.adapters.peft import WEIGHTS, read_peft, write_peft
from lorad.box import paths
from lorad.children.process import cause
from lorad.engines.remote import transport
from lorad.engines.remote.transport import ServerTransport
from lorad.errors import StorageError
from tests.kit.fakes.random_adapters import random_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 8)}


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the memory file system."""
    (tmp_path / "memory").mkdir()
    for module in (transport, paths):
        monkeypatch.setattr(module, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr(transport, "LEAST_FREE", 0)
    return tmp_path / "memory"


def test_adapter_travels_whole_and_can_be_removed(memory: Path, tmp_path: Path) -> None:
    made, adapter = ServerTransport(tmp_path, "base"), random_adapter(SHAPES, 1)
    directory = made.put("run@1", adapter)
    assert directory.is_relative_to(memory) and read_peft(directory).digest() == adapter.digest()
    assert (
        sha256_of(directory / WEIGHTS) == adapter.digest()
        and directory.parent.stat().st_mode & 0o777 == 0o700
    )
    made.remove(directory)
    assert sha256_of(directory / WEIGHTS) == "" and not directory.exists()
    made.close()
    assert not list(memory.iterdir())


def test_a_closed_transport_writes_nothing(memory: Path, tmp_path: Path) -> None:
    made = ServerTransport(tmp_path, "base")
    made.close()
    with pytest.raises(StorageError, match="could not be written"):
        made.put("run@1", random_adapter(SHAPES, 1))
    assert not list(memory.iterdir())


def test_a_full_memory_sends_adapters_over_the_disk(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(adapter: Adapter, directory: Path, *about: Any) -> Any:
        if directory.is_relative_to(memory):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_peft(adapter, directory, *about)

    monkeypatch.setattr(transport, "write_peft", full)
    made = ServerTransport(tmp_path, "base")
    assert made.put("run@1", random_adapter(SHAPES, 1)).is_relative_to(tmp_path / "adapters")
    assert not list(made.root.iterdir())


def test_unwritable_disk_is_a_storage_error(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(transport, "write_peft", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        ServerTransport(tmp_path, "base").put("run@1", random_adapter(SHAPES, 1))


def test_what_an_earlier_life_left_is_cleared_away(memory: Path, tmp_path: Path) -> None:
    old = ServerTransport(tmp_path, "base").put("run@1", random_adapter(SHAPES, 1))
    assert ServerTransport(tmp_path, "base").root == old.parent and not old.exists()


def test_cause_is_the_first_fault_of_a_log() -> None:
    log = """starting
    FutureWarning: Error: is nothing
    (EngineCore) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
    Traceback (most recent call last):
    RuntimeError: Engine core initialization failed. See root cause above.
    nanobind: leaked 12 instances"""
    assert "CUDA out of memory" in cause(log).splitlines()[0]
    assert cause("one\\ntwo") == "its log: one\\ntwo"
