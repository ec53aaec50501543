"""Log-probabilities of given completions under the base or a frozen version."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from lorad.models.attention import CausalAttention
from lorad.models.decoder import hidden, logits
from lorad.models.lora import FrozenLora
from lorad.models.merge import Merger
from lorad.protocol.batch import Batch

FORWARD_TOKENS = 8192  # per micro-batch, padding included
LOGITS = 1 << 24  # numbers held at once

Row = tuple[np.ndarray, int]
"""(tokens of prompt and completion, length of the prompt)"""


def micro_batches(batch: Batch) -> Iterator[list[Row]]:
    """Yield the samples of a batch in their order, cut so that no padded micro-batch is too large."""
    rows: list[Row] = []
    longest = 0
    for prompt, completions in batch.groups():
        for completion in completions:
            tokens = np.concatenate([prompt, completion])
            longest = max(longest, len(tokens))
            if rows and (len(rows) + 1) * longest > FORWARD_TOKENS:
                yield rows
                rows, longest = [], len(tokens)
            rows.append((tokens, len(prompt)))
    if rows:
        yield rows


@torch.no_grad()
def completion_logprobs(models: Merger, rows: list[Row], version: FrozenLora | None) -> np.ndarray:
    """float32 [completion tokens], row after row, temperature 1."""
    base, lora = models.alone(version)
    longest = max(len(tokens) for tokens, _ in rows)
    ids = np.zeros((len(rows), longest), np.int64)
    predicts = np.zeros((len(rows), longest), bool)  # a position predicts the token after it
    for row, (tokens, prompt) in enumerate(rows):
        ids[row, : len(tokens)] = tokens
        predicts[row, prompt - 1 : len(tokens) - 1] = True
    targets = torch.from_numpy(np.roll(ids, -1, axis=1)[predicts]).to(base.device)
    positions = torch.arange(longest, device=base.device)
    states = hidden(base, torch.from_numpy(ids).to(base.device), positions, CausalAttention(), lora)
    states = states[torch.from_numpy(predicts).to(base.device)]
    size = max(1, LOGITS // base.config.vocab_size)
    parts = [
        torch.log_softmax(logits(base, some, lora).float(), -1).gather(1, wanted[:, None])[:, 0].cpu()
        for some, wanted in zip(states.split(size), targets.split(size), strict=True)
    ]
    return torch.cat(parts).numpy()
