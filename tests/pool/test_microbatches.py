"""How large micro-batches are where the spec leaves it open, and that what passes keep fits in what was
counted.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as with_

from lorad.adapters.adapter import AdapterConfig
from lorad.box.machine import NO_LIMIT, read_machine
from lorad.models.compute import Compute
from lorad.models.facts import read_facts
from lorad.models.loading import load_base
from lorad.pool import capacity, microbatches
from lorad.pool.microbatches import Room, choose_sizes, room_for
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets
from lorad.protocol.calls import Open
from lorad.protocol.pool_setup import PoolSetup, RanksSetup
from lorad.trainers.base import SlotSpec
from lorad.trainers.builtin import passes
from lorad.trainers.builtin.trainer import BuiltinTrainer
from tests.kit.pool_kit import config_of
from tests.models.test_families import make_model

OPEN = Open(modules=(), rank=8, alpha=16, longest=1500)
ROOM = Room(bytes=8_000_000, token=1000, dropout=500, recomputed=100)
GIB = 1 << 30


def room(config: PoolSetup) -> Room:
    return room_for(config, read_facts(Path(config.model_path)))


@pytest.mark.parametrize(
    ("asked", "tokens", "recomputes"),
    [
        ({}, 4096, False),
        ({"dropout": 0.1}, 4096, False),
        ({"dora": True, "tokens_per_microbatch": 6000}, 6000, True),
        ({"longest": 9000}, 16384, True),
        ({"activation_checkpointing": True}, 16384, True),
        ({"activation_checkpointing": False, "longest": 9000}, 4096, False),
        ({"tokens_per_microbatch": 500}, 500, False),
        ({"tokens_per_microbatch": 9000}, 9000, True),
        ({"tokens_per_microbatch": 9000, "activation_checkpointing": False}, 9000, False),
    ],
)
def test_what_fits_is_chosen(asked: dict[str, Any], tokens: int, recomputes: bool) -> None:
    found = choose_sizes(with_(OPEN, **asked), ROOM)
    assert (found.tokens_per_microbatch, found.activation_checkpointing) == (tokens, recomputes)


@pytest.mark.parametrize(
    ("asked", "tokens", "kept"),
    [
        ({}, 4096, 0),
        ({"longest": 9000}, 4096, 8000),
        ({"longest": 9000, "dropout": 0.1}, 4096, 5333),
        ({"tokens_per_microbatch": 9000}, 9000, 8000),
        ({"activation_checkpointing": True}, 16384, 0),
    ],
)
def test_only_what_does_not_fit_is_recomputed(asked: dict[str, Any], tokens: int, kept: int) -> None:
    found = choose_sizes(with_(OPEN, **asked), with_(ROOM, is_mixed=True))
    assert (found.tokens_per_microbatch, found.kept_tokens) == (tokens, kept)
    assert found.activation_checkpointing or not kept


@pytest.mark.parametrize(
    ("asked", "tokens", "kept"),
    [
        ({}, 16384, 8000),
        ({"dropout": 0.1}, 16384, 5333),
        ({"tokens_per_microbatch": 6000}, 6000, 0),
        ({"activation_checkpointing": False}, 7168, 0),
    ],
)
def test_small_ones_on_a_gpu_are_recomputed(asked: dict[str, Any], tokens: int, kept: int) -> None:
    """They keep their activations where the spec says so, or says how large they are."""
    found = choose_sizes(with_(OPEN, **asked), with_(ROOM, is_mixed=True, plenty=8001))
    assert (found.tokens_per_microbatch, found.kept_tokens) == (tokens, kept)
    assert found.activation_checkpointing is bool(kept)


def test_8b_on_h100_trains_many_tokens_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_total", lambda _: 80 * GIB)
    config = config_of(model, model_path=str(model), device="cuda:0")
    assert room(config).plenty == 4096 and not room(with_(config, device="cpu")).plenty
    left = choose_sizes(OPEN, Room(13 * GIB, 7_640_000, 0, 560_000, is_mixed=True, plenty=4096))
    assert (left.tokens_per_microbatch, left.kept_tokens) == (16384, 1827)
    more = choose_sizes(OPEN, Room(54 * GIB, 7_640_000, 0, 560_000, is_mixed=True, plenty=4096))
    assert (more.tokens_per_microbatch, more.activation_checkpointing) == (7168, False)


def test_idle_cache_makes_room_for_activations(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_total", lambda _: 80 * GIB)
    config = config_of(model, model_path=str(model), device="cuda:0", deterministic=False)
    assert 20 * GIB < room(config).lent < 26 * GIB
    others: list[dict[str, Any]] = [{"deterministic": True}, {"device": "cpu"}, {"mode": "resident"}]
    for other in [*others, {"engine_class": "m:E"}]:
        assert not room(with_(config, **other)).lent
    of_8b = Room(13 * GIB, 7_640_000, 0, 560_000, is_mixed=True, plenty=4096, lent=17 * GIB)
    found = choose_sizes(OPEN, of_8b)
    assert (found.tokens_per_microbatch, found.activation_checkpointing) == (16384, True)
    assert (found.kept_tokens, found.lent_tokens) == (1827, 4096)
    few: list[dict[str, Any]] = [{"lent": 10 * GIB}, {"is_mixed": False}]  # too little, and ranks
    for less in few:
        assert not choose_sizes(OPEN, with_(of_8b, **less)).lent_tokens
    for asked in ({"longest": 6000}, {"tokens_per_microbatch": 16384}):
        assert not choose_sizes(with_(OPEN, **asked), of_8b).lent_tokens


def test_little_memory_still_makes_micro_batches() -> None:
    found = choose_sizes(OPEN, with_(ROOM, bytes=1))
    assert (found.tokens_per_microbatch, found.activation_checkpointing) == (1024, True)


def test_megatron_on_a_cpu_gets_small_ones(model: Path) -> None:
    """Its attention there holds tokens x tokens."""
    most = {
        trainer: room(config_of(model, model_path=str(model), trainer=trainer, ranks=RanksSetup())).most
        for trainer in ("fsdp", "megatron")
    }
    assert most == {"fsdp": 16384, "megatron": 2048}
    assert choose_sizes(OPEN, Room(most=2048)).tokens_per_microbatch == 2048


@pytest.mark.parametrize(("dtype", "most"), [("float32", 2048), ("bfloat16", 16384)])
def test_fp32_megatron_on_gpu_gets_small_ones(
    model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, most: int
) -> None:
    """No fused attention has that dtype."""
    monkeypatch.setattr(capacity, "_total", lambda _: 80 * GIB)
    config = config_of(model, model_path=str(model), trainer="megatron", ranks=RanksSetup(), device="cuda:0")
    assert room(with_(config, dtype=dtype)).most == most


def test_unknown_memory_is_taken_to_be_enough() -> None:
    found = choose_sizes(OPEN, Room())
    assert (found.tokens_per_microbatch, found.activation_checkpointing) == (16384, False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "head_dim": 32,
        "max_position_embeddings": 2048,
    }
    make_model(directory, "qwen3", **sizes)
    return directory


@pytest.mark.parametrize(("dropout", "dora"), [(0.0, False), (0.1, False), (0.0, True)])
async def test_passes_keep_no_more_than_was_counted(
    model: Path, monkeypatch: pytest.MonkeyPatch, dropout: float, dora: bool
) -> None:
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def counted(*args: Any) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            states: torch.Tensor = plain(*args)
        return states

    plain = passes.predicting_states
    monkeypatch.setattr(passes, "predicting_states", counted)
    modules = tuple(sorted(name for name in read_facts(model).linears if name != "lm_head"))
    adapter, compute, totals = AdapterConfig(8, 16, modules, dropout=dropout, dora=dora), Compute(), []
    trainer = BuiltinTrainer(load_base(model, torch.float32, torch.device("cpu")), compute, "model")
    await trainer.open("a", SlotSpec(adapter))
    for length in (500, 1500):
        kept.clear()
        batch = Batch.of([(np.array([1, 2], np.int32), [np.full(length - 2, 3, np.int32)])])
        targets = PolicyTargets(np.ones(length - 2, np.float32))
        await trainer.forward_backward("a", batch, targets, PolicyLoss(), 1.0)
        totals.append(sum(kept.values()))
    compute.close()
    found = room(config_of(model, model_path=str(model)))
    measured = (totals[1] - totals[0]) / 1000
    assert 0.5 < measured / (found.token + found.dropout * bool(dropout or dora)) < 1
    if dora:
        assert measured > found.token


def test_memory_is_what_the_bases_leave(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_total", lambda _: 80 * GIB)
    base, gpu = read_facts(model).bytes("float32"), config_of(model, model_path=str(model), device="cuda:0")
    left = int(80 * GIB * 0.85) - base
    assert room(gpu).bytes == pytest.approx(left / 4, abs=8)
    ranks = with_(gpu, ranks=RanksSetup(dp=2), trainer="fsdp", mode="timesliced")
    shard = -(-base // 2)
    assert room(ranks).bytes == pytest.approx((left + base - shard) * 3 / 4, abs=8)
    beside = room(with_(ranks, mode="resident")).bytes
    assert beside == pytest.approx((80 * GIB * 0.85 / 2 - shard) * 3 / 4, rel=1e-3)


def test_cpu_without_a_limit_has_the_most(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def machine(memory: int) -> int:
        found = replace(read_machine(), memory=memory)
        monkeypatch.setattr(microbatches, "read_machine", lambda: found)
        return room(config_of(model, model_path=str(model))).bytes

    assert machine(NO_LIMIT) == 0
    assert 0 < machine(24 * GIB) < machine(48 * GIB)
    assert machine(2 * GIB) == 0


def test_experts_count_as_many_as_a_token_meets(tmp_path: Path) -> None:
    """A mixture of 4 experts, of which a token meets 2, keeps as much as one whose experts are twice 2."""
    tokens = {}
    for count in (2, 4):
        directory = tmp_path / str(count)
        make_model(directory, "qwen3_moe", num_experts=count)
        tokens[count] = room(config_of(directory, model_path=str(directory))).token
    assert tokens[2] == pytest.approx(tokens[4], rel=0.01)
