"""`make bench-llm`: GRPO of SmolLM2-135M-Instruct on additions, lorad beside TRL + PEFT.

Model, data, reward, rate, rank, prompts and samples a step are the same.

    python -m tests.llm.bench [--steps N] [--only lorad|trl]
        a table on stdout: seconds and CPU seconds of a step, peak memory, held-out score at the end

Both choose their threads themselves, as they do for users. Seconds and CPU seconds are of steps without
evaluations and without the first one; memory is the sum of the peaks of all processes of a side. TRL's
switches that would only slow it down here are off, as in `benchmarks.kit.peers`.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.kit.workload import Figures
from benchmarks.training.algorithms import final_score, spent
from benchmarks.training.own_share import at_step, command, fresh_home
from lorad.box.paths import RunDir
from tests.llm.place import EXAMPLES, Addition, additions, smollm2

ROOT = Path(__file__).parents[2]
SPEC = EXAMPLES / "smollm2-addition.yaml"
RATE, RANK, PROMPTS, GROUP = 8e-4, 16, 8, 8  # as the example has them
HELD_OUT = 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=["lorad", "trl"])
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (base := smollm2()) is None:
        raise SystemExit("SmolLM2 is not here: lorad models get smollm2")
    if options.peer:  # TRL's turn, in a process of its own
        print(json.dumps(trl_turn(base, options.steps)))
        return
    print(
        "| | s a step | CPU s a step | peak MB | training reward, last 3 steps | held out |\n"
        + "|---" * 6
        + "|"
    )
    for side in ("lorad", "trl"):
        if options.only in (None, side):
            figures = lorad_turn(base, options.steps) if side == "lorad" else peer_turn(options.steps)
            print(row(side, figures), flush=True)


def row(side: str, figures: dict[str, float]) -> str:
    name = {"lorad": "`lorad run`", "trl": "TRL GRPOTrainer"}[side]
    cells = (
        *(f"{figures['seconds']:.1f}", f"{figures['cpu']:.1f}", f"{figures['memory']:.0f}"),
        *(f"{figures['reward']:.3f}", f"{figures['held_out']:.3f}"),
    )
    return f"| {name} | {' | '.join(cells)} |"


def lorad_turn(base: Path, steps: int) -> dict[str, float]:
    """Run the example in a home of its own, with its daemon, driver and pool."""
    last = f"eval.every={steps}", f"checkpoint.every={steps}", f"trainer.steps={steps}"
    with fresh_home() as home:
        command("run", str(SPEC), f"model.path={base}", *last, "--name", "bench", "--detach")
        journal = RunDir(Path(json.loads(command("show", "bench", "--json"))["directory"])).journal
        began = len(at_step(journal, 1))
        before, _ = spent(home)
        rows = at_step(journal, steps - 1)
        after, memory = spent(home)
        metrics = [record.data["metrics"] for record in rows]
        return {
            "seconds": statistics.median(step["seconds"] for step in metrics[1:]),
            "cpu": (after - before) / (len(rows) - began),
            "memory": memory,
            "reward": statistics.mean(step["reward"] for step in metrics[-3:]),
            "held_out": final_score(),
        }


def peer_turn(steps: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.llm.bench", "--peer", "--steps", str(steps)],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def trl_turn(base: Path, steps: int) -> dict[str, float]:
    """Train by TRL; its adapter is scored greedily on the same problems."""
    import tempfile

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    from benchmarks.kit.peers import StepTimes, lora, trl_config
    from tests.llm.judge import NEW_TOKENS, greedy

    figures: Figures = {"step": []}
    ends = [time.monotonic()]
    rewards: list[float] = []

    class Times(StepTimes):
        """Wall seconds, beside the CPU seconds."""

        def on_step_end(self, *of: Any, **more: Any) -> None:
            super().on_step_end(*of, **more)
            ends.append(time.monotonic())
            seconds = ends[-1] - ends[-2]
            print(f"TRL: step {len(rewards)}, {seconds:.1f} s, reward {rewards[-1]:.3f}", file=sys.stderr)

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        scores = [
            float(Addition("", right).is_solved_by(chat[0]["content"]))
            for chat, right in zip(completions, answer, strict=True)
        ]
        rewards.append(statistics.mean(scores))
        return scores

    prompts = [
        {"prompt": [{"role": "user", "content": each.question}], "answer": each.answer}
        for each in additions("train", 2000)
    ]
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            "per_device_train_batch_size": PROMPTS * GROUP,
            "num_generations": GROUP,
            "max_completion_length": NEW_TOKENS,
            "learning_rate": RATE,
            "shuffle_dataset": True,
        }
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(base, padding_side="left"),
            reward_funcs=reward,
            args=trl_config(directory, steps, 42, settings),
            train_dataset=Dataset.from_list(prompts),
            peft_config=lora(RANK),
            callbacks=[Times(figures)],
        )
        trainer.train()
    of = additions("test", HELD_OUT)
    texts = greedy(trainer.model.eval(), base, of)
    return {
        "seconds": statistics.median(after - before for before, after in itertools.pairwise(ends[1:])),
        "cpu": statistics.mean(figures["step"][1:]),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "reward": statistics.mean(rewards[-3:]),
        "held_out": statistics.mean(a.is_solved_by(text) for a, text in zip(of, texts, strict=True)),
    }


if __name__ == "__main__":
    main()
