"""What `make bench-algorithms` puts side by side: sections of a spec, and settings of the peer's trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from benchmarks.kit.workload import (
    ALPHA,
    GROUP,
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    PROMPTS,
    RANK,
    TASK,
    held_out,
)
from lorad.rl.tasks import problem

ROWS, BATCH = "rows.jsonl", 64  # the file that both train on, and rows of a step


@dataclass(frozen=True)
class Pair:
    """One line of the table.

    spec: sections of lorad's spec that take the place of the usual ones.
    settings: what the peer's trainer is given beside the usual settings.
    columns: of the rows that both train on in the same order; empty: prompts are sampled.
    """

    name: str
    spec: Mapping[str, Any]
    trainer: str
    settings: Mapping[str, Any]
    columns: Sequence[str] = ()


def _grpo(name: str, algorithm: Mapping[str, Any], **settings: Any) -> Pair:
    return Pair(name, {"algorithm": {"group_size": GROUP, **algorithm}}, "TRL GRPOTrainer", settings)


def _on_rows(method: str, trainer: str, columns: Sequence[str], lr: float) -> Pair:
    spec = {
        "algorithm": {"name": method},
        "data": {"train": ROWS, "eval": TASK, "prompts_per_step": BATCH, "shuffle": False},
        "trainer": {"lr": lr},
    }
    settings = {"per_device_train_batch_size": BATCH, "learning_rate": lr}
    return Pair(method.upper(), spec, trainer, settings, columns)


PAIRS: Sequence[Pair] = (
    _grpo("GRPO", {"name": "grpo", "level": "sequence"}, loss_type="grpo"),
    _grpo("DAPO's loss", {"name": "grpo", "clip": [0.2, 0.28]}, loss_type="dapo", epsilon_high=0.28),
    _grpo("Dr. GRPO", {"name": "dr_grpo"}, loss_type="dr_grpo", scale_rewards="none"),
    _grpo(
        "GSPO",
        {"name": "gspo"},
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
    ),
    _on_rows("sft", "TRL SFTTrainer", ("prompt", "completion"), 1e-3),
    _on_rows("dpo", "TRL DPOTrainer", ("prompt", "chosen", "rejected"), 1e-4),
)


def rows_of(columns: Sequence[str], steps: int, seed: int) -> list[dict[str, str]]:
    """Return the rows of all steps: right answers, and the unsorted word as a wrong one."""
    made = (problem(TASK, "train", seed, index) for index in count())
    rows = (
        {"prompt": p.prompt, "completion": p.answer, "chosen": p.answer, "rejected": p.prompt[2:-1]}
        for p in made
        if p.answer != p.prompt[2:-1]
    )
    return [{key: row[key] for key in columns} for row in islice(rows, steps * BATCH)]


def spec_of(pair: Pair, steps: int, seed: int) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "name": "bench",
        "seed": seed,
        "model": {"path": "builtin:tiny"},
        "lora": {"rank": RANK, "alpha": ALPHA},
        "data": {"train": TASK, "prompts_per_step": PROMPTS},
        "trainer": {"lr": LEARNING_RATE, "steps": steps},
        "rollout": {"max_new_tokens": MAX_NEW_TOKENS},
        "eval": {"every": steps, "problems": len(held_out())},
        "checkpoint": {"every": steps},
        "pool": {"threads": 1},
    }
    given = dict(pair.spec)
    return usual | given | {"trainer": {**usual["trainer"], **given.get("trainer", {})}}
