"""What `make bench-algorithms` puts side by side: sections of a spec, and settings of the peer's trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.kit.workload import (
    ALPHA,
    GROUP,
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    PROMPTS,
    RANK,
    TASK,
    held_out,
)


@dataclass(frozen=True)
class Pair:
    """One line of the table.

    spec: sections of lorad's spec that take the place of the usual ones.
    settings: what the peer's trainer is given beside the usual settings.
    """

    name: str
    spec: Mapping[str, Any]
    trainer: str
    settings: Mapping[str, Any]


def _grpo(name: str, algorithm: Mapping[str, Any], **settings: Any) -> Pair:
    return Pair(name, {"algorithm": {"group_size": GROUP, **algorithm}}, "TRL GRPOTrainer", settings)


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
)


def spec_of(pair: Pair, steps: int, seed: int) -> dict[str, Any]:
    usual = {
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
    return usual | dict(pair.spec)
