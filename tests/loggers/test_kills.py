"""Loggers that are killed at random moments, read back by their own readers: nothing is missing, extra, wrong
or double. `make test ARGS="-m long tests/loggers"` kills each of them 100 times.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from lorad.loggers.follow import values
from lorad.protocol.journal import JournalWriter, lineage
from tests.kit.journals import begin, end, evaluation, records_of, step

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"DO_NOT_TRACK": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_SILENT": "true"}
REWINDS = 3


def write_journal(path: Path, dice: random.Random) -> None:
    """A run that is resumed three times, each time from an earlier step."""
    reached = 0
    for attempt in range(1, REWINDS + 2):
        with JournalWriter(path, "r", attempt) as writer:
            start = reached - dice.randint(1, min(reached, 15)) if attempt > 1 else None
            begin(writer, start)
            if attempt == 1:
                evaluation(writer, 0, dice.random())
            first = (start or 0) + 1
            for reached in range(first, first + dice.randint(20, 40)):
                step(writer, reached, dice.random())
                if reached % 10 == 0:
                    evaluation(writer, reached, dice.random())
            if attempt > REWINDS:
                end(writer, reached)


def expected(path: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for record in lineage(records_of(path)):
        for name, value in values(record).items() if record.kind in ("step", "eval") else ():
            found.setdefault(name, {})[str(record.step)] = value
    return found


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | QUIET,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def check(name: str, directory: Path, kills: int, seed: int) -> int:
    """Kill it, read it back, compare: the number of those that died."""
    journal = directory / "journal.jsonl"
    write_journal(journal, random.Random(seed))
    lines = run("tests.loggers.lives", name, str(directory), str(kills), str(seed)).splitlines()
    killed: int
    killed, read = json.loads(lines[-1])
    wanted = expected(journal)
    assert {name: set(steps) for name, steps in read.items()} == {n: set(s) for n, s in wanted.items()}
    for name, steps in wanted.items():
        for number, value in steps.items():
            assert read[name][number] == [pytest.approx(value, rel=1e-6)], (name, number)
    return killed


@pytest.mark.parametrize("name,kills", [("tensorboard", 10), ("mlflow", 3), ("wandb", 2)])
def test_killed_logger_leaves_the_lineage(name: str, kills: int, tmp_path: Path) -> None:
    pytest.importorskip(name)
    assert check(name, tmp_path, kills, seed=1) > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "name,journals,kills", [("tensorboard", 10, 10), ("mlflow", 4, 25), ("wandb", 4, 25)]
)
def test_hundred_kills_leave_the_lineage(name: str, journals: int, kills: int, tmp_path: Path) -> None:
    pytest.importorskip(name)
    killed = 0
    for seed in range(journals):
        (directory := tmp_path / str(seed)).mkdir()
        killed += check(name, directory, kills, seed)
    assert killed >= journals * kills // 2
