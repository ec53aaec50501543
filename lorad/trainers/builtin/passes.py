"""The two passes over a micro-batch: forward for log-probabilities, forward and backward for gradients.

Logits exist for targets only, and for a chunk of them at a time: the backward of one chunk ends
before the next chunk's logits are made, and the body of the model is walked back once, at the end. Statistics
are read when all of that has been asked for, so that a GPU is not waited for between chunks.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from lorad.models.base import Base
from lorad.models.decoder import Ends, First, Last, LayerForward, at_once, hidden, logits
from lorad.models.experts import Replay
from lorad.models.ops import recomputed
from lorad.protocol.batch import Gradients
from lorad.protocol.calls import ForwardBackward
from lorad.rl.loss import (
    TokenLogprobs,
    TokenLosses,
    TokenTargets,
    loss_stats,
    preference_targets,
    sequence_ratios,
    token_logprobs,
    token_losses,
    token_targets,
)
from lorad.trainers.builtin.lent import Arena
from lorad.trainers.builtin.lora import SlotLora
from lorad.trainers.builtin.microbatch import Microbatch
from lorad.trainers.head_rows import rows_at_once

_Run = Callable[[LayerForward, Tensor], Tensor]


def _nothing() -> None:
    """Do nothing."""


@torch.no_grad()
def score(
    base: Base,
    rows: Microbatch,
    lora: SlotLora | None,
    temperature: float,
    meanwhile: Callable[[], None] = _nothing,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probability of each target of the micro-batch, float32 [M], and whether it is the
    likeliest token, bool [M]. meanwhile: done while a GPU computes.
    """
    if lora is not None:
        base, lora = lora.merged(base)
    states = predicting_states(base, rows, lora, at_once)
    parts = []
    for chunk in _chunks(base, rows):
        chunk_logits = logits(
            base, states[chunk], None if lora is None else lora.at(_within(rows.tokens, chunk))
        )
        parts.append(token_logprobs(chunk_logits, rows.targets[chunk], temperature))
    meanwhile()
    logprobs, _, correct = (torch.cat(columns).cpu().numpy() for columns in zip(*parts, strict=True))
    return logprobs, correct


def forward_backward(
    base: Base,
    rows: Microbatch,
    lora: SlotLora,
    work: Sequence[ForwardBackward],
    checkpointing: bool,
    meanwhile: Callable[[], None] = _nothing,
    arena: Arena | None = None,
) -> list[Gradients]:
    """Add to the slots, piece by piece, the gradient of sum(token losses) / normaliser. Return for each piece
    its statistics, and the log-probabilities of its tokens where its loss asks for them.

    Args:
        meanwhile: Done while a GPU computes.
        arena: Where activations are kept; None is where they are.
    """
    base, lora = lora.merged(base)
    with contextlib.nullcontext() if arena is None else arena.kept():
        states = predicting_states(base, rows, lora, recomputing(lora) if checkpointing else at_once)
    chunks = list(_chunks(base, rows))
    of_samples = any(w.loss.is_of_samples and w.targets.sequence_log_ratios is None for w in work)
    first_pass = None
    if of_samples and len(chunks) > 1:
        first_pass = _logprobs(base, rows, lora, states.detach(), work)
    targets = _targets(base, rows, work, first_pass)
    figures: list[list[_TokenFigures]] = [[] for _ in work]
    gradients = torch.empty_like(states)
    for chunk in chunks:
        ranges = _within(rows.tokens, chunk)
        part = states[chunk].detach().requires_grad_(states.requires_grad)
        chunk_logits = logits(base, part, lora.at(ranges))
        likely = token_logprobs(
            chunk_logits,
            rows.targets[chunk],
            _temperature(rows, work, chunk),
            entropy_gradient=any(w.loss.entropy_coef for w in work),
        )
        del chunk_logits
        if of_samples and first_pass is None:
            targets = _targets(base, rows, work, likely.logprobs.detach())
        totals = []
        for index, (w, inside, whole) in enumerate(zip(work, ranges, rows.tokens, strict=True)):
            if inside.stop > inside.start:
                first = chunk.start + inside.start - whole.start
                own_targets = targets[index].tokens.at(slice(first, first + inside.stop - inside.start))
                own = TokenLogprobs(*(values[inside] for values in likely))
                losses = token_losses(own.logprobs, own_targets, w.loss, own.entropy)
                totals.append(losses.loss.sum() / w.normaliser)
                kept = losses._replace(loss=losses.loss.detach())
                figures[index].append(
                    _TokenFigures(kept, TokenLogprobs(*(values.detach() for values in own)))
                )
        torch.autograd.backward(totals)
        if part.grad is not None:
            gradients[chunk] = part.grad
    if states.requires_grad:
        torch.autograd.backward(states, gradients)
    meanwhile()
    pieces = zip(figures, work, targets, rows.rows, strict=True)
    return [_gradients(parts, w, of, rows.replay, inside) for parts, w, of, inside in pieces]


class _PieceTargets(NamedTuple):
    """The targets of a piece, and the sum of the losses of its pairs; None where tokens have their own."""

    tokens: TokenTargets
    loss: float | None = None


