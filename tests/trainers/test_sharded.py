"""What trainers of several ranks share: how a batch is cut over ranks and rows, and the optimizer over flat
vectors.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lorad.adapters.adapter import AdapterConfig
from lorad.models.directory import BUILTIN
from lorad.models.loading import load_base
from lorad.models.packed import Packed
from lorad.protocol.batch import Batch, Optimizer, PolicyLoss
from lorad.protocol.calls import ForwardBackward, OptimStep
from lorad.protocol.pool_setup import Quantize
from lorad.trainers.base import CloseSlot, ExportSlot, Offload, OpenSlot, SlotSpec
from lorad.trainers.fsdp.adapter import is_adapter
from lorad.trainers.fsdp.body import open_body
from lorad.trainers.fsdp.weights import weights
from lorad.trainers.sharded.body import BodySettings
from lorad.trainers.sharded.rows import cut, pack, plan, sequences, share
from lorad.trainers.sharded.slot import ParameterSection, ShardedSlot
from lorad.trainers.sharded.trainer import RankTrainer
from lorad.trainers.sharded.workers import Calls, DataParallel
from tests.conformance.reference import random_batch
from tests.conformance.trainer_kit import targets_for
from tests.kit.fakes import rank_kit

CPU = torch.device("cpu")
SPEC = SlotSpec(
    AdapterConfig(2, 4, ("model.layers.0.self_attn.q_proj",)), optimizer=Optimizer(weight_decay=0.1)
)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_share_a_batch_without_overlap(size: int) -> None:
    everything = sequences(random_batch(1, groups=5))
    parts = [share(everything, rank, size) for rank in range(size)]
    assert sorted(s.sample for part in parts for s in part) == list(range(20))
    loads = [sum(s.inputs for s in part) for part in parts]
    assert max(loads) - min(loads) <= max(s.inputs for s in everything)


@pytest.mark.parametrize("budget", [1, 30, 16384])
def test_micro_batches_keep_the_budget_and_the_order(budget: int) -> None:
    everything = sequences(random_batch(1, groups=5))
    rows = list(plan(everything, budget, packs=True))
    assert [s.sample for row in rows for s in row] == list(range(20))
    assert all(len(row) == 1 or sum(s.inputs for s in row) <= budget for row in rows)


def test_without_packing_each_sequence_has_a_row() -> None:
    assert {len(row) for row in plan(sequences(random_batch(1)), 16384, packs=False)} == {1}


def test_row_maps_completion_tokens_to_predictors() -> None:
    batch = Batch.of([(np.array([5, 6, 7]), [np.array([8, 9]), np.array([3])])])
    rows = pack(sequences(batch), CPU)
    assert rows.ids.tolist() == [[5, 6, 7, 8, 5, 6, 7]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert rows.starts.tolist() == [0, 4, 7]
    assert rows.predictors.tolist() == [2, 3, 6]
    assert rows.targets.tolist() == [8, 9, 3]
    assert rows.places.tolist() == [0, 1, 2]


def test_row_predicts_only_sampled_tokens() -> None:
    prompt, samples = np.array([5, 6, 7]), [np.array([8, 9, 4]), np.array([3, 2])]
    sampled = [np.array([True, False, True]), np.array([False, True])]
    rows = pack(sequences(Batch.of([(prompt, samples)], sampled)), CPU)
    assert rows.ids.tolist() == [[5, 6, 7, 8, 9, 5, 6, 7, 3]]
    assert rows.predictors.tolist() == [2, 4, 8]
    assert (rows.targets.tolist(), rows.places.tolist()) == ([8, 4, 2], [0, 1, 2])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_parts_of_a_row_are_the_row(size: int) -> None:
    row = pack(sequences(random_batch(1, groups=2)), CPU)
    tokens, parts = row.ids.shape[1], [cut(row, DataParallel(rank, size)) for rank in range(size)]
    assert {part.ids.shape[1] for part in parts} == {-(-tokens // size)}
    for name in ("ids", "positions"):
        joined = torch.cat([getattr(part, name) for part in parts], 1)
        assert torch.equal(joined[:, :tokens], getattr(row, name))
    predicted = [part.ids[0][part.predictors] for part in parts]
    assert torch.equal(torch.cat(predicted), row.ids[0][row.predictors])
    assert torch.equal(torch.cat([part.targets for part in parts]), row.targets)
    assert np.array_equal(np.concatenate([part.places for part in parts]), row.places)
    assert sum(part.tokens for part in parts) == tokens
    padded = {part.cut.starts for part in parts if part.cut is not None}
    assert len(padded) == 1 and [*padded.pop()][: len(row.starts)] == row.starts.tolist()


def test_a_row_of_nothing_asks_for_nothing() -> None:
    rows = pack([], CPU)
    assert rows.ids.shape == (1, 1) and rows.targets.numel() == rows.predictors.numel() == 0


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("ratio", [1.0, 16.0])
def test_a_step_is_that_of_torch(ratio: float) -> None:
    torch.manual_seed(0)
    optimizer = Optimizer(weight_decay=0.1, loraplus_lr_ratio=ratio)
    parameters = [torch.nn.Parameter(torch.randn(2, 3)), torch.nn.Parameter(torch.randn(4, 2))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    section = ParameterSection([p.shape for p in parameters], DataParallel(), are_b=[False, True])
    slot = ShardedSlot(msgspec.structs.replace(SPEC, optimizer=optimizer), DataParallel(), [section])
    slot.fill(slot.weights, [p.detach().clone() for p in parameters])
    slot.bind(parameters)
    groups: list[dict[str, Any]] = [{"params": theirs[:1]}, {"params": theirs[1:], "lr": ratio * 0.1}]
    adam = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)
    for _ in range(3):
        for group in (parameters, theirs):
            sum((p**3).sum() for p in group).backward()  # type: ignore[union-attr]
        slot.collect(parameters)
        norm, applied = slot.optim_step(0.1, 0.5)
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs, 0.5)), rel=1e-5) and applied
        adam.step()
        adam.zero_grad()
    for ours, other in zip(parameters, theirs, strict=True):
        torch.testing.assert_close(ours.detach(), other.detach())


@pytest.mark.usefixtures("alone")
def test_gradients_of_bfloat16_parameters_accumulate_in_fp32() -> None:
    parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    slot = ShardedSlot(SPEC, DataParallel(), [ParameterSection([parameter.shape], DataParallel())])
    slot.fill(slot.weights, [torch.full((8,), 1.0009765625)])  # not a number of bfloat16
    slot.bind([parameter])
    for _ in range(257):
        (parameter * 1.0).sum().backward()
        slot.collect([parameter])
    assert slot.grads.tolist() == [257.0] * 8  # bfloat16 would stay at 256
    assert slot.weights.tolist() == [1.0009765625] * 8 and parameter.grad is None


@pytest.mark.usefixtures("alone")
def test_offloading_gives_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    body, order = rank_kit.TinyBody(BodySettings(model="", dtype="float32", device="cpu")), []
    monkeypatch.setattr(body, "offload", lambda: order.append("offload"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("empty cache"))
    trainer = RankTrainer(body, Calls(None), "base")
    trainer.offload(Offload())
    assert order == ["offload"]  # a CPU keeps nothing
    body.device = torch.device("cuda", 0)
    trainer.offload(Offload())
    assert order == ["offload", "offload", "empty cache"]


@pytest.mark.usefixtures("alone")
def test_offloaded_slots_end_as_resident_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device is not the host's memory, of which a CPU knows only the name `cpu:0`."""
    ends = []
    for host in (torch.device("cpu", 0), CPU):
        monkeypatch.setattr("lorad.trainers.sharded.trainer.HOST", host)
        body = rank_kit.TinyBody(BodySettings(model="", dtype="float32", device="cpu"))
        trainer = RankTrainer(body, Calls(None), "base")
        wide = msgspec.structs.replace(rank_kit.SPEC, adapter=AdapterConfig(3, 4.0, (rank_kit.MODULE,)))
        for name, spec in (("a", rank_kit.SPEC), ("b", rank_kit.SPEC), ("c", wide)):
            trainer.open(OpenSlot(name, spec))
        for _ in range(3):
            for name in "abc":
                batch = rank_kit.batch()
                work = ForwardBackward(batch, rank_kit.targets(batch), rank_kit.LOSS, 10.0, name)
                trainer.forward_backward(work)
            for name in "cba":
                trainer.optim_step(OptimStep(0.1, 1.0, slot=name))
        trainer.close(CloseSlot("a"))
        trainer.open(OpenSlot("a", rank_kit.SPEC))
        ends.append([trainer.export(ExportSlot(name)).digest() for name in "abc"])
    assert ends[0] == ends[1] and len(set(ends[0])) == 3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("amid", ["forward", "backward"])
