"""A micro-batch through the layers of a rank: sequences packed in one row, only what predicts something
scored.
"""

from typing import Any

import torch
from torch import Tensor, nn

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
    scored: bool = True,
) -> Tensor:
    """[M, vocab] on every tensor-parallel rank, of a loss computed by each of them alike; where the model has
    a stage above, the hidden states for that one. below: those of the stage below, shaped as `hidden_shape`
    says. scored: without it, [M, hidden] of the last hidden states in the place of scores.

    packed: attention takes sequences as they are; else it gets a mask, of N * N booleans (and makes scores of
    N * N numbers per head), which is for small N. Positions count from the row's beginning then: rotary
    embeddings only see differences. recompute: Megatron's full recomputation, one layer at a time.
    """
    config: Any = model.config
    decoder: Any = model.get_submodule("decoder")
    ids, positions, starts = _padded(rows, tp)
    config.recompute_granularity = "full" if recompute else None
    config.recompute_method, config.recompute_num_layers = ("uniform", 1) if recompute else (None, None)
    entering = (
        model.get_submodule("embedding")(input_ids=ids, position_ids=positions) if below is None else below
    )
    if recompute and torch.is_grad_enabled():
        entering.requires_grad_()  # Megatron's checkpoint has no backward unless its input has one
    decoder.set_input_tensor(below)

    def score(
        *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, **_: object
    ) -> Tensor:
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as whole

        at = hidden_states[:, 0].index_select(0, rows.predictors)[:, None]
        if not scored:
            return at[:, 0]
        part, _bias = output_layer(at, weight=output_weight)
        scores: Tensor = whole(part)[:, 0, :vocab]
        return scores

    found: Tensor = model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=None if packed else _hidden(positions),
        decoder_input=entering,
        packed_seq_params=_sequences(starts, max(rows.longest, tp)) if packed else None,
        output_processor=score,
    )
    decoder.set_input_tensor(None)
    return found


def hidden_shape(model: nn.Module, rows: Rows, tp: int) -> tuple[int, int, int]:
    """Tokens, one row, and the width of the model."""
    config: Any = model.config
    return _padded(rows, tp)[0].shape[1], 1, config.hidden_size


def _padded(rows: Rows, tp: int) -> tuple[Tensor, Tensor, Tensor]:
    """A number of tokens that `tp` divides, by a sequence that nothing looks at.

    Bridge's `CanonicalLoRA` reshapes this rank's queries with the head count of all ranks: `tp` tokens become
    one.
    """
    missing = -rows.ids.shape[1] % tp
    if not missing:
        return rows.ids, rows.positions, rows.starts
    more = torch.arange(missing, device=rows.ids.device)[None]
    ids = torch.cat([rows.ids, torch.zeros_like(more)], 1)
    return ids, torch.cat([rows.positions, more], 1), torch.cat([rows.starts, rows.starts[-1:] + missing])


def _hidden(positions: Tensor) -> Tensor:
    """[1, 1, N, N]: true where a token must not look: ahead, or into another sequence."""
    sequence = (positions[0] == 0).cumsum(0)
    same = sequence[:, None] == sequence[None]
    return ~same.tril()[None, None]


def _sequences(starts: Tensor, longest: int) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
