"""Attestation: false alarms over many clean versions, faults that are found, and what it costs of a step.

    python -m benchmarks.serving.attestation [--clean 500] [--apart 120] [--trials 5] [--steps 10]
        [--json FILE]

Versions are a small random step apart; learning rates from 1e-5 to 1e-3 and ranks from 4 to 16 are drawn
again for each run of 20. *fused* is one process with one fp32 base, where the direct comparison suffices;
*apart* is everything else: names and amplified copies, in bfloat16 or in fp32. A step of the cost is 4
prompts with 8 samples each of 64 tokens.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.kit.models import make
from lorad.errors import AdapterRefused, AttestationFailed
from lorad.models.directory import linear_shapes, read_config
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets, Prompt, Sampling
from lorad.protocol.calls import ForwardBackward, Generate, Nothing, Open, OptimStep, Publish
from lorad.protocol.connection import Connection
from tests.kit.fakes import faulty_engines
from tests.kit.pool_kit import OPEN, TINY, Running, learn, publish, running_pool

FUSED: dict[str, Any] = {}
APART: dict[str, Any] = {"mode": "resident", "dtype": "bfloat16"}
APART_FP32: dict[str, Any] = {"mode": "resident"}
VERSIONS = 20  # of a run
FAULTS = ("ServesPrevious", "ServesBase", "DoublesScale", "DropsTarget", "TransposesA", "RollsA", "ServesNaN")
PROMPTS, SAMPLES, PROMPT_TOKENS, TOKENS = 4, 8, 32, 64
TIMEOUT = 1200.0
WARM = 2  # steps that are not counted


@contextlib.contextmanager
def pool(**changes: Any) -> Iterator[tuple[Running, Path]]:
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lorad-")))
        changes = {"engine_class": "tests.kit.fakes.faulty_engines:Switched", **changes}
        yield stack.enter_context(running_pool(root, **changes)), root


@contextlib.contextmanager
def run_of(
    running: Running, number: int, every: int = OPEN.amplified_every
) -> Iterator[tuple[Connection, float]]:
    """A run with an open slot, and its learning rate."""
    rng = np.random.default_rng(number)
    rank, lr = int(rng.integers(4, 17)), float(10 ** rng.uniform(-5, -3))
    with running.connect(f"run-{number}") as run:
        run.call("open", replace(OPEN, rank=rank, alpha=2.0 * rank, seed=number, amplified_every=every))
        yield run, lr
        run.call("close", Nothing())


def clean(count: int, **changes: Any) -> Counter[str]:
    """Verdicts over so many versions; `alarm` is a failure of one that has no fault."""
    verdicts: Counter[str] = Counter()
    with pool(**changes) as (running, root):
        for number in range(-(-count // VERSIONS)):
            with run_of(running, number) as (run, lr):
                for version in range(VERSIONS):
                    try:
                        verdicts[publish(run, root, version).attestation.verdict] += 1
                    except AttestationFailed as alarm:
                        print(f"ALARM: {alarm}", file=sys.stderr)
                        verdicts["alarm"] += 1
                    learn(run, seed=VERSIONS * number + version, lr=lr)
    return verdicts


def found(fault: str, trials: int, **changes: Any) -> int:
    """In how many trials the first faulty version, of a random number, was found by its own publish."""
    caught = 0
    faulty_engines.Switched.fault = getattr(faulty_engines, fault)
    with pool(**changes) as (running, root):
        for trial in range(trials):
            first = 1 + trial % 3
            faulty_engines.Faulty.faulty_from = first + 1
            with run_of(running, 1000 + trial, every=1) as (run, lr):
                for version in range(first):
                    publish(run, root, version)
                    learn(run, seed=10 * trial + version, lr=lr)
                try:
                    publish(run, root, first)
                except (AttestationFailed, AdapterRefused):
                    caught += 1
    faulty_engines.Switched.fault = faulty_engines.Clean
    return caught


def cost(model: Path, steps: int, **changes: Any) -> dict[str, float]:
    """Seconds of a step and of its attestation, means over the counted steps,
    the amplified ones among them.
    """
    modules = tuple(sorted(name for name in linear_shapes(read_config(model)) if name != "lm_head"))
    total = attested = 0.0
    with pool(model_path=str(model), **changes) as (running, root), patient(running) as run:
        run.call("open", Open(modules=modules, rank=16, alpha=32.0))
        publish(run, root, 0)
        for number in range(1, WARM + steps + 1):
            begun = time.perf_counter()
            seconds = step(run, root, number)
            if number > WARM:
                total, attested = total + time.perf_counter() - begun, attested + seconds
    return {"step": total / steps, "attestation": attested / steps, "share": attested / total}


def patient(running: Running) -> Connection:
    return Connection(Path(running.config.socket), run="sorter", attempt=1, timeout=TIMEOUT)


def step(run: Connection, root: Path, number: int) -> float:
    """Sample, train and publish; the seconds of attestation."""
    rng = np.random.default_rng(number)
    prompts = [
        Prompt(
            str(i),
            rng.integers(4, 100, PROMPT_TOKENS).astype(np.int32),
            rng.integers(0, 1 << 62, SAMPLES, np.uint64),
        )
        for i in range(PROMPTS)
    ]
    asked = Generate(f"sorter@{number - 1}", prompts, Sampling(max_new_tokens=TOKENS))
    *items, _ = run.stream("generate", asked)
    chunks = [chunk for item in items for chunk in item.split(prompts)]
    samples: dict[tuple[str, int], list[Any]] = {}
    for chunk in chunks:
        samples.setdefault((chunk.prompt, chunk.index), []).append(chunk)
    texts = {key: np.concatenate([c.tokens for c in parts]) for key, parts in samples.items()}
    batch = Batch.of([(p.tokens, [texts[p.id, i] for i in range(SAMPLES)]) for p in prompts])
    logprobs = np.concatenate([c.logprobs for p in prompts for i in range(SAMPLES) for c in samples[p.id, i]])
    each = rng.normal(size=PROMPTS * SAMPLES).astype(np.float32)
    targets = PolicyTargets(np.repeat(each, batch.completion_lengths), logprobs)
    run.call("forward_backward", ForwardBackward(batch, targets, PolicyLoss(), float(batch.completions.size)))
    run.call("optim_step", OptimStep(1e-4, 1.0))
    directory = str(root / "sorter" / "versions" / f"{number:06d}")
    return float(
        run.call("publish", Publish(number, number, f"sorter@{number - 1}", directory)).attest_seconds
    )


def main() -> None:
    options = parse()
    result: dict[str, Any] = {"alarms": {}, "faults": {}, "cost": {}}
    for name, count, changes in (("fused fp32", options.clean, FUSED), ("apart bf16", options.apart, APART)):
        verdicts = result["alarms"][name] = dict(clean(count, **changes))
        print(f"{name}: {verdicts}", flush=True)
    for name, changes in (("fused fp32", FUSED), ("apart bf16", APART)):
        for fault in FAULTS if options.trials else ():
            caught = result["faults"][f"{name} {fault}"] = found(fault, options.trials, **changes)
            print(f"{name}: {fault} found {caught} of {options.trials}", flush=True)
    with tempfile.TemporaryDirectory(prefix="lorad-models-") as models:
        for model in options.models.split(",") if options.steps else ():
            directory = TINY if model == "tiny" else make(model, Path(models))
            for name, changes in (("fused fp32", FUSED), ("apart fp32", APART_FP32)):
                spent = result["cost"][f"{model} {name}"] = cost(directory, options.steps, **changes)
                print(
                    f"{model}, {name}: a step {spent['step']:.3f} s, attestation {spent['attestation']:.3f} "
                    f"s, {spent['share']:.1%}",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="false alarms, faults found, and the cost of attestation")
    parser.add_argument(
        "--clean", type=int, default=500, help="versions in a fused fp32 pool (default %(default)s)"
    )
    parser.add_argument(
        "--apart", type=int, default=120, help="versions in bfloat16, apart (default %(default)s)"
    )
    parser.add_argument(
        "--trials", type=int, default=5, help="of each fault, in each pool (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=10, help="counted for the cost (default %(default)s)")
    parser.add_argument("--models", default="tiny,100m", help="for the cost (default %(default)s)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
