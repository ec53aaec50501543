"""Keys and values of a group's prompt, kept once against in each row.

    make bench-prompts, or python -m benchmarks.rollout.prompts [--model tiny|25m|100m] [--samples 32]

Groups of samples over prompts of 256 to 4,096 tokens, 32 new tokens each, in a decode batch of the builtin
engine: the most keys and values that it held, and CPU milliseconds of a decode step, both ways in turn (A B A
B, the median). Weights are random.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kit.models import SHAPES, make
from benchmarks.kit.workload import Stopwatch, random_ids
from lorad.engines.builtin import calls
from lorad.engines.builtin.calls import Call, HeldLora
from lorad.engines.builtin.decode import DecodeBatch
from lorad.models.kv import bytes_per_token
from lorad.models.loading import load_base
from lorad.models.merge import Merger
from lorad.protocol.batch import Prompt, Sampling

NEW, TRIES = 32, 3


def decoded(models: Merger, prompt: np.ndarray, samples: int, shared: int) -> tuple[float, float]:
    """(MB of keys and values, CPU milliseconds of a step) of one group. shared: tokens of a prompt from which
    on it is kept once.
    """
    calls.SHARED = shared
    batch, most, times = DecodeBatch(models, samples, 1 << 40), 0, []
    seeds = np.arange(samples, dtype=np.uint64)
    batch.join(Call("call", HeldLora("base", ""), [Prompt("0", prompt, seeds)], Sampling(NEW), None))
    while batch.calls:
        watch, before = Stopwatch(), batch.admitted
        batch.run(0.0)
        if batch.admitted == before:
            times.append(watch.lap())
        most = max(most, batch.cache.slots * batch.cache.length + batch.prompts.tokens())
    return most * bytes_per_token(models.base) / 1e6, 1e3 * statistics.median(times[1:])


def row(models: Merger, length: int, samples: int) -> Sequence[str]:
    """One line of the table: prompt tokens, MB and milliseconds each way, and their ratios."""
    prompt = random_ids(length, 1, length, models.base.config.vocab_size)[0].astype(np.int32)
    ways = {"rows": 1 << 30, "once": 0}
    tries = [{name: decoded(models, prompt, samples, at) for name, at in ways.items()} for _ in range(TRIES)]
    megabytes = {name: tries[0][name][0] for name in ways}
    step = {name: statistics.median(one[name][1] for one in tries) for name in ways}
    return (
        f"{length:,}",
        *(f"{megabytes[name]:.0f}" for name in ways),
        f"{megabytes['rows'] / megabytes['once']:.1f}",
        *(f"{step[name]:.1f}" for name in ways),
        f"{step['rows'] / step['once']:.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="prompts kept once against in each row")
    parser.add_argument("--model", choices=SHAPES, default="25m")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--lengths", default="256,512,1024,2048,4096")
    options = parser.parse_args()
    head = "prompt tokens", "MB, each row", "MB, once", "ratio", "ms, each row", "ms, once", "ratio"
    with tempfile.TemporaryDirectory(prefix="lorad-bench-") as directory:
        base = load_base(make(options.model, Path(directory)), torch.float32, torch.device("cpu"))
        models = Merger(base)
        lines = [row(models, int(length), options.samples) for length in options.lengths.split(",")]
    table = Table(*head, title=f"{options.samples} samples of a prompt, {SHAPES[options.model].label}")
    for line in lines:
        table.add_row(*line)
    Console().print(table)


if __name__ == "__main__":
    main()
