"""Batches cut into micro-batches, rows without padding, and the blocks that attention makes of them."""

import numpy as np
import pytest
import torch

from lorad.models.base import Base
from lorad.models.loading import load_base
from lorad.protocol.batch import Batch
from lorad.trainers.builtin.blocks import LONG, Layout, Sequences, similar
from lorad.trainers.builtin.microbatch import BatchPiece, mixed, pack, plan
from lorad.trainers.builtin.stems import stems_of
from tests.conformance.reference import random_batch, write_random_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return load_base(write_random_model(tmp_path_factory.mktemp("base")), torch.float32, torch.device("cpu"))


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def ids_of(base: Base, *pieces: BatchPiece) -> list[int]:
    found: list[int] = pack(base, pieces).ids[0].tolist()
    return found


@pytest.mark.parametrize("budget", [1, 30, 60, 10_000])
def test_each_sample_is_in_exactly_one_piece(base: Base, budget: int) -> None:
    pieces = list(plan(random_batch(1, groups=5), budget, share=True))
    samples = [range(20)[piece.samples] for piece in pieces]
    assert [sample for some in samples for sample in some] == list(range(20))
    for piece, some in zip(pieces, samples, strict=True):
        assert len(ids_of(base, piece)) == piece.rows
        assert piece.rows <= budget or len(some) == 1


def test_the_same_batch_is_cut_the_same_way() -> None:
    first, second = ([p.samples for p in plan(random_batch(1, groups=5), 60, share=True)] for _ in range(2))
    assert first == second and len(first) > 1


def test_prompt_is_computed_once_per_group(base: Base) -> None:
    batch = Batch.of([(tokens(5, 5, 5), [tokens(6, 7), tokens(8, 9, 10, 11)]), (tokens(4), [tokens(3)])])
    (piece,) = plan(batch, 100, share=True)
    assert ids_of(base, piece) == [5, 5, 5, 4, 6, 8, 9, 10]
    assert pack(base, [piece]).predictors.tolist() == [2, 4, 2, 5, 6, 7, 3]


def test_the_example_of_the_module_is_true(base: Base) -> None:
    samples = ([tokens(10, 11, 12), tokens(20, 21)], [tokens(30, 31), tokens(40)])
    batch = Batch.of([(tokens(1, 2, 3), samples[0]), (tokens(4, 5), samples[1])])
    packed = pack(base, [*plan(batch, 100, share=True)])
    assert packed.ids[0].tolist() == [1, 2, 3, 4, 5, 10, 11, 20, 30]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 3, 4, 3, 2]
    assert packed.targets.tolist() == [10, 11, 12, 20, 21, 30, 31, 40]
    assert packed.predictors.tolist() == [2, 5, 6, 2, 7, 4, 8, 4]


def test_rows_without_targets_leave_before_the_last_layer(base: Base) -> None:
    batch = Batch.of([(tokens(5, 5), [tokens(6, 7), tokens(8)]), (tokens(4, 4, 4), [tokens(3, 2)])])
    found = pack(base, list(plan(batch, 5, share=True)))
    assert found.ids[0].tolist() == [5, 5, 6, 4, 4, 4, 3]
    assert (found.leaving.tolist(), found.places.tolist()) == ([1, 2, 5, 6], [0, 1, 0, 2, 3])
    assert found.parts == (slice(0, 2), slice(2, 4))


def test_equal_samples_of_a_group_are_computed_once(base: Base) -> None:
    group = [tokens(6, 7), tokens(8, 9), tokens(6, 7)]
    (piece,) = plan(Batch.of([(tokens(5), group), (tokens(5), group[:1])]), 100, share=True)
    assert ids_of(base, piece) == [5, 5, 6, 6, 8]  # the other group has a prompt of its own
    assert pack(base, [piece]).predictors.tolist() == [0, 3, 0, 4, 0, 3, 1, 2]


def test_what_prompts_begin_with_is_computed_once(base: Base) -> None:
    groups = [(tokens(7, 8, 9, 1), [tokens(6, 7), tokens(8)]), (tokens(7, 8, 9), [tokens(4, 5)])]
    (piece,) = plan(Batch.of(groups), 100, share=True)
    found = pack(base, [piece])
    assert piece.rows == 7
    assert found.ids[0].tolist() == [7, 8, 9, 1, 9, 4, 6]
    assert found.positions.tolist() == [0, 1, 2, 3, 2, 3, 4]
    assert found.predictors.tolist() == [3, 6, 3, 4, 5]
    (masked,) = plan(Batch.of(groups), 100, share=False)
    assert masked.rows == 9


def test_stems_branch() -> None:
    prompts = [
        tokens(*head, n) for n, head in enumerate([(7, 1, 1), (7, 2), (7, 1, 1), (7, 2), (7, 3), (4,)])
    ]
    found = stems_of(prompts, rows=20)
    assert (found.lengths.tolist(), found.starts.tolist()) == ([1, 2, 1], [0, 1, 1])
    assert (found.owner.tolist(), found.source.tolist()) == ([-1, 0, 0], [0, 0, 1])
    assert (found.of.tolist(), found.before.tolist()) == ([1, 2, 1, 2, 0, -1], [3, 2, 3, 2, 1, 0])
    assert found.left_out == 4 + 2 + 1


