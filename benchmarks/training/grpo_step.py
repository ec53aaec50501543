"""Measure `step`: a GRPO step on builtin:tiny, 16 prompts x 8 samples of at most 16 tokens, against TRL +
PEFT.
"""

import asyncio
import statistics

from benchmarks.kit.workload import TINY, Figures, Turn, play, problems_of

WARM_UP = 2


def lorad(turn: Turn) -> Figures:
    from benchmarks.kit.ours import opened
    from benchmarks.training.grpo import Loop

    async def run() -> Figures:
        async with opened(TINY) as held:
            loop = Loop(held)
            await loop.open()
            for index in range(turn.repeats + WARM_UP):
                await loop.step(turn.call(index))
            return loop.figures

    return counted(asyncio.run(run()))


def peer(turn: Turn) -> Figures:
    from benchmarks.kit.peers import trl_steps

    steps = turn.repeats + WARM_UP
    return counted(trl_steps([p for index in range(steps) for p in problems_of(turn.call(index))], steps))


def counted(figures: Figures) -> Figures:
    """The warm-up's times are left out, its rewards are not: both sides learn from their first step on. The
    reward is the mean of all steps; it rises so fast that a median would be that of one or two steps.
    """
    times = {name: figures[name][WARM_UP:] for name in ("step", "rollout")}
    rest = [step - rollout for step, rollout in zip(times["step"], times["rollout"], strict=True)]
    return {**times, "rest": rest, "reward": [statistics.mean(figures["reward"])]}


if __name__ == "__main__":
    play({"lorad": lorad, "peer": peer})
