"""What is the builtin trainer's own: its micro-batches, its optimizer, its arithmetic, its files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.numpy import save_file

from lorad.adapters.peft import write_peft
from lorad.errors import AdapterRefused, IntegrityError
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.decoder import hidden, logits
from lorad.models.loading import load_base
from lorad.models.lora import LoraApply
from lorad.protocol.batch import Batch, LossStats, Optimizer, PolicyLoss, PolicyTargets
from lorad.protocol.calls import ForwardBackward
from lorad.rl.loss import TokenLosses, loss_stats
from lorad.spec.algorithm import Preference
from lorad.trainers import head_rows
from lorad.trainers.base import Policy
from lorad.trainers.builtin import blocks, lora, passes, stems
from lorad.trainers.builtin.lora import SlotLora
from lorad.trainers.builtin.microbatch import pack, plan
from lorad.trainers.builtin.slot import Slot
from lorad.trainers.builtin.trainer import BuiltinTrainer
from lorad.trainers.slot_math import adamw, initial_a, l2_norm, spans_of
from tests.conformance.reference import random_batch, reference_logprobs, reference_model, write_random_model
from tests.conformance.trainer_kit import accumulate, flat, open_trained, saved, spec_for, targets_for, train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with an lm_head of its own and biased attention."""
    directory = tmp_path_factory.mktemp("untied")
    return write_random_model(directory, tie_word_embeddings=False, attention_bias=True)


@pytest.fixture
def compute() -> Iterator[Compute]:
    thread = Compute()
    yield thread
    thread.close()


@pytest.fixture
def trainer(untied: Path, compute: Compute) -> BuiltinTrainer:
    return BuiltinTrainer(load_base(untied, torch.float32, CPU), compute, str(untied))


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


# Micro-batches


async def test_neighbours_do_not_change_a_sample(trainer: BuiltinTrainer) -> None:
    batch = random_batch(3, groups=3)
    together = await trainer.logprobs(Policy(), batch)
    alone = [await trainer.logprobs(Policy(), Batch.of([(p, [c])])) for p, cs in batch.groups() for c in cs]
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-5)


async def test_single_tokens_are_predicted_by_the_prompt(trainer: BuiltinTrainer, untied: Path) -> None:
    batch = Batch.of([(tokens(5, 6), [tokens(7), tokens(8)]), (tokens(9), [tokens(1)])])
    expected = reference_logprobs(reference_model(untied), batch).detach().numpy()
    np.testing.assert_allclose(await trainer.logprobs(Policy(), batch), expected, atol=1e-4)
    await trainer.open("a", spec_for(trainer))
    assert (await accumulate(trainer, "a", batch)).tokens == 3


