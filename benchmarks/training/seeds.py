"""`make bench-seeds`: the mean reward of the first GRPO steps on builtin:tiny, over several seeds a side.

    python -m benchmarks.training.seeds [--seeds N] [--steps N]    table on stderr, JSON on stdout

`make bench` prints the same figure of one seed a side, which says nothing about a difference: samples and
initial adapters differ. Here each seed draws both anew, and a seed's prompts are the same on every side.
`plain` is the loop of `plain.py`. The difference to lorad is over pairs of equal prompts, with its standard
error.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout

from benchmarks.kit.workload import TINY, problems_of

Rewards = list[float]  # the mean reward of each step


def main() -> None:
    parser = argparse.ArgumentParser(
        description="the first steps' mean reward over seeds, lorad and its peers"
    )
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sides", default="lorad,trl,plain", help="which of: %(default)s")
    options = parser.parse_args()
    sides = {name: SIDES[name] for name in options.sides.split(",")}
    found: dict[str, list[Rewards]] = {name: [] for name in sides}
    for seed in range(options.first, options.first + options.seeds):
        for name, run in sides.items():
            found[name].append(run(seed, options.steps))
            print(f"seed {seed}, {name}: {statistics.mean(found[name][-1]):.3f}", file=sys.stderr)
    show(found)
    print(json.dumps({"steps": options.steps, "rewards": found}))


def lorad(seed: int, steps: int) -> Rewards:
    from benchmarks.kit.ours import opened
    from benchmarks.training.grpo import Loop

    async def run() -> Rewards:
        async with opened(TINY) as held:
            loop = Loop(held, seed)
            await loop.open()
            for index in range(steps):
                await loop.step(seed * steps + index)
            return loop.figures["reward"]

    return asyncio.run(run())


def trl(seed: int, steps: int) -> Rewards:
    from benchmarks.kit.peers import trl_steps

    problems = [problem for index in range(steps) for problem in problems_of(seed * steps + index)]
    with redirect_stdout(sys.stderr):  # it prints its figures
        return trl_steps(problems, steps, seed)["reward"]


def plain(seed: int, steps: int) -> Rewards:
    from benchmarks.training.plain import Plain

    path = Plain(seed)
    return [path.step(seed * steps + index) for index in range(steps)]


SIDES: Mapping[str, Callable[[int, int], Rewards]] = {"lorad": lorad, "trl": trl, "plain": plain}


def show(found: Mapping[str, Sequence[Rewards]]) -> None:
    """The mean of each side, and its difference to lorad seed by seed, each with its standard error."""
    means = {name: [statistics.mean(of) for of in runs] for name, runs in found.items()}
    print(
        f"side    mean reward        lorad less it ({len(next(iter(means.values())))} seeds)", file=sys.stderr
    )
    for name, values in means.items():
        text = f"{name:6}  {with_error(values)}"
        if name != "lorad" and "lorad" in means:
            differences = [ours - theirs for ours, theirs in zip(means["lorad"], values, strict=True)]
            text += f"    {with_error(differences, sign='+')}"
        print(text, file=sys.stderr)


def with_error(values: Sequence[float], sign: str = "") -> str:
    """`0.570 ± 0.006`, the second being the standard error of the mean."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):{sign}.4f} ± {error:.4f}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, which the sides do
    main()
