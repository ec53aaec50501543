"""`make bench-episodes`: episodes with a tool, lorad's `lookup` beside TRL's `environment_factory`.

    python -m benchmarks.training.episodes [--rounds N] [--steps N]     table on stderr, JSON on stdout

The base, the tasks, the store and its rewards are the same; a turn has at most 12 tokens, an episode three
turns. lorad's side is `lorad run` with all its processes; CPU counts as in `algorithms.py`, from one step to
a later one. The tokenizer of builtin:tiny has neither a chat template nor a format of tool calls: TRL gets a
template that adds nothing to the texts, and a parser that takes letters for a call and digits for the answer.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bench import ENVIRONMENT, ROOT
from benchmarks.kit.workload import GROUP, PROMPTS, RANK, TINY, Figures
from benchmarks.training.algorithms import MARGIN, spent
from benchmarks.training.own_share import at_step, command, fresh_home
from lorad.box.paths import RunDir
from lorad.envs.lookup import Lookup
from lorad.envs.protocol import Turn
from lorad.rl.tasks import problem

LEARNING_RATE, NEW_TOKENS, TURNS = 1.5e-3, 12, 3
MOST = 0.5  # of the peer's CPU time
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


class Store:
    """lorad's environment by TRL's contract: a tool; the last message is heard at the end."""

    def reset(self, **row: Any) -> None:
        self._inner, self._reward, self.turns, self._is_over = Lookup(), 0.0, 0, False
        self._inner.reset({"prompt": row["prompt"][0]["content"], "answer": row["answer"]}, 0)

    def ask(self, text: str) -> str:
        """
        Asks the store.

        Args:
            text: a key, backwards.
        """
        return self._hear(text)

    def _end(self, text: str) -> float:
        if not self._is_over and text:
            self._hear(text)
        return self._reward

    def _hear(self, text: str) -> str:
        self.turns += 1
        observed = self._inner.step(Turn(text, "stop"))
        self._reward += observed.reward
        self._is_over = observed.messages is None
        return str(observed.messages or "")


def main() -> None:
    parser = argparse.ArgumentParser(description="episodes of lorad beside TRL's")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--peer", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer is not None:  # a turn of the peer, in a process of its own
        print(json.dumps(trl_turn(options.steps, options.peer)))
        return
    turns: dict[str, list[dict[str, float]]] = {"lorad": [], "TRL": []}
    for number in range(options.rounds):
        turns["lorad"].append(lorad_turn(options.steps, number))
        turns["TRL"].append(peer_turn(options.steps, number))
        print({side: found[-1] for side, found in turns.items()}, file=sys.stderr)
    ratio = statistics.mean(one["cpu"] for one in turns["lorad"]) / statistics.mean(
        one["cpu"] for one in turns["TRL"]
    )
    print(f"CPU seconds of a step, lorad / TRL: {ratio:.2f}", file=sys.stderr)
    print(json.dumps({"steps": options.steps, "turns": turns, "ratio": ratio}, indent=2))
    if ratio > MOST:
        raise SystemExit(f"lorad took {ratio:.2f} of TRL's CPU time, more than {MOST}")


def lorad_turn(steps: int, seed: int) -> dict[str, float]:
    spec = {
        "name": "bench",
        "seed": seed,
        "lora": {"rank": RANK, "alpha": 2 * RANK},
        "algorithm": {"group_size": GROUP},
        "data": {"train": "lookup", "prompts_per_step": PROMPTS},
        "env": {"name": "lookup", "turns": TURNS},
        "trainer": {"lr": LEARNING_RATE, "steps": steps},
        "rollout": {"max_new_tokens": NEW_TOKENS},
        "eval": {"every": 0},
        "checkpoint": {"every": 100000},
    }
    with fresh_home() as home:
        (home / "bench.yaml").write_text(json.dumps(spec))
        command("run", str(home / "bench.yaml"), "--detach")
        journal = RunDir(Path(json.loads(command("show", "bench", "--json"))["directory"])).journal
        began = at_step(journal, MARGIN)
        before, _ = spent(home)
        ended = at_step(journal, steps - MARGIN)
        after, memory = spent(home)
        made = ended[len(began) :]
        if not made:
            raise SystemExit(f"{steps} steps are too few to measure")
        metrics = [record.data["metrics"] for record in made]
        return {
            "cpu": (after - before) / len(made),
            "memory": memory,
            "turns": statistics.mean(one["turns"] for one in metrics),
            "reward": statistics.mean(one["reward"] for one in metrics[-5:]),
        }


def peer_turn(steps: int, seed: int) -> dict[str, float]:
    wanted = ["--peer", str(seed), "--steps", str(steps)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.training.episodes", *wanted],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | {"TRL_EXPERIMENTAL_SILENCE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"TRL failed:\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def trl_turn(steps: int, seed: int) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from benchmarks.kit.peers import StepTimes, TimedTrainer, lora, trl_config

    figures: Figures = {"step": [], "rollout": []}
    rewards: list[float] = []
    turns: list[float] = []

    def reward(completions: list[Any], environments: list[Store], **_: Any) -> list[float]:
        found = [
            store._end(messages[-1]["content"])
            for messages, store in zip(completions, environments, strict=True)
        ]
        rewards.append(statistics.mean(found))
        turns.append(statistics.mean(store.turns for store in environments))
        return found

    tasks = [problem("lookup", "train", seed, index) for index in range(steps * PROMPTS)]
    rows = [{"prompt": [{"role": "user", "content": one.prompt}], "answer": one.answer} for one in tasks]
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            "max_completion_length": TURNS * NEW_TOKENS + 16,
            "max_tool_calling_iterations": TURNS - 1,
            "learning_rate": LEARNING_RATE,
            "generation_kwargs": {"max_new_tokens": NEW_TOKENS},
        }
        config = trl_config(directory, steps, seed, settings)
        trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32),
            processing_class=chatty(),
            environment_factory=Store,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            peft_config=lora(),
            callbacks=[StepTimes(figures)],
        )
        trainer.attach(figures)
        trainer.train()
    return {
        "cpu": statistics.mean(figures["step"][MARGIN:-MARGIN]),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "turns": statistics.mean(turns),
        "reward": statistics.mean(rewards[-5:]),
    }


def chatty() -> Any:
    """The base's tokenizer with the template above, and its parser: letters that end are a call."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY, padding_side="left")
    tokenizer.chat_template = TEMPLATE

    def parse_response(ids: list[int], **_: Any) -> dict[str, Any]:
        text = tokenizer.decode(ids, skip_special_tokens=True).strip()
        said: dict[str, Any] = {"role": "assistant", "content": text}
        if text.isalpha() and ids[-1] == tokenizer.eos_token_id:
            called = {"name": "ask", "arguments": {"text": text}}
            said |= {"content": "", "tool_calls": [{"type": "function", "function": called}]}
        return said

    tokenizer.response_template = {}
    tokenizer.parse_response = parse_response
    return tokenizer


if __name__ == "__main__":
    main()
