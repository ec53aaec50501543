"""Measure `threshold`: CPU seconds of GRPO steps until held-out greedy exact match reaches 0.9 on
builtin:tiny.

256 problems of the test split, looked at every 5 steps; looking does not count. Every round has a seed of its
own. This base is one in which the right answer is among several learnt modes: the time is of eliciting it,
not of learning something new.
"""

import asyncio

from benchmarks.kit.ours import opened
from benchmarks.kit.workload import TINY, Figures, Turn, held_out, play
from benchmarks.training.grpo import Loop

GOAL, EVERY, MOST = 0.9, 5, 80


async def measured(turn: Turn) -> Figures:
    problems = held_out()
    async with opened(TINY) as held:
        loop = Loop(held, turn.number)
        await loop.open()
        for index in range(MOST):
            await loop.step(turn.call(index))
            if (index + 1) % EVERY == 0 and await loop.greedy(problems) >= GOAL:
                return {"seconds": [sum(loop.figures["step"])], "steps": [index + 1.0]}
    raise SystemExit(f"{GOAL} was not reached in {MOST} steps")


def lorad(turn: Turn) -> Figures:
    return asyncio.run(measured(turn))


if __name__ == "__main__":
    play({"lorad": lorad})
