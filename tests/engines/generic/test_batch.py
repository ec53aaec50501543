"""What the engine over transformers computes at once, and what it holds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lorad.engines.base import BASE
from lorad.engines.builtin.calls import Call
from lorad.engines.generic import decode
from lorad.engines.generic.decode import GenericBatch, HeldRows
from lorad.engines.generic.model import GenericModel
from lorad.models.directory import resolve
from lorad.models.facts import read_facts
from lorad.protocol.batch import Prompt, Sampling
from tests.models.bases import write_base

TINY = resolve("builtin:tiny")
CPU = torch.device("cpu")


@pytest.mark.parametrize(("lengths", "forwards"), [((8, 8, 30, 8), [2, 1, 1]), ((40, 4), [1, 1])])
def test_prefill_is_bounded_by_padded_tokens(
    lengths: tuple[int, ...], forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows of 30 tokens are more than 32, and so are two; a prompt of 40 is prefilled alone."""
    monkeypatch.setattr(decode, "_PREFILL_TOKENS", 32)
    model = GenericModel.opened(TINY, torch.float32, CPU, read_facts(TINY).linears)
    rows: list[int] = []
    forward = model.forward

    def seen(adapters: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
        if ids.shape[1] > 1:
            rows.append(len(ids))
        return forward(adapters, ids, **more)

    monkeypatch.setattr(model, "forward", seen)
    prompts = [
        Prompt(str(n), np.full(size, 5, np.int32), np.array([n], np.uint64)) for n, size in enumerate(lengths)
    ]
    call = Call("r", HeldRows(BASE, ""), prompts, Sampling(2), None)
    batch = GenericBatch(model, max_rows=64, cache_bytes=1 << 30)
    batch.arriving.append(call)
    while not call.ended:
        batch.run(1.0)
    assert rows == forwards


@pytest.mark.parametrize("family", ["gemma3", "mistral3"])
def test_towers_are_not_held_by_the_engine(family: str, tmp_path: Path) -> None:
    write_base(tmp_path, family)
    facts = read_facts(tmp_path)
    model = GenericModel.opened(tmp_path, torch.float32, CPU, facts.linears)
    assert model.nbytes() == 4 * facts.parameters
    assert set(model.linears) == set(facts.linears)
