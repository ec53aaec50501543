"""What all stages have in common: where they work, and how they say what they found."""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.sizes import SIZES, Size


@dataclass(frozen=True)
class Place:
    """device: as torch names it. models: the folder of the random models. figures: the file of what was
    found.
    """

    size: Size
    device: str
    models: Path
    figures: Path

    @property
    def has_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def dense(self) -> Path:
        return self.models / "dense"

    @property
    def experts(self) -> Path:
        return self.models / "experts"

    def say(self, name: str, value: float | str) -> None:
        """Keep a figure at once: what a stage found before it broke is in the report. One that is no number
        ends the stage.
        """
        if isinstance(value, float):
            if not math.isfinite(value):
                raise SystemExit(f"{name} is {value}")
            value = float(f"{value:.6g}")
        print(f"{name} {value}", flush=True)
        with self.figures.open("a") as file:
            file.write(json.dumps([name, value]) + "\n")


def read_figures(path: Path) -> dict[str, Any]:
    """Return what a stage has said, without a last line that it was killed over."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return dict(json.loads(line) for line in lines)


def play(stage: Callable[[Place], None]) -> None:
    """Run one stage, as a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--figures", type=Path, required=True)
    options = parser.parse_args()
    stage(Place(SIZES[options.size], options.device, options.models, options.figures))
