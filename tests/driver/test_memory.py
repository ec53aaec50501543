"""A run on a device that has too little memory for its micro-batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lorad.trainers.builtin import passes
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.driver.driven import Driven
from tests.kit.pool_kit import Running, running_pool


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_pool(tmp_path_factory.mktemp("pool"), deterministic=True) as pool:
        yield pool


def test_run_without_memory_halves_and_says_so(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = passes.forward_backward

    def limited(base: Any, rows: Any, *rest: Any) -> Any:
        if rows.ids.numel() > 30:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(base, rows, *rest)

    assert isinstance(running.pool.trainer, BuiltinTrainer)
    monkeypatch.setattr(passes, "forward_backward", limited)
    monkeypatch.setattr(running.pool.trainer, "_may_halve", True)
    run = Driven(running, tmp_path, "small", "trainer.tokens_per_microbatch=40", "trainer.steps=2")
    end = run.drive()
    assert end.reason == "completed", end
    (warning,) = (fact.data["message"] for fact in run.facts("warning"))
    assert "they have 20 tokens from now on" in warning
    assert len(run.facts("step")) == 2