def test_a_prompt_keeps_its_last_token() -> None:
    assert stems_of([tokens(7, 8), tokens(7, 8), tokens(7, 8, 9)], rows=7).before.tolist() == [1, 1, 1]
    assert not stems_of([tokens(7), tokens(7), tokens(7)], rows=3)


def test_stems_are_made_where_they_leave_out_enough() -> None:
    prompts = [tokens(7, 7, n) for n in range(3)]
    assert [bool(stems_of(prompts, rows)) for rows in (80, 81)] == [True, False]


def test_with_dropout_every_sample_is_computed_for_itself(base: Base) -> None:
    (piece,) = plan(Batch.of([(tokens(5), [tokens(6, 7), tokens(6, 7)])]), 100, share=False)
    assert ids_of(base, piece) == [5, 6, 6]


def test_pieces_share_no_computed_rows(base: Base) -> None:
    batch = Batch.of([(tokens(5), [tokens(6, 7), tokens(8, 9, 9), tokens(6, 7)])])
    assert [ids_of(base, piece) for piece in plan(batch, 3, share=True)] == [[5, 6], [5, 8, 9], [5, 6]]


def test_a_batch_without_samples_has_no_piece() -> None:
    assert list(plan(Batch.of([]), 100, share=True)) == []


def test_prompt_without_samples_is_not_computed(base: Base) -> None:
    groups = [(tokens(9, 9), []), (tokens(5), [tokens(6, 7)])]
    (piece,) = plan(Batch.of([*groups, *groups, groups[0]]), 100, share=True)
    assert ids_of(base, piece) == [5, 6, 5, 6]


def test_pieces_of_several_slots_share_micro_batches(base: Base) -> None:
    batches = [random_batch(seed, groups=groups) for seed, groups in ((1, 5), (2, 1), (3, 9))]
    alone = [[piece.samples for piece in plan(batch, 40, share=True)] for batch in batches]
    joined = list(mixed([plan(batch, 40, share=True) for batch in batches], 90))
    for index, cuts in enumerate(alone):
        assert [pieces[index].samples for pieces in joined if index in pieces] == cuts
    assert all(sum(piece.rows for piece in pieces.values()) <= 90 for pieces in joined)
    assert max(len(pieces) for pieces in joined) > 1


def test_rows_and_tokens_of_each_piece_are_contiguous(base: Base) -> None:
    pieces = [next(plan(random_batch(seed), 1000, share=True)) for seed in (1, 2)]
    together, alone = pack(base, pieces), [pack(base, [piece]) for piece in pieces]
    for index, part in enumerate(alone):
        rows, of = together.rows[index], together.tokens[index]
        assert together.ids[0, rows].tolist() == part.ids[0].tolist()
        assert (together.predictors[of] - rows.start).tolist() == part.predictors.tolist()


def test_uneven_lengths_pad_little_even_in_attention() -> None:
    rng = np.random.default_rng(0)
    lengths = np.concatenate([np.full(64, 16), np.minimum(rng.geometric(1 / 16, 512), 64) - 1])
    owner = np.concatenate([np.full(64, -1), np.arange(512) // 8])
    runs = Sequences(np.cumsum(lengths) - lengths, lengths, owner)
    blocks = list(similar(runs))
    assert sorted(np.concatenate(blocks).tolist()) == np.flatnonzero(lengths).tolist()
    cells = sum(len(block) * int(lengths[block].max()) for block in blocks)
    assert cells <= 1.35 * lengths.sum() and len(blocks) <= 8


def test_fused_blocks_have_prompts_of_one_length() -> None:
    lengths = np.array([LONG, LONG + 1, 10, 10, 10])
    runs = Sequences(np.cumsum(lengths) - lengths, lengths, np.array([-1, -1, 0, 1, 0]))
    assert [block.tolist() for block in similar(runs)] == [[1, 0], [2, 4], [3]]


def test_short_sequences_do_not_join_long_ones() -> None:
    lengths = np.array([50, 300, 500, 1000, 200, 200, 200, 200])
    runs = Sequences(np.cumsum(lengths) - lengths, lengths, np.array([-1, -1, -1, -1, 0, 1, 2, 3]))
    assert [block.tolist() for block in similar(runs)] == [[3], [2], [1], [0], [4], [5], [6], [7]]


def test_padding_never_joins_prompts_of_different_length() -> None:
    lengths = np.array([LONG - 16, 10, 10, 20])
    runs = Sequences(np.cumsum(lengths) - lengths, lengths, np.array([-1, -1, 0, 1]))
    assert [block.tolist() for block in similar(runs)] == [[0], [1], [3], [2]]


def test_long_sequences_never_pad_short_ones() -> None:
    lengths = np.array([9, 10, 2 * LONG])
    runs = Sequences(np.cumsum(lengths) - lengths, lengths, np.array([-1, 0, 0]))
    assert [block.tolist() for block in similar(runs)] == [[0], [1], [2]]


def test_fused_prompts_have_no_mask(base: Base) -> None:
    lengths = np.array([LONG + 1, 5])
    runs = Sequences(np.array([0, LONG + 1]), lengths, np.array([-1, 0]))
    prompts, samples = Layout(base, LONG + 6, runs).move().blocks
    assert prompts.fused and prompts.bias is None
    assert samples.fused and samples.bias is not None and samples.bias.shape == (1, 1, 5, LONG + 6)
