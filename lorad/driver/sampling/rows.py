"""Samples as the rows of a batch: one for each, and one more for each fork of an episode.

The tokens of a batch are in the order of the samples, so that what is known of each sampled token is the same
whether samples fork or not.
"""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from lorad.driver.sampling.routes import routes_in
from lorad.driver.session import Sample
from lorad.protocol.batch import Batch


def batch_of(groups: Sequence[Sequence[Sample]]) -> Batch:
    """Return the tokens of samples; rows of a group that follow each other share a prompt where it is one."""
    samples = [sample for group in groups for sample in group]
    masks = None
    if any(sample.sampled is not None for sample in samples):
        masks = [np.ones(s.tokens.size, np.bool_) if s.sampled is None else s.sampled for s in samples]
    batch = Batch.of([part for group in groups for part in _parts(group)], masks)
    return replace(batch, routes=routes_in(groups))


def offsets_of(groups: Sequence[Sequence[Sample]]) -> np.ndarray:
    """Return where each group begins in its batch, which has more groups where rows fork; int [G + 1]."""
    return np.cumsum([0, *(len(_parts(group)) for group in groups)])


def _parts(group: Sequence[Sample]) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Return (prompt, rows) for each run of rows with one prompt."""
    parts: list[tuple[np.ndarray, list[np.ndarray]]] = []
    last: list[int] | None = None
    for sample in group:
        prompts = [sample.example.tokens, *(fork.prompt for fork in sample.forks)]
        rows = np.split(sample.tokens, [fork.at for fork in sample.forks])
        for prompt, row in zip(prompts, rows, strict=True):
            if prompt == last:
                parts[-1][1].append(row)
            else:
                parts.append((np.array(prompt, np.int32), [row]))
            last = prompt
    return parts
