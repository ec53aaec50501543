"""Additions of numbers of two digits, as `smollm2-addition.yaml` asks for them.

`python examples/addition.py [DIR]` writes train.csv and test.csv, by default where the repository has them.
No addition is in both.
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent / "addition"
SIZES = {"test": 128, "train": 2000}


def rows() -> dict[str, list[tuple[int, int, int]]]:
    """Return (a, b, a + b) of each file, the same for ever."""
    pairs = [(a, b, a + b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    return {name: [pairs.pop() for _ in range(size)] for name, size in SIZES.items()}


def main(directory: str = str(HERE)) -> None:
    path = Path(directory).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    for name, additions in rows().items():
        with (path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("a", "b", "answer"), *additions])


if __name__ == "__main__":
    main(*sys.argv[1:])
