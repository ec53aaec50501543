"""The output layer by chunks of tokens, so that only one chunk's logits are ever in memory.

A chunk's logits are made, turned into losses and walked back to its states before the next chunk's are made,
as a fused linear cross-entropy does it (Liger Kernel, Hsu et al., 2024, arXiv 2410.10989). Each chunk's
product is computed once; a loss that looks at whole samples costs one more pass over the output layer, for
their log-probabilities. Where a vocabulary is cut over ranks it stays cut.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lorad.rl.loss import TokenLogprobs, VocabularyPart, token_logprobs
from lorad.trainers.head_rows import rows_at_once


class Head(NamedTuple):
    """An output layer whose weights are at hand.

    Attributes:
        scores: Makes logits [m, columns] of states [m, hidden].
        part: Which words these columns are; None for all.
    """

    scores: Callable[[Tensor], Tensor]
    columns: int
    part: VocabularyPart | None = None


Visit = Callable[[Tensor, Head], None]
"""What is done with the states [M, hidden] of a micro-batch's targets while the output layer is at hand."""


class RowLoss(ABC):
    """The loss of one micro-batch, of which any tokens can be asked for by themselves."""

    temperature: float = 1.0
    has_bonus: bool = False
    """Whether the loss has a gradient through the entropy."""
    looks_ahead: bool = False
    """Whether a token's loss follows from the log-probabilities of others: `settle` is called first."""

    @abstractmethod
    def of(self, likely: TokenLogprobs, tokens: slice) -> Tensor:
        """Return the sum of the losses of some of the targets, with a gradient. `likely` has these alone."""

    def settle(self, logprobs: Tensor) -> None:  # noqa: B027 (most losses need nothing)
        """Take in the log-probabilities [M] of all targets."""

    def collect(self) -> None:  # noqa: B027 (nothing is lost between chunks of fp32 parameters)
        """Put away the gradients that parameters have so far, after each chunk."""

    def note(self, likely: TokenLogprobs) -> None:  # noqa: B027 (statistics are not everybody's)
        """Take in what was found of all targets, for statistics."""


class ScoringVisit:
    """A visit that notes what the policy says of each target, without a gradient.

    Attributes:
        figures: The fields of `TokenLogprobs`, fp32 [3, M], once the visit was made.
    """

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
    """A visit that adds the gradients of the output layer's parameters, chunk by chunk, and keeps the ones
    of the states.

    Attributes:
        figures: See `ScoringVisit`.
        gradient: The gradient of the states, once the visit was made.
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
