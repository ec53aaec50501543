"""Routes of samples: put together from what the engine says turn by turn, and given to batches."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace as changed

from lorad.driver.session import Sample
from lorad.protocol.batch import Chunk
from lorad.routes import Routes, continued, unknown_like


class SampleRoutes(NamedTuple):
    """The routes of a sample, see `Sample`."""

    tokens: np.ndarray | None
    prompts: tuple[np.ndarray, ...]


_NONE = SampleRoutes(None, ())


def with_routes(
    before: np.ndarray | None, chunks: Sequence[Chunk], context: int, tokens: int
) -> np.ndarray | None:
    """Return the routes of a row that the model has added `tokens` to, having read `context` of them.

    before: its routes until then, which are returned where the engine says none.
    """
    now = chunks[-1].routes
    if now is None:
        return before
    if len(now) == tokens:  # the prompt's come with the first of its samples
        now = np.concatenate([unknown_like(now, context), now])
    return continued(before, now)


def routes_of(rows: Sequence[np.ndarray | None], sizes: Sequence[tuple[int, int]]) -> SampleRoutes:
    """Put the routes of a sample together.

    rows: the routes of each row as far as they are known; None where none are.
    sizes: by row, the tokens of its prompt and the ones behind it.
    """
    like = next((row for row in rows if row is not None), None)
    if like is None:
        return _NONE
    prompts = list[np.ndarray]()
    behind = [unknown_like(like, 0)]
    for row, (prompt, size) in zip(rows, sizes, strict=True):
        computed = unknown_like(like, 0) if row is None else row
        whole = np.concatenate([computed, unknown_like(like, prompt + size - len(computed))])
        prompts.append(whole[:prompt])
        behind.append(whole[prompt:])
    return SampleRoutes(np.concatenate(behind), tuple(prompts))


def with_prompts(group: list[Sample]) -> list[Sample]:
    """Give samples of one prompt its routes, which came with the first of them."""
    first = group[0].prompt_routes if group else ()
    return [
        changed(s, prompt_routes=(first[0], *s.prompt_routes[1:])) if first and s.routes is not None else s
        for s in group
    ]


def routes_in(groups: Sequence[Sequence[Sample]]) -> Routes | None:
    """Return the routes of the batch of these samples (see `batch_of`); None where none are known."""
    samples = [sample for group in groups for sample in group]
    like = next((sample.routes for sample in samples if sample.routes is not None), None)
    if like is None:
        return None
    prompts = list[np.ndarray]()
    behind = list[np.ndarray]()
    for group in groups:
        last: list[int] | None = None
        for sample in group:
            tokens = sample.tokens.size
            behind.append(unknown_like(like, tokens) if sample.routes is None else sample.routes)
            prompts_of_rows = [sample.example.tokens, *(fork.prompt for fork in sample.forks)]
            for number, prompt in enumerate(prompts_of_rows):
                if prompt != last:
                    routes = sample.prompt_routes[number] if sample.prompt_routes else None
                    prompts.append(unknown_like(like, len(prompt)) if routes is None else routes)
                last = prompt
    return Routes(np.concatenate(prompts), np.concatenate(behind))