@torch.no_grad()
def _targets(
    base: Base, rows: Microbatch, work: Sequence[ForwardBackward], logprobs: Tensor | None
) -> list[_PieceTargets]:
    """Return the targets of each piece, from the policy's log-probabilities [M]; None leaves out what losses
    of whole samples need.
    """
    targets = []
    for piece, w, inside in zip(rows.pieces, work, rows.tokens, strict=True):
        tokens = token_targets(w.targets, piece.targets, base.device)
        loss = None
        lengths = piece.batch.target_lengths[piece.samples].astype(np.int64)
        if logprobs is not None and w.loss.preference is not None:
            tokens, loss = preference_targets(logprobs[inside], tokens, w.loss, lengths)
        elif logprobs is not None:
            sizes = torch.from_numpy(lengths).to(base.device)
            tokens = sequence_ratios(logprobs[inside], tokens, w.loss, sizes)
        targets.append(_PieceTargets(tokens, loss))
    return targets


@torch.no_grad()
def _logprobs(
    base: Base, rows: Microbatch, lora: SlotLora, states: Tensor, work: Sequence[ForwardBackward]
) -> Tensor:
    """Return the policy's log-probabilities before the first chunk's gradient, [M]. The head is passed once
    more for them, with the dropout of the pass that follows.
    """
    parts = []
    drawn = [generator.get_state() for generator in lora.generators]
    for chunk in _chunks(base, rows):
        chunk_logits = logits(base, states[chunk], lora.at(_within(rows.tokens, chunk)))
        parts.append(token_logprobs(chunk_logits, rows.targets[chunk], _temperature(rows, work, chunk))[0])
    for generator, state in zip(lora.generators, drawn, strict=True):
        generator.set_state(state)
    return torch.cat(parts)


class _TokenFigures(NamedTuple):
    """What the statistics need of some tokens; without gradient."""

    losses: TokenLosses
    likely: TokenLogprobs


def _gradients(
    parts: Sequence[_TokenFigures],
    work: ForwardBackward,
    targets: _PieceTargets,
    replay: Replay | None,
    inside: slice,
) -> Gradients:
    """Return the statistics of a piece, whose rows are `inside`, with what the replay of routes did there."""
    losses = TokenLosses(
        *(torch.cat(columns) for columns in zip(*(part.losses for part in parts), strict=True))
    )
    likely = TokenLogprobs(
        *(torch.cat(columns) for columns in zip(*(part.likely for part in parts), strict=True))
    )
    stats = loss_stats(losses, likely.entropy, likely.correct, work.normaliser)
    if targets.loss is not None:
        stats = replace(stats, loss=targets.loss / work.normaliser)
    result = Gradients.of(stats, likely.logprobs.cpu().numpy() if work.loss.returns_logprobs else None)
    if replay is None or work.batch.routes is None:
        return result
    replayed, rerouted, unrouted = replay.counts(inside)
    return replace(result, replayed=replayed, rerouted=rerouted, unrouted=unrouted)


def recomputing(lora: SlotLora) -> _Run:
    """Run the layers of one forward so that those from the first trained one on are recomputed in the
    backward pass.
    """
    layers = itertools.count()
    first = lora.first_layer

    def run(layer: LayerForward, x: Tensor) -> Tensor:
        if next(layers) < first:
            return at_once(layer, x)
        return recomputed(layer, x, lora.anchor, lora.generators)

    return run


def predicting_states(base: Base, rows: Microbatch, lora: SlotLora | None, run: _Run) -> Tensor:
    """Return the last hidden state at the position that predicts each target, [M, hidden]."""
    first = None  # where rows of a token may differ, by dropout or the slot, or where few are alike
    if rows.words is not None and (lora is None or not (lora.generators or len(lora.slots) > 1)):
        ids, of = rows.words
        first = First(ids, of, None if lora is None else lora.at([slice(0, len(ids))]))
    last = Last(rows.leaving, None if lora is None else lora.at(rows.parts))
    ends = Ends(first, last)
    states = hidden(base, rows.ids, rows.positions, rows.attention, lora, run, ends, rows.replay)
    return states.index_select(0, rows.places)


def _chunks(base: Base, rows: Microbatch) -> Iterator[slice]:
    """Cut the targets where each piece would be cut if it ran alone, so that dropout on the head draws the
    same numbers; then join neighbours that fit.
    """
    size = rows_at_once(base.config.vocab_size, base.device)
    start = end = 0
    for tokens in rows.tokens:
        for stop in (*range(tokens.start + size, tokens.stop, size), tokens.stop):
            if stop - start > size:
                yield slice(start, end)
                start = end
            end = stop
    yield slice(start, end)


def _within(ranges: Sequence[slice], chunk: slice) -> list[slice]:
    """Cut each range to the chunk, counted from the chunk's start; may be empty."""
    size = chunk.stop - chunk.start
    ends = [
        (min(max(r.start - chunk.start, 0), size), min(max(r.stop - chunk.start, 0), size)) for r in ranges
    ]
    return [slice(start, stop) for start, stop in ends]


def _temperature(rows: Microbatch, work: Sequence[ForwardBackward], chunk: slice) -> float | Tensor:
    """Return one temperature for all tokens of a chunk, or one for each of them, fp32 [m]."""
    each = [w.loss.temperature for w in work]
    if len(set(each)) == 1:
        return each[0]
    sizes = [tokens.stop - tokens.start for tokens in rows.tokens]
    of_tokens = np.repeat(np.array(each, np.float32), sizes)[chunk]
    return torch.from_numpy(of_tokens).to(rows.targets.device)
