"""A micro-batch through this rank's layers: sequences packed in one row; only predictors are scored."""

from typing import Any

import torch
from torch import Tensor, nn

from lorad.rl.loss import VocabularyPart
from lorad.trainers.sharded.head import Head, Visit
from lorad.trainers.sharded.rows import Rows


def predict(
    model: nn.Module,
    rows: Rows,
    vocab: int,
    *,
    packed: bool,
    recompute: bool,
    tp: int,
    below: Tensor | None = None,
    visit: Visit | None = None,
) -> Tensor:
    """Return the last hidden states, [M, hidden], on every tensor-parallel rank, or what the next stage gets.

    Each rank's head scores its part of the vocabulary, for a loss that all ranks compute alike.

    Args:
        packed: Whether attention takes sequences as they are. Else it gets a mask of N * N booleans (and
            makes N * N scores per head), which is for small N. Positions count from the row's beginning then:
            rotary embeddings only see differences.
        recompute: Whether Megatron recomputes everything, one layer at a time.
        below: The hidden states of the stage below, shaped as `hidden_shape` says.
        visit: See `Body.states`; only the last stage makes it.
    """
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    config: Any = model.config
    decoder: Any = model.get_submodule("decoder")
    ids, positions, starts = _padded(rows, tp)
    config.recompute_granularity = "full" if recompute else None
    config.recompute_method, config.recompute_num_layers = ("uniform", 1) if recompute else (None, None)
    entering = (
        model.get_submodule("embedding")(input_ids=ids, position_ids=positions) if below is None else below
    )
    # Megatron's checkpoint has no backward unless its input has one; and ranks with other experts wait for
    # this one's backward in every layer that has an adapter there
    spread = parallel_state.get_expert_model_parallel_world_size() > 1
    if (recompute or spread) and torch.is_grad_enabled():
        entering.requires_grad_()
    decoder.set_input_tensor(below)
    mask = None
    packing = None
    if packed:
        longest = max(int((rows.starts[1:] - rows.starts[:-1]).max()), tp)
        packing = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    else:  # true where a token must not look, ahead or into another sequence: [1, 1, N, N]
        sequence = (positions[0] == 0).cumsum(0)
        mask = ~(sequence[:, None] == sequence[None]).tril()[None, None]

    def score(
        *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, **_: object
    ) -> Tensor:
        at = hidden_states[:, 0].index_select(0, rows.predictors)
        if visit is not None:
            visit(at, _head(output_layer, output_weight, vocab, tp))
        return at

    states: Tensor = model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask,
        decoder_input=entering,
        packed_seq_params=packing,
        output_processor=score,
    )
    decoder.set_input_tensor(None)
    return states


def _head(output_layer: nn.Module, weight: Tensor | None, vocab: int, tp: int) -> Head:
    """Return this rank's output layer: Megatron pads a vocabulary so that each rank has as many columns."""
    from megatron.core import parallel_state

    bare: Any = getattr(output_layer, "to_wrap", output_layer)
    columns: int = bare.output_size_per_partition

    def scores(states: Tensor) -> Tensor:
        logits: Tensor = output_layer(states[:, None], weight=weight)[0][:, 0]
        return logits if tp > 1 else logits[:, :vocab]

    if tp == 1:
        return Head(scores, columns)
    first = columns * parallel_state.get_tensor_model_parallel_rank()
    words = min(max(vocab - first, 0), columns)
    group = parallel_state.get_tensor_model_parallel_group()
    return Head(scores, columns, VocabularyPart(first, words, group))


def hidden_shape(model: nn.Module, rows: Rows, tp: int) -> tuple[int, int, int]:
    """Return the shape of hidden states: tokens, one row, and the width of the model."""
    config: Any = model.config
    return _padded(rows, tp)[0].shape[1], 1, config.hidden_size


def _padded(rows: Rows, tp: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad by a sequence that nothing looks at, to a number of tokens that `tp` divides.

    Bridge's `CanonicalLoRA` makes one token of `tp`, as it reshapes queries by the head count of all ranks.
    """
    missing = -rows.ids.shape[1] % tp
    if not missing:
        return rows.ids, rows.positions, rows.starts
    more = torch.arange(missing, device=rows.ids.device)[None]
    ids = torch.cat([rows.ids, torch.zeros_like(more)], 1)
    return ids, torch.cat([rows.positions, more], 1), torch.cat([rows.starts, rows.starts[-1:] + missing])
