"""The two passes over a micro-batch: forward for log-probabilities, forward and backward for gradients.

Logits exist for targets only, and for a chunk of them at a time: the backward of one chunk ends
before the next chunk's logits are made, and the body of the model is walked back once, at the end. Statistics
are read when all of that has been asked for, so that a GPU is not waited for between chunks.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from lorad.models.base import Base
from lorad.models.decoder import Ends, First, Last, LayerForward, at_once, hidden, logits
from lorad.models.ops import recomputed
from lorad.protocol.batch import Gradients, PolicyLoss
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
from lorad.trainers.builtin.lora import SlotLora
from lorad.trainers.builtin.microbatch import Microbatch
from lorad.trainers.head_rows import rows_at_once

_Run = Callable[[LayerForward, Tensor], Tensor]


@torch.no_grad()
def score(
    base: Base, rows: Microbatch, lora: SlotLora | None, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [M], bool [M]): log-probability of each target of the micro-batch, and whether it is the
    likeliest token.
    """
    if lora is not None:
        base, lora = lora.merged(base)
    states = predicting_states(base, rows, lora, at_once)
    parts = []
    for chunk in _chunks(base, rows):
        made = logits(base, states[chunk], None if lora is None else lora.at(_within(rows.tokens, chunk)))
        parts.append(token_logprobs(made, rows.targets[chunk], temperature))
    logprobs, _, correct = (torch.cat(columns).cpu().numpy() for columns in zip(*parts, strict=True))
    return logprobs, correct


def forward_backward(
    base: Base, rows: Microbatch, lora: SlotLora, work: Sequence[ForwardBackward], checkpointing: bool
) -> list[Gradients]:
    """Add to the slots, piece by piece, the gradient of sum(token losses) / normaliser. Returns for each its
    statistics, and the log-probabilities of its tokens where its loss asks for them.
    """
    base, lora = lora.merged(base)
    states = predicting_states(base, rows, lora, recomputing(lora) if checkpointing else at_once)
    temperature, chunks = _temperatures(rows, [w.loss for w in work]), list(_chunks(base, rows))
    of_samples = any(w.loss.is_of_samples and w.targets.sequence_log_ratios is None for w in work)
    first_pass = None
    if of_samples and len(chunks) > 1:
        first_pass = _logprobs(base, rows, lora, states.detach(), temperature)
    wanted = _targets(base, rows, work, first_pass)
    found: list[list[_TokenFigures]] = [[] for _ in work]
    gradients = torch.empty_like(states)
    for chunk in chunks:
        ranges = _within(rows.tokens, chunk)
        part = states[chunk].detach().requires_grad_(states.requires_grad)
        made = logits(base, part, lora.at(ranges))
        some = temperature[chunk] if isinstance(temperature, Tensor) else temperature
        has_bonus = any(w.loss.entropy_coef for w in work)
        likely = token_logprobs(made, rows.targets[chunk], some, entropy_gradient=has_bonus)
        del made
        if of_samples and first_pass is None:
            wanted = _targets(base, rows, work, likely.logprobs.detach())
        totals = []
        for index, (inside, whole) in enumerate(zip(ranges, rows.tokens, strict=True)):
            if inside.stop > inside.start:
                first, w = chunk.start + inside.start - whole.start, work[index]
                those = wanted[index].tokens.at(slice(first, first + inside.stop - inside.start))
                here = TokenLogprobs(*(values[inside] for values in likely))
                losses = token_losses(here.logprobs, those, w.loss, here.entropy)
                totals.append(losses.loss.sum() / w.normaliser)
                kept = losses._replace(loss=losses.loss.detach())
                found[index].append(_TokenFigures(kept, TokenLogprobs(*(values.detach() for values in here))))
        torch.autograd.backward(totals)
        if part.grad is not None:
            gradients[chunk] = part.grad
    if states.requires_grad:
        torch.autograd.backward(states, gradients)
    given = (_gradients(parts, w, of) for parts, w, of in zip(found, work, wanted, strict=True))
    return [_counted(each, rows, w, inside) for each, w, inside in zip(given, work, rows.rows, strict=True)]


def _counted(found: Gradients, rows: Microbatch, work: ForwardBackward, inside: slice) -> Gradients:
    """Add what the replay of routes did with the rows of a piece."""
    if rows.replay is None or work.batch.routes is None:
        return found
    replayed, rerouted, unrouted = rows.replay.counts(inside)
    return replace(found, replayed=replayed, rerouted=rerouted, unrouted=unrouted)


class _PieceTargets(NamedTuple):
    """The targets of a piece. loss: the sum of the losses of its pairs; None where tokens have their own."""

    tokens: TokenTargets
    loss: float | None = None


