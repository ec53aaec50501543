"""A pool beside memory of others takes what was free when it began, and no more."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lorad.backends.activations import ADAPTERS
from lorad.pool import capacity, lodging
from lorad.pool.lodging import within_what_is_free
from lorad.protocol.pool_setup import PoolSetup, RanksSetup, ServerSetup
from tests.kit.fakes.gpu_kit import Gpu, Nvml
from tests.kit.pool_kit import config_of

SERVER = ServerSetup(max_rank=8, targets=("q_proj",), context_length=64)
FREE = 0.5  # of 80 GiB, without what CUDA itself takes
HALF = Gpu(used=(40 << 30) - lodging._CONTEXT)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, str]]:
    """The shares to which torch was held, with the GPU."""
    found: list[tuple[float, str]] = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, gpu: found.append((share, str(gpu)))
    )
    monkeypatch.setattr(lodging, "_SECONDS", 0.0)
    monkeypatch.setattr(lodging, "uuids_of", lambda gpus: [f"GPU-{gpu[-1]}" for gpu in gpus])
    return found


def setup(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu, **more: Any) -> PoolSetup:
    nvml = Nvml(**{f"GPU_{n}": gpu for n, gpu in enumerate(gpus)})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    names = tuple(f"cuda:{n}" for n in range(len(gpus)))
    return config_of(Path(), device="cuda:0", devices=names, memory_fraction=0.85, **more)


def test_pool_takes_no_more_than_was_free(
    monkeypatch: pytest.MonkeyPatch, held: list[tuple[float, str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    config = within_what_is_free(setup(monkeypatch, HALF))
    assert config.memory_fraction == FREE and held == [(FREE, "cuda:0")]
    assert "the pool takes 50% of it at most, which was free, instead of 85%" in caplog.text
    monkeypatch.setattr(capacity, "_total", lambda _: 80 << 30)
    assert capacity.memory_for_adapters(config) <= (40 << 30) // ADAPTERS


def test_fullest_gpu_decides(monkeypatch: pytest.MonkeyPatch, held: list[tuple[float, str]]) -> None:
    assert within_what_is_free(setup(monkeypatch, Gpu(), HALF)).memory_fraction == FREE
    assert held == [(FREE, "cuda:0"), (FREE, "cuda:1")]


def test_pool_alone_keeps_its_fraction(
    monkeypatch: pytest.MonkeyPatch, held: list[tuple[float, str]]
) -> None:
    config = setup(monkeypatch, Gpu())
    assert within_what_is_free(config) == config and held[0][0] > 0.99


@pytest.mark.parametrize(("mode", "share"), [("resident", FREE / 2), ("timesliced", FREE)])
def test_trainer_leaves_servers_their_half(
    monkeypatch: pytest.MonkeyPatch, held: list[tuple[float, str]], mode: str, share: float
) -> None:
    within_what_is_free(setup(monkeypatch, HALF, mode=mode, server=SERVER))
    assert held == [(share, "cuda:0")]


def test_ranks_have_their_own_processes(
    monkeypatch: pytest.MonkeyPatch, held: list[tuple[float, str]]
) -> None:
    apart = {"trainer": "fsdp", "ranks": RanksSetup(dp=1), "mode": "resident"}
    config = within_what_is_free(setup(monkeypatch, HALF, **apart))
    assert (config.memory_fraction, held) == (FREE, [])


def test_memory_that_is_given_back_is_awaited(
    monkeypatch: pytest.MonkeyPatch, held: list[tuple[float, str]]
) -> None:
    monkeypatch.setattr(lodging, "_SECONDS", 60.0)
    config = setup(monkeypatch, HALF)
    nvml: Any = sys.modules["pynvml"]
    monkeypatch.setattr("time.sleep", lambda _: nvml.gpus.update({"GPU-0": Gpu()}))
    assert within_what_is_free(config).memory_fraction == 0.85


def test_silent_nvml_changes_nothing(monkeypatch: pytest.MonkeyPatch, held: list[tuple[float, str]]) -> None:
    config = setup(monkeypatch, HALF)
    nvml: Any = sys.modules["pynvml"]
    nvml.refuses = {"nvmlInit"}
    assert within_what_is_free(config) == config and held == []
    assert within_what_is_free(config_of(Path())) == config_of(Path())
