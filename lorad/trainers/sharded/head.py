"""The output layer by chunks of tokens, so that only one chunk's logits are ever in memory.

A chunk's logits are made, turned into losses and differentiated before the next chunk's are made, as in a
fused linear cross-entropy (Liger Kernel, Hsu et al., 2024, arXiv 2410.10989). Each chunk's product is made
once; a loss of whole samples takes one more pass over the output layer, for their log-probabilities. A
vocabulary that is cut over ranks stays cut.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lorad.rl.loss import TokenLogprobs, VocabularyPart, token_logprobs
from lorad.trainers.head_rows import rows_at_once


class Head(NamedTuple):
    """An output layer whose weights are at hand."""

    scores: Callable[[Tensor], Tensor]  # from states [m, hidden] to logits [m, columns]
    columns: int
    part: VocabularyPart | None = None  # the words of these columns; None: all


Visit = Callable[[Tensor, Head], None]
"""Takes the states [M, hidden] of a micro-batch's targets while the output layer is at hand."""


class RowLoss(ABC):
    """The loss of one micro-batch, which is computed by chunks of tokens."""

    temperature: float = 1.0
    has_bonus: bool = False
    """Whether the loss has a gradient through the entropy."""
    looks_ahead: bool = False
    """Whether a token's loss depends on the log-probabilities of others: `settle` is called first."""

    @abstractmethod
    def of(self, likely: TokenLogprobs, tokens: slice) -> Tensor:
        """Return the sum of the losses of a chunk of targets, which `likely` is about, with a gradient."""

    def settle(self, logprobs: Tensor) -> None:  # noqa: B027 (most losses need nothing)
        """Take in the log-probabilities [M] of all targets."""

    def collect(self) -> None:  # noqa: B027 (nothing is lost between chunks of fp32 parameters)
        """Put away the gradients that parameters have so far, after each chunk."""

    def note(self, likely: TokenLogprobs) -> None:  # noqa: B027 (a loss may have no statistics)
        """Count all targets in the statistics."""


class ScoringVisit:
    """A visit that notes the fields of `TokenLogprobs` as `figures`, fp32 [3, M], without a gradient."""

    def __init__(self, targets: Tensor, temperature: float) -> None:
        self._targets = targets
        self._temperature = temperature
        self.figures = torch.zeros(3, targets.numel(), device=targets.device)

    @torch.no_grad()
    def __call__(self, states: Tensor, head: Head) -> None:
        for chunk in _chunks(states, head):
            logits = head.scores(states[chunk])
            likely = token_logprobs(logits, self._targets[chunk], self._temperature, part=head.part)
            self.figures[:, chunk] = torch.stack([values.float() for values in likely])


class Differentiating:
    """A visit that adds gradients to the output layer's parameters and keeps that of the states.

    Its `figures` are those of `ScoringVisit`.
    """

    def __init__(self, targets: Tensor, loss: RowLoss) -> None:
        self._targets = targets
        self._loss = loss
        self.figures = torch.zeros(3, targets.numel(), device=targets.device)
        self.gradient: Tensor | None = None

    def __call__(self, states: Tensor, head: Head) -> None:
        if self._loss.looks_ahead:
            before = ScoringVisit(self._targets, self._loss.temperature)
            with torch.random.fork_rng([states.device] if states.is_cuda else []):
                before(states, head)  # with the dropout of the pass that follows
            self._loss.settle(before.figures[0])
        self.gradient = torch.zeros_like(states)
        for chunk in _chunks(states, head):
            part = states[chunk].detach().requires_grad_(states.requires_grad)
            likely = token_logprobs(
                head.scores(part),
                self._targets[chunk],
                self._loss.temperature,
                entropy_gradient=self._loss.has_bonus,
                part=head.part,
            )
            self._loss.of(likely, chunk).backward()
            if part.grad is not None:
                self.gradient[chunk] = part.grad
            self._loss.collect()
            self.figures[:, chunk] = torch.stack([values.detach().float() for values in likely])


def likely_of(rows: Tensor) -> TokenLogprobs:
    """Return the rows of [3, M] by their names."""
    return TokenLogprobs(rows[0], rows[1], rows[2] > 0)


def _chunks(states: Tensor, head: Head) -> Iterator[slice]:
    """Cut the targets alike on all ranks that work on them; without targets there is no chunk."""
    size = rows_at_once(head.columns, states.device)
    for start in range(0, len(states), size):
        yield slice(start, min(start + size, len(states)))
