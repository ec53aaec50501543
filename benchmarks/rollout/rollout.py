"""Measure `rollout`: tokens per CPU second with a LoRA active, every sample of one length, against generate +
PEFT.

tiny: 16 prompts x 8 samples of 32 tokens. 100m-fp32 and 100m-bf16: 4 random prompts of 32 tokens x 8 samples
    of 16.
"""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from benchmarks.kit.models import SHAPES, make
from benchmarks.kit.workload import (
    GROUP,
    PROMPTS,
    TINY,
    Figures,
    Stopwatch,
    Turn,
    play,
    problems_of,
    random_ids,
)

WARM_UP = 1
LENGTH = 32  # of the random prompts


class Case(NamedTuple):
    model: str
    dtype: str
    prompts: int
    tokens: int

    def directory(self, turn: Turn) -> Path:
        return TINY if self.model == "tiny" else make(self.model, turn.models)

    def ids(self, call: int) -> list[Sequence[int]]:
        if self.model != "tiny":
            return list(random_ids(call, self.prompts, LENGTH, SHAPES[self.model].vocab))
        tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
        return [tokenizer.encode(problem.prompt).ids for problem in problems_of(call)]


CASES = {
    "tiny": Case("tiny", "fp32", PROMPTS, 32),
    "fp32": Case("100m", "fp32", 4, 16),
    "bf16": Case("100m", "bf16", 4, 16),
}


def lorad(turn: Turn, case: Case) -> Figures:
    from benchmarks.kit.ours import made, opened, prompts_of
    from lorad.protocol.batch import Sampling

    async def run() -> list[float]:
        rates = []
        async with opened(case.directory(turn), case.dtype) as held:
            version = await held.load("bench@1", turn.number)
            for index in range(turn.repeats + WARM_UP):
                prompts = prompts_of(case.ids(turn.call(index)), GROUP, turn.call(index))
                watch = Stopwatch()
                samples = await held.complete(version, prompts, Sampling(case.tokens))
                rates.append(made(samples) / watch.lap())
                assert made(samples) == case.prompts * GROUP * case.tokens
        return rates

    return {"rate": asyncio.run(run())[WARM_UP:]}


def peer(turn: Turn, case: Case) -> Figures:
    """rate: transformers as it is. mended: without its lm_head defect, see `peers.mended`."""
    from benchmarks.kit.peers import generate, mended, peft_model

    model = peft_model(case.directory(turn), case.dtype)
    figures: Figures = {"rate": [], "mended": []}
    for index in range(2 * (turn.repeats + WARM_UP)):
        name, context = (("rate", nullcontext()), ("mended", mended(model)))[index % 2]
        rows = [ids for ids in case.ids(turn.call(index)) for _ in range(GROUP)]
        with context:
            watch = Stopwatch()
            width = generate(model, rows, case.tokens)
            figures[name].append(len(rows) * width / watch.lap())
        assert width == case.tokens
    return {name: rates[WARM_UP:] for name, rates in figures.items()}


if __name__ == "__main__":
    pairs = {"lorad": lorad, "peer": peer}
    play({f"{side}-{name}": partial(run, case=CASES[name]) for side, run in pairs.items() for name in CASES})
