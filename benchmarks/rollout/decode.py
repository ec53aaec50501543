"""Measure `decode`: steps of the 100 M model against the limits of the machine, measured in turns with them.

A step's time is the difference of two calls, a long and a short one, divided by the steps between them:
prefill and everything else that a call costs once drops out. Weights count once per step (B = 1, bandwidth),
two FLOP for each weight and row (B = 128); attention, norms and sampling count as nothing.
"""

import asyncio
from functools import partial

from benchmarks.kit.limits import Limits
from benchmarks.kit.models import SHAPES, make
from benchmarks.kit.ours import Lorad, opened, prompts_of
from benchmarks.kit.workload import GROUP, Figures, Stopwatch, Turn, play, random_ids
from lorad.engines.base import BASE
from lorad.protocol.batch import Sampling

MODEL = "100m"
LENGTH = 8  # of the prompts
STEPS = {1: 32, 32: 16, 128: 10}  # rows -> steps between the short and the long call


async def step_seconds(
    held: Lorad, version: str, call: int, rows: int, steps: int, length: int = LENGTH
) -> float:
    """CPU seconds of one decode step of `rows` samples after prompts of `length` tokens."""
    samples = min(GROUP, rows)
    seconds = []
    for part, tokens in enumerate((2, 2 + steps)):
        number = 2 * call + part
        ids = random_ids(number, rows // samples, length, held.base.config.vocab_size)
        watch = Stopwatch()
        await held.complete(version, prompts_of(ids, samples, number), Sampling(tokens))
        seconds.append(watch.lap())
    return (seconds[1] - seconds[0]) / steps


def lorad(turn: Turn, dtype: str) -> Figures:
    return asyncio.run(measured(turn, dtype))


async def measured(turn: Turn, dtype: str) -> Figures:
    parameters = SHAPES[MODEL].parameters
    figures: Figures = {
        name: [] for name in ("gemv", "one", "one_lora", "gemm", "many", "many_lora", "some_lora")
    }
    async with opened(make(MODEL, turn.models), dtype) as held:
        lora = await held.load("bench@1", turn.number)
        limits = Limits(held.base.dtype, parameters)
        size = held.base.dtype.itemsize
        await step_seconds(held, lora, turn.call(99), 32, 2)
        for index in range(turn.repeats):
            step = partial(step_seconds, held, call=turn.call(index))
            figures["gemv"].append(limits.gemv())
            figures["one"].append(size * parameters / await step(BASE, rows=1, steps=STEPS[1]))
            figures["one_lora"].append(size * parameters / await step(lora, rows=1, steps=STEPS[1]))
            figures["gemm"].append(limits.gemm())
            figures["many"].append(2 * parameters * 128 / await step(BASE, rows=128, steps=STEPS[128]))
            figures["many_lora"].append(2 * parameters * 128 / await step(lora, rows=128, steps=STEPS[128]))
            figures["some_lora"].append(32 / await step(lora, rows=32, steps=STEPS[32]))
    return figures


if __name__ == "__main__":
    play({f"lorad-{dtype}": partial(lorad, dtype=dtype) for dtype in ("fp32", "bf16")})
