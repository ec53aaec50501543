"""Measure `uneven`: 512 requests of very uneven lengths on builtin:tiny, tokens per CPU second, with a LoRA
active.

The lengths are geometric (mean 16, cap 64) and the same on both sides; where a request ends is its bound on
new tokens, by which neither side plans. Every request is a prompt of its own. lorad gets each request as a
call of its own, all at once, and has 128 rows, which requests enter as others leave. The peer takes them in
the same order, in padded batches of 128; a batch ends with its longest sample.
"""

import asyncio

from tokenizers import Tokenizer

from benchmarks.kit.workload import (
    PROMPTS,
    TINY,
    Figures,
    Stopwatch,
    Turn,
    play,
    problems_of,
    uneven_lengths,
)

REQUESTS, ROWS = 512, 128
WARM_UP = 1


def requests(call: int) -> tuple[list[list[int]], list[int]]:
    """(prompts, lengths) in the order of their arrival."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    steps = REQUESTS // PROMPTS
    problems = [problem for step in range(steps) for problem in problems_of(call * steps + step)]
    return [tokenizer.encode(problem.prompt).ids for problem in problems], uneven_lengths(call, REQUESTS)


def lorad(turn: Turn) -> Figures:
    from benchmarks.kit.ours import made, opened, prompts_of
    from lorad.protocol.batch import Sampling

    async def run() -> list[float]:
        rates = []
        async with opened(TINY, mix_calls=True, max_rows=ROWS) as held:
            version = await held.load("bench@1", turn.number)
            for index in range(turn.repeats + WARM_UP):
                ids, lengths = requests(index + turn.number * (turn.repeats + WARM_UP))
                pairs = list(zip(prompts_of(ids, 1, turn.call(index)), map(Sampling, lengths), strict=True))
                watch = Stopwatch()
                answers = await asyncio.gather(
                    *(held.complete(version, [prompt], how) for prompt, how in pairs)
                )
                rates.append(sum(lengths) / watch.lap())
                assert [made(samples) for samples in answers] == lengths
        return rates

    return {"rate": asyncio.run(run())[WARM_UP:]}


def peer(turn: Turn) -> Figures:
    from benchmarks.kit.peers import LengthReached, generate, peft_model

    model = peft_model(TINY)
    rates = []
    for index in range(turn.repeats + WARM_UP):
        ids, lengths = requests(index + turn.number * (turn.repeats + WARM_UP))
        watch = Stopwatch()
        for first in range(0, REQUESTS, ROWS):
            rows, ends = ids[first : first + ROWS], lengths[first : first + ROWS]
            criteria = [LengthReached(max(map(len, rows)), ends)]
            assert generate(model, rows, max(ends), stopping_criteria=criteria) == max(ends)
        rates.append(sum(lengths) / watch.lap())
    return {"rate": rates[WARM_UP:]}


if __name__ == "__main__":
    play({"lorad": lorad, "peer": peer})
