"""Which prompts are sampled: all in the order of the data, or fewer easy and hard ones by data.difficulty.

Easy and hard prompts are nearly always or nearly never answered, as in prime-rl's pools; their rating is the
mean reward of their last group. The samples of a step are planned with the ratings at the time when the
version that makes them is published, so that a resumed run plans the same.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lorad.driver.rewards import Score
from lorad.driver.session import Plan, Rollout, Sample, Session
from lorad.rl.data import Example

_MOST_LOOKED_AT = 64  # times the prompts of a step, of data that never end


def draw(session: Session, planned: Plan, n: int) -> Plan:
    """Return a plan with the next `n` prompts behind the ones that `planned` has looked at.

    Where a whole round of the data admits fewer than `n`, the first ones that were left out fill up.
    """
    difficulty = session.spec.data.difficulty
    data = session.train_data
    looked = planned.looked
    if difficulty is None or not planned.ratings:
        places = [*range(looked, looked + n)]
        examples = data.take(planned.position + looked, n)
        return replace(planned, examples=examples, places=places, looked=looked + n)
    last = looked + (data.size or _MOST_LOOKED_AT * n)
    admitted = dict[int, Example]()
    left_out = dict[int, Example]()
    while len(admitted) < n and looked < last:
        for example in data.take(planned.position + looked, min(n, last - looked)):
            mean = planned.ratings.get(_row_of(example))
            share = 1.0
            if mean is not None:
                share = difficulty.keep_easy if mean >= difficulty.easy else difficulty.keep_hard
            text = f"{session.spec.seed}|admission|{planned.position + looked}"
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            is_admitted = int.from_bytes(digest, "little") / 2**64 < share
            (admitted if is_admitted else left_out)[looked] = example
            looked += 1
            if len(admitted) == n:
                break
    missing = n - len(admitted)
    chosen = dict(sorted({**admitted, **dict([*left_out.items()][:missing])}.items()))
    return replace(planned, examples=[*chosen.values()], places=[*chosen], looked=looked)


def rate(group: Sequence[Sample], scores: Sequence[Score]) -> dict[str, float]:
    """Return the mean reward of a group by the name of its row; nothing where no sample has a reward."""
    values = [score.value for score in scores if score.value is not None]
    return {_row_of(group[0].example): float(np.mean(values))} if values else {}


def remember(session: Session, rollout: Rollout, scores: Sequence[Score]) -> None:
    """Sort the prompts of a step by what their groups earned; prompts in between are not kept."""
    difficulty = session.spec.data.difficulty
    if difficulty is None:
        return
    size = session.spec.algorithm.group_size
    latest = {**rollout.left_out}
    for start, group in zip(range(0, len(scores), size), rollout.groups, strict=True):
        latest |= rate(group, scores[start : start + size])
    ratings = {**session.state.ratings, **latest}  # plans that are under way have the old ones
    session.state.ratings = {
        row: mean for row, mean in ratings.items() if not difficulty.hard < mean < difficulty.easy
    }


def _row_of(example: Example) -> str:
    """Return the name of a row, under which it comes in every round of the data."""
    return example.id.rpartition("/")[0]
