"""Which prompts of the data are sampled: all in their order, or by `data.difficulty` fewer of those that the
model nearly always or nearly never answers, as with prime-rl's easy and hard pools.

What is known of a prompt is the mean reward of its last group. The samples of a step are planned with what is
known when the version that makes them is published, so that a resumed run plans the same.
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from lorad.driver.rewards import Score
from lorad.driver.session import Plan, Rollout, Session
from lorad.rl.data import Example
from lorad.spec.data import Difficulty

_MOST_LOOKED_AT = 64  # times the prompts of a step, of data that never end


class Draw(Struct, frozen=True):
    """Prompts of the data.

    Attributes:
        places: Where they stand behind the position that they were drawn from.
        looked: How many prompts behind it are not looked at again.
    """

    examples: list[Example]
    places: list[int]
    looked: int


def draw(session: Session, planned: Plan, n: int) -> Draw:
    """Return the next `n` prompts behind those that a plan has looked at.

    Where a whole round of the data admits fewer than `n`, the first ones that were left out fill up.
    """
    difficulty = session.spec.data.difficulty
    data = session.train_data
    if difficulty is None or not planned.known:
        places = [*range(planned.looked, planned.looked + n)]
        return Draw(data.take(planned.position + planned.looked, n), places, planned.looked + n)
    looked = planned.looked
    last = looked + (data.size or _MOST_LOOKED_AT * n)
    admitted = dict[int, Example]()
    left_out = dict[int, Example]()
    while len(admitted) < n and looked < last:
        for example in data.take(planned.position + looked, min(n, last - looked)):
            chance = _chance(session.spec.seed, planned.position + looked)
            is_admitted = chance < _share(difficulty, planned.known.get(example.of_row))
            (admitted if is_admitted else left_out)[looked] = example
            looked += 1
            if len(admitted) == n:
                break
    missing = n - len(admitted)
    chosen = dict(sorted({**admitted, **dict([*left_out.items()][:missing])}.items()))
    return Draw([*chosen.values()], [*chosen], looked)


def remember(session: Session, rollout: Rollout, scores: Sequence[Score]) -> None:
    """Sort the prompts of a step by what their groups earned; those in between are not kept."""
    difficulty = session.spec.data.difficulty
    if difficulty is None:
        return
    known = dict(session.state.known)  # plans that are under way have the old one
    size = session.spec.algorithm.group_size
    earned: dict[str, float | None] = {**rollout.left_out}
    for start, group in zip(range(0, len(scores), size), rollout.groups, strict=True):
        earned[group[0].example.of_row] = mean_of(scores[start : start + size])
    for prompt, mean in earned.items():
        if mean is None:
            continue
        known.pop(prompt, None)
        if not difficulty.hard < mean < difficulty.easy:
            known[prompt] = mean
    session.state.known = known


def mean_of(scores: Sequence[Score]) -> float | None:
    """Return the mean reward of a group; None where no sample has one."""
    values = [score.value for score in scores if score.value is not None]
    return float(np.mean(values)) if values else None


def pools(session: Session) -> Iterator[tuple[str, float]]:
    """Yield how many prompts are known to be easy, and to be hard."""
    difficulty = session.spec.data.difficulty
    if difficulty is not None:
        easy = sum(mean >= difficulty.easy for mean in session.state.known.values())
        yield "prompts_easy", float(easy)
        yield "prompts_hard", float(len(session.state.known) - easy)


def _share(difficulty: Difficulty, mean: float | None) -> float:
    """Return how many prompts in 1 of a mean reward are sampled."""
    if mean is None or difficulty.hard < mean < difficulty.easy:
        return 1.0
    return difficulty.keep_easy if mean >= difficulty.easy else difficulty.keep_hard


def _chance(seed: int, position: int) -> float:
    """Return a number from 0 to 1, the same for the same position."""
    digest = hashlib.blake2b(f"{seed}|admission|{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
