"""Learning curves: lorad's path (shared prefixes, packing, skipped groups) against the plain path of
`plain.py`.

    python -m benchmarks.training.curves [--steps N] [--every N] [--seeds N]
        table on stderr, JSON on stdout

Both see the same prompts with the same hyper-parameters; their samples and their initial adapters differ, so
the curves agree within noise at best. The band is 95 % of the noise in the difference of two means over seeds
(Student's t), a mean's noise being what its seeds differ by, and no less than 256 problems can resolve: one
evaluation in twenty lies outside by chance. The last line compares whole curves: the mean of all evaluations
after the first step.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.kit.workload import TINY, held_out

# greedy exact match on the held-out problems before the first step and after every few steps
Curve = list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description="lorad's learning curves against the plain path's")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps between two evaluations")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    curves: dict[str, list[Curve]] = {"lorad": [], "plain": []}
    for seed in range(options.seeds):
        for side, run in (("lorad", lorad), ("plain", plain)):
            curves[side].append(run(seed, options.steps, options.every))
            print(f"{side}, seed {seed}: {row(curves[side][-1])}", file=sys.stderr)
    result = compare(curves, range(0, options.steps + 1, options.every), len(held_out()))
    show(result)
    print(json.dumps({"curves": curves, "steps": result}, indent=2))


def lorad(seed: int, steps: int, every: int) -> Curve:
    from benchmarks.kit.ours import opened
    from benchmarks.training.grpo import Loop

    async def run() -> Curve:
        async with opened(TINY) as held:
            loop = Loop(held, seed)
            await loop.open()
            curve = [await loop.greedy(held_out())]
            for number in range(steps):
                await loop.step(seed * steps + number)
                if (number + 1) % every == 0:
                    curve.append(await loop.greedy(held_out()))
            return curve

    return asyncio.run(run())


def plain(seed: int, steps: int, every: int) -> Curve:
    from benchmarks.training.plain import Plain

    path = Plain(seed)
    curve = [path.greedy(held_out())]
    for number in range(steps):
        path.step(seed * steps + number)
        if (number + 1) % every == 0:
            curve.append(path.greedy(held_out()))
    return curve


def compare(curves: dict[str, list[Curve]], steps: Sequence[int], problems: int) -> list[dict[str, Any]]:
    """Compare the means of each evaluation, and of all that follow the first step, with the band of noise."""
    compared: list[dict[str, Any]] = []
    for index, step in enumerate(steps):
        values = {side: [curve[index] for curve in of] for side, of in curves.items()}
        compared.append({"step": str(step), **difference(values, problems)})
    whole = {side: [statistics.mean(curve[1:]) for curve in of] for side, of in curves.items()}
    return [*compared, {"step": "mean", **difference(whole, problems * (len(steps) - 1))}]


def difference(values: dict[str, list[float]], problems: int) -> dict[str, Any]:
    """Compare the two sides' means over seeds. values: one for each seed."""
    means = {side: statistics.mean(of) for side, of in values.items()}
    freedom = sum(len(of) - 1 for of in values.values())
    band = t_quantile(max(freedom, 1)) * math.sqrt(sum(squared_error(of, problems) for of in values.values()))
    return {**means, "band": band, "within": abs(means["lorad"] - means["plain"]) <= band}


def squared_error(values: Sequence[float], problems: int) -> float:
    """Estimate the variance of the mean over seeds from their spread; no less than the binomial one of so
    many problems.
    """
    binomial = [max(p * (1 - p), 1 / problems) / problems for p in values]
    between = statistics.variance(values) if len(values) > 1 else 0.0
    return max(statistics.mean(binomial), between) / len(values)


def t_quantile(freedom: int, z: float = 1.96) -> float:
    """Student's t that 95 % lie within: Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5)."""
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def show(result: list[dict[str, Any]]) -> None:
    print("step   lorad   plain   difference   band", file=sys.stderr)
    for at in result:
        verdict = "within" if at["within"] else "OUTSIDE"
        numbers = (
            f"{at['lorad']:.3f}   {at['plain']:.3f}   {at['lorad'] - at['plain']:+.3f}       {at['band']:.3f}"
        )
        print(f"{at['step']:>4}   {numbers}  {verdict}", file=sys.stderr)


def row(curve: Curve) -> str:
    return " ".join(f"{value:.3f}" for value in curve)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, which the two sides do
    main()