@torch.no_grad()
def _targets(
    base: Base, rows: Microbatch, work: Sequence[ForwardBackward], logprobs: Tensor | None
) -> list[_PieceTargets]:
    """Return the targets of each piece. logprobs: [M], those of the policy; without them what losses of whole
    samples need is missing.
    """
    found = []
    for piece, w, inside in zip(rows.pieces, work, rows.tokens, strict=True):
        those, loss = token_targets(w.targets, piece.targets, base.device), None
        lengths = piece.batch.target_lengths[piece.samples].astype(np.int64)
        if logprobs is not None and w.loss.preference is not None:
            those, loss = preference_targets(logprobs[inside], those, w.loss, lengths)
        elif logprobs is not None:
            sizes = torch.from_numpy(lengths).to(base.device)
            those = sequence_ratios(logprobs[inside], those, w.loss, sizes)
        found.append(_PieceTargets(those, loss))
    return found


@torch.no_grad()
def _logprobs(
    base: Base, rows: Microbatch, lora: SlotLora, states: Tensor, temperature: float | Tensor
) -> Tensor:
    """[M]: those of the policy before the first chunk's gradient. The head is passed once more for them, with
    the dropout of the pass that follows.
    """
    parts, drawn = [], [generator.get_state() for generator in lora.generators]
    for chunk in _chunks(base, rows):
        some = temperature[chunk] if isinstance(temperature, Tensor) else temperature
        made = logits(base, states[chunk], lora.at(_within(rows.tokens, chunk)))
        parts.append(token_logprobs(made, rows.targets[chunk], some)[0])
    for generator, state in zip(lora.generators, drawn, strict=True):
        generator.set_state(state)
    return torch.cat(parts)


class _TokenFigures(NamedTuple):
    """What the statistics need of some tokens; without gradient."""

    losses: TokenLosses
    likely: TokenLogprobs


def _gradients(parts: Sequence[_TokenFigures], work: ForwardBackward, wanted: _PieceTargets) -> Gradients:
    losses = TokenLosses(
        *(torch.cat(columns) for columns in zip(*(part.losses for part in parts), strict=True))
    )
    likely = TokenLogprobs(
        *(torch.cat(columns) for columns in zip(*(part.likely for part in parts), strict=True))
    )
    stats = loss_stats(losses, likely.entropy, likely.correct, work.normaliser)
    if wanted.loss is not None:
        stats = replace(stats, loss=wanted.loss / work.normaliser)
    return Gradients.of(stats, likely.logprobs.cpu().numpy() if work.loss.returns_logprobs else None)


def recomputing(lora: SlotLora) -> _Run:
    """Run the layers of one forward so that those from the first trained one on are recomputed in the
    backward pass.
    """
    layers, first = itertools.count(), lora.first_layer

    def run(layer: LayerForward, x: Tensor) -> Tensor:
        if next(layers) < first:
            return at_once(layer, x)
        return recomputed(layer, x, lora.anchor, lora.generators)

    return run


def predicting_states(base: Base, rows: Microbatch, lora: SlotLora | None, run: _Run) -> Tensor:
    """[M, hidden]: the last hidden state at the position that predicts each target."""
    last = Last(rows.leaving, None if lora is None else lora.at(rows.parts))
    ends = Ends(_first(rows, lora), last)
    states = hidden(base, rows.ids, rows.positions, rows.attention, lora, run, ends, rows.replay)
    return states.index_select(0, rows.places)


def _first(rows: Microbatch, lora: SlotLora | None) -> First | None:
    """Return the different tokens of the rows; None where rows of a token may differ, by dropout or the slot,
    or where few are alike.
    """
    if rows.words is None or (lora is not None and (lora.generators or len(lora.slots) > 1)):
        return None
    ids, of = rows.words
    return First(ids, of, None if lora is None else lora.at([slice(0, len(ids))]))


def _chunks(base: Base, rows: Microbatch) -> Iterator[slice]:
    """Each piece is cut where it would be alone, so that dropout on the head draws the same; then cuts that
    fit are joined.
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


def _temperatures(rows: Microbatch, losses: Sequence[PolicyLoss]) -> float | Tensor:
    """One for all tokens, or fp32 [M]."""
    if len({loss.temperature for loss in losses}) == 1:
        return losses[0].temperature
    sizes = [tokens.stop - tokens.start for tokens in rows.tokens]
    each = np.repeat(np.array([loss.temperature for loss in losses], np.float32), sizes)
    return torch.from_numpy(each).to(rows.targets.device)
