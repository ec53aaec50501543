"""Journals as drivers write them, for tests: whole runs with resumes, and the rows that must come of them."""

import random
from pathlib import Path
from typing import Any

from lorad.protocol.journal import (
    AttemptFact,
    CheckpointFact,
    EndFact,
    EvalFact,
    JournalWriter,
    Record,
    StepFact,
    VersionFact,
    read,
)
from lorad.states import RunState
from lorad.store import checkpoints, metrics, runs, versions
from lorad.store.db import Store
from lorad.store.record import KEYS
from lorad.store.rows import RunRow

TABLES = ("steps", "evals", *KEYS)


def new_run(store: Store, name: str = "sorter", directory: str = "/runs/sorter") -> RunRow:
    return runs.create(
        store, name=name, owner="ada", spec_json="{}", directory=directory, steps=10, priority=0
    )


def a_run(**fields: Any) -> RunRow:
    """A run's row that is in no database."""
    usual: dict[str, Any] = {
        "name": "a",
        "owner_uid": 0,
        "state": RunState.QUEUED,
        "spec": "{}",
        "directory": "/runs/a",
    }
    return RunRow(**usual | fields)


def records_of(path: Path) -> list[Record]:
    return [record for record, _ in read(path)]


def begin(writer: JournalWriter, resumed_from: int | None = None) -> None:
    writer.append("attempt", resumed_from or 0, AttemptFact(1, 10, "tiny-1", "00", resumed_from, 100))
    if resumed_from is not None:
        writer.append("rewind", resumed_from, {"to": resumed_from})


def step(writer: JournalWriter, step: int, reward: float = 0.5) -> None:
    measured = {"reward": reward, "seconds": 2.0, "tokens_per_second": 100.0}
    writer.append("step", step, StepFact(step - 1, ["p1"], step - 1, f"samples/{step}", "ab", measured))


def version(writer: JournalWriter, step: int, number: int) -> None:
    path = f"versions/{number:06d}"
    fact = VersionFact(
        number, f"{number:064x}", number - 1 or None, path, 8, 16.0, 100, "passed", "delivered"
    )
    writer.append("version", step, fact)


def evaluation(writer: JournalWriter, step: int, score: float) -> None:
    writer.append("eval", step, EvalFact(step, score, 64, 0))


def checkpoint(writer: JournalWriter, step: int) -> None:
    path = f"checkpoints/{step:06d}-a{writer.attempt}"
    writer.append("checkpoint", step, CheckpointFact(path, step, 100))


def end(writer: JournalWriter, step: int, reason: str = "completed") -> None:
    writer.append("end", step, EndFact(reason, ""))


def whole_run(path: Path, chance: random.Random, attempts: int = 3) -> None:
    """A run of some attempts, each but the first resumed from a step that was reached, each but the last
    broken off.
    """
    reached = number = 0
    for attempt in range(1, attempts + 1):
        with JournalWriter(path, "sorter", attempt) as writer:
            start = chance.randint(0, reached) if attempt > 1 else None
            begin(writer, start)
            for reached in range((start or 0) + 1, (start or 0) + chance.randint(2, 5)):
                step(writer, reached, chance.random())
                number += 1
                version(writer, reached, number)
                if chance.random() < 0.5:
                    evaluation(writer, reached, chance.random())
                    checkpoint(writer, reached)
            if attempt == attempts:
                end(writer, reached)


def index_of(store: Store, name: str = "sorter") -> dict[str, object]:
    """All that the journal of a run makes of the index, less the moments at which the daemon looked at it."""
    run = runs.get(store, name)
    figures = (
        "step",
        "reward",
        "eval_first",
        "eval_last",
        "nll_first",
        "nll_last",
        "token_accuracy_last",
        "accuracy_last",
        "version",
        "attempt",
        "rates",
        "signals",
        "recent",
    )
    return {
        "run": {key: getattr(run, key) for key in figures},
        "steps": metrics.steps(store, name),
        "evals": metrics.evals(store, name),
        "versions": versions.versions(store, name),
        "checkpoints": checkpoints.checkpoints(store, name),
        "attempts": runs.attempts(store, name),
        "rows": [
            store.rows(f"SELECT * FROM {table} ORDER BY seq") for table in ("steps", "evals", "checkpoints")
        ],
        "place": store.rows("SELECT * FROM journal_offsets"),
    }