async def test_only_large_micro_batches_recompute(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch.of([(tokens(5, 6), [tokens(*range(length, 2 * length))]) for length in (20, 21, 60)])
    recomputed, plain, found = list[int](), passes.recomputing, []

    def counted(lora: SlotLora) -> Any:
        recomputed.append(1)
        return plain(lora)

    monkeypatch.setattr(passes, "recomputing", counted)
    for kept, count in ((48, 1), (100, 1), (0, 2)):  # 100: less fits once a micro-batch was halved to 48
        spec = spec_for(trainer, tokens_per_microbatch=48, activation_checkpointing=True, kept_tokens=kept)
        await trainer.open(str(kept), spec)
        recomputed.clear()
        found.append(await accumulate(trainer, str(kept), batch))
        assert len(recomputed) == count
    assert found[0] == found[1] == found[2]


async def test_sample_beyond_the_positions_is_refused(trainer: BuiltinTrainer) -> None:
    with pytest.raises(ValueError, match="257 tokens"):
        await trainer.logprobs(Policy(), Batch.of([(tokens(*[1] * 250), [tokens(*[1] * 7)])]))


# Gradients


async def test_gradients_on_lm_head_equal_pefts(
    trainer: BuiltinTrainer, untied: Path, tmp_path: Path
) -> None:
    await open_trained(trainer, "a")
    write_peft(await trainer.export("a"), tmp_path, str(untied))
    model, batch = reference_model(untied, tmp_path), random_batch(5)
    await accumulate(trainer, "a", batch)
    weights = targets_for(batch).advantages / batch.completions.size
    logprobs = reference_logprobs(model, batch)
    logprobs.backward(-logprobs.new_tensor(weights))
    theirs = {
        name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.grad is not None
    }
    slot = trainer._slots["a"]
    assert "lm_head.lora_B.weight" in slot.shapes
    for name, ours in slot.views(slot.grads).items():
        torch.testing.assert_close(ours, theirs[f"base_model.model.{name}"], atol=1e-5, rtol=1e-4)


async def test_sequence_ratios_draw_no_other_dropout(trainer: BuiltinTrainer) -> None:
    batch, gradients = random_batch(5), []
    for ratio in ("token", "sequence"):  # on-policy both ratios are 1
        await open_trained(trainer, ratio, dropout=0.3)
        loss, total = PolicyLoss(ratio=ratio), float(batch.completions.size)
        await trainer.forward_backward(ratio, batch, targets_for(batch), loss, total)
        gradients.append(trainer._slots[ratio].grads)
    assert gradients[0].norm() > 0.1
    torch.testing.assert_close(gradients[1], gradients[0])


async def test_chunks_of_logits_give_the_same_gradients(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slot in ("whole", "chunked"):
        await open_trained(trainer, slot)
    await accumulate(trainer, "whole", random_batch(5))
    monkeypatch.setattr(head_rows, "LOGITS", 128 * 7)
    monkeypatch.setattr(head_rows, "ROWS", 1)
    await accumulate(trainer, "chunked", random_batch(5))
    whole, chunked = (trainer._slots[slot].grads for slot in ("whole", "chunked"))
    assert whole.norm() > 0.1
    torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-4)


async def test_merged_slot_has_the_same_gradients(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, found, scored, merged = random_batch(5, groups=8), [], [], []
    apply = SlotLora.apply

    def counted(self: SlotLora, *given: Any) -> torch.Tensor:
        merged.append(self.is_merged)
        return apply(self, *given)

    monkeypatch.setattr(SlotLora, "apply", counted)
    for slot in ("merged", "beside"):
        await open_trained(trainer, slot)
        monkeypatch.setattr(lora, "gains_by_merging", lambda base, slot=slot: slot == "merged")
        merged.clear()
        await accumulate(trainer, slot, batch)
        found.append(trainer._slots[slot].grads)
        scored.append(await trainer.logprobs(Policy(slot, amplify=2.0), batch))
        assert {*merged} == {slot == "merged"}
    assert found[1].norm() > 0.1
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-4)
    np.testing.assert_allclose(scored[0], scored[1], atol=1e-5)


async def test_few_rows_are_not_worth_merging(trainer: BuiltinTrainer) -> None:
    await trainer.open("a", spec_for(trainer))
    for rows, is_merged in ((127, False), (128, True)):
        given = SlotLora([trainer._slots["a"]], [slice(0, rows)], train=True)
        assert given.merged(trainer._base)[1].is_merged == is_merged


async def test_tokens_alike_have_the_same_gradients(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer projects a word once; what all its tokens send back comes together."""
    made, seen = random_batch(5), []
    batch = replace(made, prompts=made.prompts % 11, completions=made.completions % 11)

    def counted(*given: Any) -> torch.Tensor:
        seen.append(given[6].first is not None)
        return hidden(*given)

    monkeypatch.setattr(passes, "hidden", counted)
    for slot in ("once", "each"):
        await open_trained(trainer, slot)
        seen.clear()
        if slot == "each":
            monkeypatch.setattr(passes, "First", lambda *_: None)
        await accumulate(trainer, slot, batch)
        assert {*seen} == {slot == "once"}
    once, each = (trainer._slots[slot].grads for slot in ("once", "each"))
    assert each.norm() > 0.1
    torch.testing.assert_close(once, each, atol=1e-5, rtol=1e-4)


def stemmed(seed: int, stem: int) -> Batch:
    """Groups of one to three samples whose prompts begin alike, and branch with every token."""
    draw = np.random.default_rng(seed)

    def some(most: int) -> np.ndarray:
        return draw.integers(0, 100, draw.integers(1, most + 1)).astype(np.int32)

    head = draw.integers(0, 100, stem).astype(np.int32)
    tails = [draw.integers(0, 2, draw.integers(1, 10)).astype(np.int32) for _ in range(12)]
    prompts = [np.concatenate([head, tail]) for tail in tails]
    return Batch.of([(prompt, [some(8) for _ in range(1 + n % 3)]) for n, prompt in enumerate(prompts)])


@pytest.mark.parametrize("long", [256, 12])
async def test_a_stem_changes_no_gradient(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch, long: int
) -> None:
    """With a stem for each of two slots, also where attention is fused, as without."""
    monkeypatch.setattr(blocks, "LONG", long)
    batches = {"a": stemmed(1, 9), "b": stemmed(2, 4)}
    for slot in batches:
        await open_trained(trainer, slot)
    found = []
    for worth in (1000, 0):
        monkeypatch.setattr(stems, "WORTH", worth)
        work = [ForwardBackward(b, _all_ones(b), PolicyLoss("linear"), 30.0, s) for s, b in batches.items()]
        await trainer.forward_backward_many(work)
        grads = [trainer._slots[slot].grads for slot in batches]
        logprobs = [torch.from_numpy(await trainer.logprobs(Policy(s), b)) for s, b in batches.items()]
        found.append([*(grad.clone() for grad in grads), *logprobs])
        for grad in grads:
            grad.zero_()
    assert min(values.norm() for values in found[0]) > 0.1
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-4)


def _all_ones(batch: Batch) -> PolicyTargets:
    return PolicyTargets(np.ones(batch.completions.size, np.float32))


@pytest.mark.parametrize(
    "loss", [PolicyLoss(ratio="sequence"), PolicyLoss("preference", preference=Preference())]
)
async def test_chunks_cut_no_loss_of_whole_samples(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch, loss: PolicyLoss
) -> None:
    batch = random_batch(5, groups=3, samples=2)
    targets = replace(targets_for(batch), reference_logprobs=targets_for(batch, 1).sampler_logprobs)
    for slot in ("whole", "chunked"):
        await open_trained(trainer, slot)
        stats = await trainer.forward_backward(slot, batch, targets, loss, 3.0)
        monkeypatch.setattr(head_rows, "LOGITS", 128 * 7)
        monkeypatch.setattr(head_rows, "ROWS", 1)
    whole, chunked = (trainer._slots[slot].grads for slot in ("whole", "chunked"))
    assert whole.norm() > 1e-3 and np.isfinite(stats.loss)
    torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-4)


async def test_logits_never_exist_for_all_tokens_at_once(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(base: Base, states: torch.Tensor, lora: LoraApply | None = None) -> torch.Tensor:
        made.append(states.shape[0] * base.config.vocab_size)
        return logits(base, states, lora)

    monkeypatch.setattr(passes, "logits", counted)
    monkeypatch.setattr(head_rows, "LOGITS", 128 * 7)
    monkeypatch.setattr(head_rows, "ROWS", 1)
    await open_trained(trainer, "a")
    await accumulate(trainer, "a", random_batch(5))
    await trainer.logprobs(Policy("a"), random_batch(5))
    assert len(made) > 10 and max(made) <= 128 * 7


@pytest.mark.parametrize("vocab", [100, 2**15, 2**18])
def test_chunk_of_logits_takes_bounded_memory(vocab: int) -> None:
    rows = head_rows.rows_at_once(vocab, torch.device("cpu"))
    assert rows >= 128 and 4 * rows * vocab <= 128 * 2**20


@pytest.mark.parametrize(("most", "count"), [(7, 25), (120, 2)])  # 49, 57 and 57 tokens
def test_joint_chunks_cut_each_slot_as_alone(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch, most: int, count: int
) -> None:
    """A dropout mask on the head is drawn chunk by chunk, and a GPU draws another one for other rows."""
    monkeypatch.setattr(head_rows, "LOGITS", 128 * most)
    monkeypatch.setattr(head_rows, "ROWS", 1)
    pieces = [next(plan(random_batch(seed), 1000, share=False)) for seed in (1, 2, 3)]
    together = pack(trainer._base, pieces)
    chunks = list(passes._chunks(trainer._base, together))
    assert [token for chunk in chunks for token in range(10_000)[chunk]] == list(
        range(together.targets.numel())
    )
    assert max(chunk.stop - chunk.start for chunk in chunks) <= most
    alone = [list(passes._chunks(trainer._base, pack(trainer._base, [piece]))) for piece in pieces]
    within = [passes._within(together.tokens, chunk) for chunk in chunks]
    for index, cuts in enumerate(alone):
        ours = [found[index].stop - found[index].start for found in within]
        assert [size for size in ours if size] == [cut.stop - cut.start for cut in cuts]
    assert len(chunks) == count


async def test_statistics_are_read_once_for_each_slot(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counted(losses: TokenLosses, *others: Any) -> LossStats:
        read.append(losses.loss.numel())
        return loss_stats(losses, *others)

    monkeypatch.setattr(passes, "loss_stats", counted)
    monkeypatch.setattr(head_rows, "LOGITS", 128 * 7)
    monkeypatch.setattr(head_rows, "ROWS", 1)
    await trainer.open("a", spec_for(trainer))
    batch = random_batch(5)
    assert (await accumulate(trainer, "a", batch)).tokens == batch.completions.size
    assert read == [batch.completions.size]


@pytest.mark.parametrize("budget", [16384, 200])
async def test_slots_share_the_passes_of_one_call(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    rows: list[int] = []

    def counted(base: Base, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(ids.numel())
        return hidden(base, ids, *rest)

    monkeypatch.setattr(passes, "hidden", counted)
    work = []
    for seed in range(4):
        await trainer.open(str(seed), spec_for(trainer, tokens_per_microbatch=budget))
        batch = random_batch(seed)
        work.append(ForwardBackward(batch, targets_for(batch), PolicyLoss(), 1.0, str(seed)))
    await trainer.forward_backward_many(work)
    assert max(rows) <= budget and len(rows) == (1 if budget == 16384 else 2)


async def test_a_pass_without_memory_is_halved(
    trainer: BuiltinTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU without memory would have it, amid a call; the numbers are those of smaller micro-batches."""
    plain, most = hidden, [16384]

    def limited(base: Base, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if ids.numel() > most[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(base, ids, *rest)

    monkeypatch.setattr(passes, "hidden", limited)
    trainer._may_halve = True
    for name, budget in (("small", 60), ("large", 120)):
        await trainer.open(name, spec_for(trainer, dropout=0.1, tokens_per_microbatch=budget))
    batch = random_batch(5, groups=8)
    small = await accumulate(trainer, "small", batch)
    most[0] = 60
    large = await accumulate(trainer, "large", batch)
    assert (small.halved_to, large.halved_to, large.loss) == (0, 60, small.loss)
    assert torch.equal(*(trainer._slots[name].grads for name in ("small", "large")))
    assert (await accumulate(trainer, "large", batch)).halved_to == 0
    most[0] = 10  # a sample alone is larger
    with pytest.raises(torch.OutOfMemoryError):
        await accumulate(trainer, "large", batch)


def test_dropout_draws_a_mask_per_module(trainer: BuiltinTrainer, untied: Path) -> None:
    slot = Slot(load_base(untied, torch.float32, CPU), spec_for(trainer, dropout=0.25))
    slot.weights.normal_(generator=torch.Generator().manual_seed(0))
    x, state = torch.randn(3, 64), slot.dropout.get_state()
    found = SlotLora([slot], [slice(0, 3)], train=True).apply(0, "gate_up", x, torch.zeros(3, 192))
    generator, weights, expected = torch.Generator(), slot.views(slot.weights), []
    generator.set_state(state)
    for module in ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"):
        kept = torch.empty_like(x).bernoulli_(0.75, generator=generator)
        a, b = (weights[f"{module}.lora_{half}.weight"] for half in "AB")
        expected.append(2 * (x * kept / 0.75) @ a.t() @ b.t())
    torch.testing.assert_close(found.detach(), torch.cat(expected, -1))


# Optimizer and init


def test_the_norm_of_many_numbers_is_right() -> None:
    assert l2_norm(torch.full((2**24,), 1e-3)) == pytest.approx(1e-3 * 2**12, rel=1e-4)
    assert l2_norm(torch.tensor([3.0, 4.0])) == 5


@pytest.mark.parametrize("ratio", [1.0, 12.0])
def test_optimizer_equals_torchs_adamw_bit_for_bit(ratio: float) -> None:
    """With LoRA+ it equals torch's with a parameter group for A and one for B."""
    optimizer = Optimizer(betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, loraplus_lr_ratio=ratio)
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(100, generator=generator)
    theirs = [torch.nn.Parameter(part.clone()) for part in ours.split(25)]  # A, B, A, B
    groups = [{"params": theirs[::2]}, {"params": theirs[1::2]}]
    judge = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, foreach=True)
    moments, spans = (torch.zeros(100), torch.zeros(100)), spans_of([(25, False), (25, True)] * 2, 0, 100)
    for step, lr in enumerate((1e-2, 3e-3, 0.0, 1e-1), start=1):
        grads = torch.randn(100, generator=generator)
        for parameter, grad in zip(theirs, grads.split(25), strict=True):
            parameter.grad = grad
        for group, times in zip(judge.param_groups, (1, ratio), strict=True):
            group["lr"] = times * lr
        judge.step()
        adamw(ours, grads, *moments, step, lr, optimizer, spans)
    assert torch.equal(ours, torch.cat([parameter.detach() for parameter in theirs]))


def test_spans_cover_a_share_of_a_vector() -> None:
    sizes = [(3, False), (2, True), (2, True), (4, False), (1, True)]
    assert spans_of(sizes, 0, 12) == [
        (slice(0, 3), False),
        (slice(3, 7), True),
        (slice(7, 11), False),
        (slice(11, 12), True),
    ]
    assert spans_of(sizes, 4, 8) == [(slice(0, 3), True), (slice(3, 4), False)]


@pytest.mark.parametrize(
    ("kind", "std"), [("kaiming", 3**-0.5 / 20), ("xavier", (2 / 500) ** 0.5), ("normal", 0.2)]
)
def test_a_begins_with_the_spread_of_its_init(kind: str, std: float) -> None:
    a = initial_a(kind, (100, 400), torch.Generator().manual_seed(0))
    assert a.std().item() == pytest.approx(std, rel=0.02)
    assert a.mean().item() == pytest.approx(0, abs=std / 50)


def test_kaiming_is_what_peft_draws() -> None:
    judge = torch.empty(16, 32)
    torch.nn.init.kaiming_uniform_(judge, a=5**0.5, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(initial_a("kaiming", (16, 32), torch.Generator().manual_seed(3)), judge)


async def test_init_can_be_zero_but_not_unknown(trainer: BuiltinTrainer) -> None:
    await trainer.open("zero", spec_for(trainer, init="zero"))
    assert not flat(await trainer.export("zero")).any()
    with pytest.raises(AdapterRefused, match="orthogonal"):
        await trainer.open("other", spec_for(trainer, init="orthogonal"))


# Checkpoints


async def test_foreign_generator_state_matters_only_with_dropout(
    trainer: BuiltinTrainer, tmp_path: Path
) -> None:
    for slot, dropout in (("still", 0.0), ("drawn", 0.5)):
        await open_trained(trainer, slot, dropout=dropout)
        directory = await saved(trainer, slot, tmp_path / slot)
        save_file({"dropout": np.zeros(16, np.uint8)}, directory / "rng.safetensors")  # as a GPU's
    await trainer.load("still", tmp_path / "still")
    before = flat(await trainer.export("drawn"))
    with pytest.raises(IntegrityError, match="no state of a generator on cpu"):
        await trainer.load("drawn", tmp_path / "drawn")
    assert np.array_equal(flat(await trainer.export("drawn")), before)


# bfloat16


async def test_a_bfloat16_base_trains_an_fp32_adapter(untied: Path, compute: Compute) -> None:
    half = BuiltinTrainer(load_base(untied, torch.bfloat16, CPU), compute)
    full = BuiltinTrainer(load_base(untied, torch.float32, CPU), compute)
    assert half.capabilities().dtype == "bfloat16"
    for trainer in (half, full):
        await open_trained(trainer, "a")
    ours, theirs = [(await train(trainer, "a", range(5, 6)))[0] for trainer in (half, full)]
    assert ours[1].grad_norm == pytest.approx(theirs[1].grad_norm, rel=0.1)
    exported = await half.export("a")
    assert {tensor.dtype for tensor in exported.tensors.values()} == {np.dtype(np.float32)}


async def test_all_differences_from_a_source_are_told(trainer: BuiltinTrainer, tmp_path: Path) -> None:
    await open_trained(trainer, "a")
    directory = await saved(trainer, "a", tmp_path / "a")
    other = spec_for(trainer, source=directory)
    other = replace(
        other, adapter=replace(other.adapter, rank=2, alpha=1.0, modules=other.adapter.modules[:1])
    )
    with pytest.raises(AdapterRefused, match=r"its modules is .*; its rank is .*; its scale is "):
        await trainer.open("b", other)
