"""Runs of SmolLM2 as a user starts them: what they have learnt, and what PEFT makes of the adapter that they
leave.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from tests.conformance.reference import reference_model
from tests.kit.world import COLD, World
from tests.llm.judge import greedy
from tests.llm.parity import of_any_model
from tests.llm.place import EXAMPLES, additions
from tests.trainers.real.pairs import configured

ADDITION = EXAMPLES / "smollm2-addition.yaml"
HELD_OUT = 128  # problems of the example
AT_ONCE = 32  # prompts that transformers completes together
SIZES = {"builtin": (), "fsdp": ("trainer.dp=2",), "megatron": ("trainer.dp=2",)}


@dataclass(frozen=True)
class Outcome:
    """What one run of additions came to.

    Attributes:
        evals: held-out score of each step that was evaluated, of 128.
        peft: the same of transformers' generate with the last checkpoint by PEFT.
        apart: trainer against engine, nats: the mean of all steps, and the largest of all tokens.
        attested: versions by verdict.
        seconds: of a step, without evaluations.
        findings: of `lorad why`.
    """

    evals: dict[int, float]
    peft: float
    apart: tuple[float, float]
    attested: dict[str, int]
    seconds: float
    findings: list[str]

    def row(self, name: str) -> str:
        curve = ", ".join(f"{score:.3f}" for score in self.evals.values())
        attested = ", ".join(f"{count} {verdict}" for verdict, count in self.attested.items())
        cells = (
            *(name, curve, f"{self.peft:.3f}", f"{self.apart[0]:.1e} ({self.apart[1]:.1e})", attested),
            *(f"{self.seconds:.1f}", ", ".join(self.findings) or "nothing"),
        )
        return f"| {' | '.join(cells)} |"


def heading(steps: Sequence[int]) -> list[str]:
    cells = (
        f"held out at {', '.join(map(str, steps))}", "by PEFT", "trainer against engine, nats", "versions",
        "s a step", "`lorad why`",
    )  # fmt: skip
    return [f"| | {' | '.join(cells)} |", "|---" * (1 + len(cells)) + "|"]


@contextmanager
def home(*backends: str) -> Iterator[World]:
    """Open a home whose config names the interpreters of these backends; everything in it dies at the end."""
    box = World(COLD)
    try:
        box.home.root.mkdir(parents=True)
        settings = {
            backend: {**setting, "env": of_any_model(setting["env"])}
            for backend, setting in configured(*backends).items()
        }
        box.home.config.write_text(json.dumps({"backends": settings}))  # YAML has JSON in it
        yield box
    finally:
        box.close()


def run_of_additions(
    base: Path,
    trainer: str,
    engine: str,
    steps: int,
    *more: str,
    seed: int = 0,
    every: int = 5,
    problems: int = HELD_OUT,
) -> Outcome:
    """Run the example on a pair of backends; `problems` of the held-out additions are evaluated."""
    with home(trainer, engine) as box:
        on = (
            f"model.path={base}",
            f"trainer.backend={trainer}",
            f"rollout.backend={engine}",
            *SIZES[trainer],
        )
        how = (f"trainer.steps={steps}", f"seed={seed}", f"eval.every={every}")
        held_out = f"eval.problems={problems}"
        box.lorad("run", ADDITION, *on, *how, held_out, *more, "--name", "adder", "--detach")
        shown = box.completed("adder", seconds=3600)
        rows = box.client.steps("adder")
        verdicts = [version.attested or "unattested" for version in box.client.adapters("adder")]
        checkpoint = Path(box.client.checkpoints("adder")[-1].path)
        print(f"{trainer} x {engine}, seed {seed}: {shown.detail or shown.reason}", file=sys.stderr)
        return Outcome(
            evals={row.step: row.score or 0.0 for row in box.client.evals("adder")},
            peft=score_of_peft(base, checkpoint, problems),
            apart=(
                fmean(row.metrics["logprob_difference"] or 0.0 for row in rows),
                max(row.metrics["logprob_difference_max"] or 0.0 for row in rows),
            ),
            attested={verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))},
            seconds=fmean(row.metrics["seconds"] or 0.0 for row in rows),
            findings=[finding["name"] for finding in box.json("why", "adder")["findings"]],
        )


def score_of_peft(base: Path, adapter: Path, problems: int) -> float:
    """Return the share of held-out additions that transformers with PEFT solves greedily."""
    model, of = reference_model(base, adapter), additions("test", problems)
    parts = [of[start : start + AT_ONCE] for start in range(0, len(of), AT_ONCE)]
    return fmean(
        addition.is_solved_by(text)
        for part in parts
        for addition, text in zip(part, greedy(model, base, part), strict=True)
    )
