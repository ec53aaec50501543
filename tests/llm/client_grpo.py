"""GRPO through the Tinker door with the unmodified client: `python client_grpo.py BASE` reads
[[question, answer], …] of training and of held-out problems from stdin, and prints the held-out score before
and after with the mean reward of each step. Runs where the client is installed, without lorad.
"""

import json
import os
import re
import statistics
import sys
import warnings
from typing import Any

import tinker
from tinker import types

warnings.simplefilter("ignore")
RANK, RATE, STEPS, PROMPTS, GROUP, NEW_TOKENS = 16, 8e-4, 10, 8, 8, 16
LAST_NUMBER = re.compile(r"(\d+)\D*$")

Problem = tuple[str, str]


class Loop:
    """A model, and its tokenizer with the chat template of the base."""

    def __init__(self, base: str) -> None:
        self.training = (
            tinker.ServiceClient().create_lora_training_client(base_model=base, rank=RANK, seed=0).result()
        )
        self.tokenizer = self.training.get_tokenizer()

    def prompt(self, question: str) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def sampled(self, sampler: Any, problems: list[Problem], number: int, temperature: float) -> list[Any]:
        """Return the sequences of each problem, all asked for before one is waited for."""
        how = types.SamplingParams(
            max_tokens=NEW_TOKENS, temperature=temperature, seed=1, stop=["<|im_end|>"]
        )
        asked = [
            sampler.sample(types.ModelInput.from_ints(self.prompt(question)), number, how)
            for question, _ in problems
        ]
        return [each.result().sequences for each in asked]

    def reward(self, tokens: list[int], answer: str) -> float:
        number = LAST_NUMBER.search(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return float(number is not None and number[1] == answer)

    def score(self, sampler: Any, problems: list[Problem]) -> float:
        groups = self.sampled(sampler, problems, 1, 0.0)
        return statistics.mean(
            self.reward(group[0].tokens, answer) for group, (_, answer) in zip(groups, problems, strict=True)
        )

    def step(self, sampler: Any, problems: list[Problem]) -> float:
        """Sample, weigh and train once; returns the mean reward."""
        data, means = [], []
        groups = self.sampled(sampler, problems, GROUP, 1.0)
        for (question, answer), group in zip(problems, groups, strict=True):
            rewards = [self.reward(sequence.tokens, answer) for sequence in group]
            means.append(statistics.mean(rewards))
            if (spread := statistics.pstdev(rewards)) > 0:
                data += [
                    self.datum(self.prompt(question), sequence, (reward - means[-1]) / spread)
                    for sequence, reward in zip(group, rewards, strict=True)
                ]
        if data:
            passed = self.training.forward_backward(data, "importance_sampling")
            self.training.optim_step(types.AdamParams(learning_rate=RATE)).result()
            passed.result()
        return statistics.mean(means)

    def datum(self, prompt: list[int], sequence: Any, advantage: float) -> Any:
        whole, before = prompt + list(sequence.tokens), len(prompt) - 1
        told = len(sequence.tokens)
        inputs = {
            "target_tokens": whole[1:],
            "logprobs": [0.0] * before + list(sequence.logprobs),
            "advantages": [0.0] * before + [advantage / (PROMPTS * GROUP * told)] * told,
        }
        return types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)


def main() -> None:
    training, held_out = json.load(sys.stdin)
    loop = Loop(sys.argv[1])
    sampler = loop.training.save_weights_and_get_sampling_client().result()
    before, rewards = loop.score(sampler, held_out), []
    for step in range(STEPS):
        rewards.append(loop.step(sampler, training[step * PROMPTS : (step + 1) * PROMPTS]))
        sampler = loop.training.save_weights_and_get_sampling_client().result()
        print(f"step {step + 1}: reward {rewards[-1]:.3f}", file=sys.stderr, flush=True)
    print(json.dumps({"before": before, "after": loop.score(sampler, held_out), "rewards": rewards}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the threads of some versions abort a process that ends