def test_fsdp_forgets_a_pass_without_memory(amid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = BodySettings(model=str(BUILTIN["builtin:tiny"]), dtype="float32", device="cpu")
    body: Any = open_body(settings)
    body.may_forget = True
    trainer, batch, most, ends = RankTrainer(body, Calls(None), "base"), random_batch(5, groups=2), 60, []

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def limited(_: object, __: object, output: torch.Tensor) -> None:
        if output.shape[1] > most:
            no_memory() if amid == "forward" else output.register_hook(no_memory)

    body._layers[1].mlp.register_forward_hook(limited)
    for name, budget in (("small", most), ("large", 2 * most)):
        trainer.open(OpenSlot(name, msgspec.structs.replace(SPEC, tokens_per_microbatch=budget)))
        work = ForwardBackward(batch, targets_for(batch), PolicyLoss(), 10.0, name)
        ends.append((trainer.forward_backward(work), trainer.slots[name].grads.clone()))
    (small, few), (large, many) = ends
    assert (small.halved_to, large.halved_to, large.loss) == (0, most, small.loss)
    assert torch.equal(few, many) and few.any()
    base = [tensor for name, tensor in body.model.named_parameters() if not is_adapter(name)]
    assert all(isinstance(tensor, DTensor) for tensor in base)  # none stays gathered


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("whole", [False, True])
def test_fsdp_pins_its_base_once(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = list[torch.Tensor]()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        assert not isinstance(tensor, DTensor)  # torch pins none
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    model = str(BUILTIN["builtin:tiny"])
    body: Any = open_body(BodySettings(model=model, dtype="float32", device="cpu", whole=whole))
    before = body.checksum()
    body.device = torch.device("cuda")
    body.offload()
    copies = len(pinned)
    body.offload()
    base = [tensor for name, tensor in body.model.named_parameters() if not is_adapter(name)]
    shards = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in base]
    assert {tensor.data_ptr() for tensor in shards} <= {tensor.data_ptr() for tensor in pinned}
    assert len(pinned) == copies and body.checksum() == before


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("form", ["nf4", "fp8"])
def test_fsdp_rounds_to_builtins_bits(form: Quantize) -> None:
    model = BUILTIN["builtin:tiny"]
    body: Any = open_body(BodySettings(model=str(model), dtype="float32", device="cpu", quantize=form))
    found: dict[str, Any] = dict(weights(body.model))
    for number, layer in enumerate(load_base(model, torch.float32, CPU, form).layers):
        for names, packed in (
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.qkv),
            (("self_attn.o_proj",), layer.o),
            (("mlp.gate_proj", "mlp.up_proj"), layer.gate_up),
            (("mlp.down_proj",), layer.down),
        ):
            own = [found[f"model.layers.{number}.{name}.weight"].full_tensor() for name in names]
            assert isinstance(packed, Packed) and torch.equal(torch.cat(own), packed.dense())
