"""Algorithms on SmolLM2 beside GRPO: PPO with a critic, DPO, SFT on GSM8K with GRPO behind it, the Tinker
door.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lorad.records.measured import Evaluation
from lorad.records.runs import RunDetails
from tests.kit.world import World
from tests.llm.learning import home, run_of_additions
from tests.llm.place import EXAMPLES, NAME, Addition, additions
from tests.tinker.real.test_client import a_door, environment

PAIRS = 512  # preferences of DPO
SFT_STEPS, GRPO_STEPS = 12, 4
DOOR_STEPS, PROMPTS, HELD_OUT = 10, 8, 64  # the first two are those of client_grpo.py
TINKER = os.environ.get("LORAD_TINKER_PYTHON", "")
GSM8K = os.environ.get("LORAD_GSM8K", "")  # a folder with train.jsonl and test.jsonl, as published


@dataclass(frozen=True)
class Result:
    """What was measured, before and after, and whether it is as it must be."""

    what: str
    before: float
    after: float
    holds: bool
    seconds: float  # of a step

    def row(self, name: str) -> str:
        cells = name, self.what, f"{self.before:.3f}", f"{self.after:.3f}", f"{self.seconds:.1f}"
        return f"| {' | '.join(cells)} |"


HEADING = ["| | what | before | after | s a step |", "|---" * 5 + "|"]


def ppo(base: Path) -> list[Result]:
    """PPO with a critic of its own, which learns alone in the first step."""
    settings = "algorithm={name: ppo, group_size: 8, critic: {warmup_steps: 1}}"
    outcome = run_of_additions(base, "builtin", "builtin", 12, settings, every=12)
    first, last = outcome.evals[0], outcome.evals[12]
    holds = last > first + 0.2 and set(outcome.attested) == {"passed"}
    return [Result("held-out additions solved", first, last, holds, outcome.seconds)]


def dpo(base: Path) -> list[Result]:
    """Right sums against wrong ones; what is held out has other additions."""
    with home("builtin") as box:
        for name, split, count in (("train", "train", PAIRS), ("held_out", "test", 64)):
            lines = [json.dumps(preference(each)) + "\n" for each in additions(split, count)]
            (box.root / f"{name}.jsonl").write_text("".join(lines))
        spec = {
            "model": {"path": str(base), "dtype": "float32"},
            "algorithm": "dpo",
            "data": {"train": "train.jsonl", "eval": "held_out.jsonl", "prompts_per_step": 16},
            "trainer": {"steps": 12, "lr": 2e-4},
            "eval": {"every": 12, "problems": 64},
        }
        run, (first, *_, last) = completed(box, "run", box.spec(json.dumps(spec)))
        before, after = first.accuracy or 0.0, last.accuracy or 0.0
        return [Result("held-out pairs right way round", before, after, after > before + 0.1, run)]


def preference(addition: Addition) -> dict[str, str]:
    """Return a row whose chosen sum is right and whose rejected one is ten too large."""
    terms = addition.question.removeprefix("What is ").removesuffix("?")
    wrong = int(addition.answer) + 10
    return {
        "prompt": addition.question,
        "chosen": f"{terms} = {addition.answer}.",
        "rejected": f"{terms} = {wrong}.",
    }


def gsm8k(base: Path) -> list[Result]:
    """SFT on the solutions, then GRPO that begins at its last version."""
    if not GSM8K:
        print("LORAD_GSM8K names no folder with train.jsonl and test.jsonl of GSM8K", file=sys.stderr)
        return []
    with home("builtin") as box:
        command = [sys.executable, str(EXAMPLES / "gsm8k.py"), str(box.root), "--from", GSM8K]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        data = f"data.train={box.root}/train.jsonl", f"data.eval={box.root}/test.jsonl"
        sizes = f"trainer.steps={SFT_STEPS}", f"eval.every={SFT_STEPS}", "eval.problems=32"
        sft = EXAMPLES / "smollm2-gsm8k.yaml", f"model.path={base}", *data, *sizes
        seconds, (first, *_, last) = completed(box, "run", *sft)
        before, after = first.nll or 0.0, last.nll or 0.0
        results = [Result("SFT, nats a held-out token", before, after, after < before - 0.1, seconds)]
        grpo = (
            "algorithm={name: grpo, group_size: 8}",
            "data.completion_key=completion",
            "data.prompts_per_step=4",
        )
        how = f"trainer.steps={GRPO_STEPS}", "rollout.max_new_tokens=160", "eval.every=0", "trainer.lr=1e-4"
        seconds, _ = completed(box, "fork", "run", *grpo, *how, "--fresh", name="fork")
        rows, versions = box.client.steps("fork"), box.client.adapters("fork")
        rewards = [row.metrics["reward"] or 0.0 for row in rows]
        holds = max(rewards) > 0 and {version.attested for version in versions} == {"passed"}
        half = GRPO_STEPS // 2
        return [
            *results,
            Result(
                "GRPO from there, training reward",
                fmean(rewards[:half]),
                fmean(rewards[half:]),
                holds,
                seconds,
            ),
        ]


def door(base: Path) -> list[Result]:
    """GRPO by the unmodified Tinker client; lorad's door has the model."""
    if not TINKER:
        print("LORAD_TINKER_PYTHON names no interpreter: `make prove-llm` installs it", file=sys.stderr)
        return []
    problems: list[Any] = [
        [(each.question, each.answer) for each in additions(split, count)]
        for split, count in (("train", DOOR_STEPS * PROMPTS), ("test", HELD_OUT))
    ]
    with a_door(bases={NAME: base}) as box:
        done = subprocess.run(
            [TINKER, str(Path(__file__).with_name("client_grpo.py")), NAME],
            env=environment(), input=json.dumps(problems), stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        said = json.loads(done.stdout)
        (run,) = [run.name for run in box.client.list(all=True)]
        verdicts = {version.attested for version in box.client.adapters(run)}
        seconds = fmean(row.metrics["seconds"] or 0.0 for row in box.client.steps(run))
        holds = said["after"] > said["before"] + 0.2 and verdicts == {"passed"}
        return [Result("held-out additions solved", said["before"], said["after"], holds, seconds)]


def completed(box: World, verb: str, *arguments: object, name: str = "run") -> tuple[float, list[Evaluation]]:
    """Start a run and wait for its end; returns seconds of a step, and its evaluations."""
    box.lorad(verb, *arguments, "--name", name, "--detach")
    shown: RunDetails = box.completed(name, seconds=3600)
    assert shown.steps == shown.step
    seconds = fmean(row.metrics["seconds"] or 0.0 for row in box.client.steps(name))
    return seconds, box.client.evals(name)


ALGORITHMS: Mapping[str, Callable[[Path], list[Result]]] = {
    "PPO": ppo,
    "DPO": dpo,
    "GSM8K": gsm8k,
    "Tinker": door,
}
