"""`make prove-llm`: every trainer with every engine, and every kind of algorithm, on SmolLM2-135M-Instruct, a
real chat model; transformers and PEFT are the judge. Takes hours on two cores.

    python -m tests.llm.prove [--only parity pairs algorithms] [--of NAME ...] [--seeds N] [--steps N]
        tables on stdout as they are made; the exit code is 1 where something is not as it must be

--of: names of trainers and engines, of pairs (fsdp-vllm) or of algorithms (PPO), where not all are wanted.
LORAD_GSM8K names the folder of train.jsonl and test.jsonl for SFT; without it that row is left out.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.llm import parity
from tests.llm.algorithms import ALGORITHMS, HEADING
from tests.llm.learning import Outcome, heading, run_of_additions
from tests.llm.place import smollm2
from tests.trainers.real.pairs import ENGINES, TRAINERS, missing

PARTS = ("parity", "pairs", "algorithms")
CLOSE = 2e-4  # nats in fp32, as far as sums of another order go
STEPPED = 1e-3  # relative; or nats after steps of AdamW, which divides noise by noise for tiny gradients
RISE, AS_PEFT = 0.2, 3 / 128  # of the held-out score; how far PEFT's may be from it


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--of", nargs="*", default=())
    parser.add_argument("--seeds", type=int, default=3, help="of builtin with builtin; other pairs have one")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if (base := smollm2()) is None:
        raise SystemExit("SmolLM2 is not here: lorad models get smollm2")
    faults: list[str] = []
    if "parity" in options.only:
        faults += prove_parity(base, options.of)
    if "pairs" in options.only:
        faults += prove_pairs(base, options.of, options.seeds, options.steps)
    if "algorithms" in options.only:
        faults += prove_algorithms(base, options.of)
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


def prove_parity(base: Path, of: Sequence[str]) -> list[str]:
    """Print how far each trainer and each engine is from transformers and PEFT; returns what is too far."""
    faults = []
    for title, measure, backends in (
        ("Trainers", parity.of_trainer, TRAINERS),
        ("Engines", parity.of_engine, ENGINES),
    ):
        print(f"\n{title}: largest difference from transformers and PEFT, nats")
        table = {}
        for backend in (name for name in backends if is_wanted(name, of)):
            with tempfile.TemporaryDirectory(prefix="lr-") as work:
                table[backend] = asyncio.run(measure(backend, base, Path(work)))
            faults += [f"{backend}: {fault}" for fault in faults_of(table[backend])]
        print("\n".join(parity.rows_of(table)), flush=True)
    return faults


def faults_of(measured: parity.Numbers) -> list[str]:
    return [
        f"{kind} is {value:.1e}"
        for kind, value in measured.items()
        if value > (CLOSE if kind in ("base", "adapter", "samples of both, mixed") else STEPPED)
    ]


def prove_pairs(base: Path, of: Sequence[str], seeds: int, steps: int) -> list[str]:
    """Print what each pair has learnt; returns what is not as it must be."""
    faults = []
    half = steps // 2
    print("", *heading(range(0, steps + 1, half)), sep="\n", flush=True)
    for trainer, engine in ((trainer, engine) for trainer in TRAINERS for engine in ENGINES):
        if not is_wanted(f"{trainer}-{engine}", of):
            continue
        for seed in range(seeds if trainer == engine == "builtin" else 1):
            name = f"{trainer} x {engine}" + f", seed {seed}" * (seed > 0)
            began = time.monotonic()
            outcome = run_of_additions(base, trainer, engine, steps, seed=seed, every=half)
            print(outcome.row(name), flush=True)
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
            faults += [f"{name}: {fault}" for fault in unlearned(outcome)]
    return faults


def prove_algorithms(base: Path, of: Sequence[str]) -> list[str]:
    """Print what each algorithm has changed; returns what has not changed as it must."""
    faults = []
    print("", *HEADING, sep="\n", flush=True)
    for name in (name for name in ALGORITHMS if is_wanted(name, of)):
        for result in ALGORITHMS[name](base):
            print(result.row(name), flush=True)
            faults += [f"{name}: {result}"] * (not result.holds)
    return faults


def unlearned(outcome: Outcome) -> list[str]:
    """Say what is not as it must be in a run that learns."""
    first, *_, last = outcome.evals.values()
    checks = {
        f"held out {first:.3f} -> {last:.3f}": last > first + RISE,
        f"PEFT solves {outcome.peft:.3f}, lorad {last:.3f}": abs(outcome.peft - last) <= AS_PEFT,
        f"trainer and engine are {outcome.apart[0]:.1e} nats apart": outcome.apart[0] < CLOSE,
        f"versions: {outcome.attested}": set(outcome.attested) == {"passed"},
        f"lorad why: {outcome.findings}": not outcome.findings,
    }
    return [fault for fault, holds in checks.items() if not holds]


def is_wanted(name: str, of: Sequence[str]) -> bool:
    return not of or name in of


if __name__ == "__main__":
    for absent in missing(*TRAINERS, *ENGINES):
        print(f"{absent} names no interpreter: `make prove-llm` installs them", file=sys.stderr)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
