"""`make gpu-day`: what lorad does on one GPU, in at most ten minutes and without a network.

    python -m benchmarks.gpu_day.day [--size auto] [--out DIR] [--stages facts,model,run]

Each stage is a process with a time limit: one that fails or hangs does not take the others along. The report,
`report.md` and `report.json` in the folder `--out` (`$OUT/gpu-day`, else `gpu-day` here), is written after
each. The exit code is 1 when a stage did not pass. On a CPU the size is `micro`, which tries the stages
themselves.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType

from benchmarks.gpu_day.report import Day, write
from benchmarks.gpu_day.sizes import SIZES, pick, place_for_models
from benchmarks.gpu_day.stages import STAGES, Outcome, run_stage
from lorad.daemon.gpu.devices import environment, find_devices, is_taken

MOST_SECONDS = 585.0
_OUT = Path(os.environ.get("OUT", ""), "gpu-day")


def play(day: Day, folder: Path) -> None:
    """Run the stages one after another, and report after each."""
    models = Path(tempfile.mkdtemp(prefix="gpu-day-", dir=place_for_models()[0]))
    options = ["--size", day.size.name, "--device", day.device, "--models", str(models)]
    deadline = time.monotonic() + MOST_SECONDS
    try:
        for outcome in day.outcomes:
            outcome.state = "running"
            write(day, folder)
            print(f"==> {outcome.stage.name}: {outcome.stage.about}", file=sys.stderr, flush=True)
            run_stage(outcome, options, folder / "logs", deadline - time.monotonic())
            print(f"    {outcome.state}, {outcome.seconds:.1f} s", file=sys.stderr, flush=True)
            if outcome.has_failed:
                print(outcome.error, file=sys.stderr, flush=True)
            write(day, folder)
    finally:
        shutil.rmtree(models, ignore_errors=True)


def main() -> int:
    options = _options()
    chosen = [replace(stage, seconds=options.seconds.get(stage.name, stage.seconds)) for stage in STAGES]
    device = find_devices()[0]
    if is_taken(device):
        sys.exit(f"{device.label} is leased by lorad: stop its runs, or name another in CUDA_VISIBLE_DEVICES")
    size = pick(device, place_for_models()[1]) if options.size == "auto" else SIZES[options.size]
    os.environ.update(environment([device]))
    if device.is_cpu:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    outcomes = [Outcome(stage) for stage in chosen if stage.name in options.stages]
    day = Day(size, device.kind, device.label, outcomes)
    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _stop)
    play(day, options.out)
    print(f"==> {options.out / 'report.md'}", file=sys.stderr)
    return 0 if day.has_passed else 1


def _options() -> argparse.Namespace:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(description="one GPU in ten minutes")
    parser.add_argument("--size", choices=("auto", *SIZES), default="auto")
    parser.add_argument("--out", type=Path, default=_OUT, help="the folder of the report")
    parser.add_argument("--stages", type=_names, default=names, help=f"of: {','.join(names)}")
    parser.add_argument(
        "--seconds", type=_limits, default={}, help="limits of stages, such as run=300,train=90"
    )
    options = parser.parse_args()
    if unknown := {*options.stages, *options.seconds} - {*names}:
        parser.error(f"no stage {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    return options


def _names(text: str) -> list[str]:
    return text.split(",")


def _limits(text: str) -> Mapping[str, float]:
    pairs = [part.partition("=") for part in text.split(",")]
    return {name: float(seconds) for name, _, seconds in pairs}


def _stop(number: int, frame: FrameType | None) -> None:
    """End as after ^C, so that nothing is left running."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
