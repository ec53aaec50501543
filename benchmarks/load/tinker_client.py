"""Loops of the official client, timed: `python tinker_client.py WORK`, with a `Work` of `door.py` in JSON.

For each loop it prints `begin LOOP` once its first steps are over, and `end LOOP` so many steps later.
"""

import json
import os
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import tinker
from tinker import types

warnings.simplefilter("ignore")
ADAM = types.AdamParams(learning_rate=1e-4)
LOWEST, HIGHEST = 5, 98  # tokens that are characters


def datum(tokens: int) -> types.Datum:
    """As a row of the run: one token that is not trained, then random ones."""
    text = [27, *random.choices(range(LOWEST, HIGHEST + 1), k=tokens - 1)]
    inputs = {"target_tokens": text[1:], "weights": [1.0] * (tokens - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(text[:-1]), loss_fn_inputs=inputs)


def awaited(model: Any, work: dict[str, int], steps: int) -> Iterator[None]:
    """Wait for each result before the next request is sent."""
    for _ in range(steps):
        model.forward_backward([datum(work["tokens"]) for _ in range(work["rows"])], "cross_entropy").result()
        model.optim_step(ADAM).result()
        yield


def ahead(model: Any, work: dict[str, int], steps: int) -> Iterator[None]:
    """Send a step while the one before it is computed, as the cookbook does."""
    before: list[Any] = []
    for _ in range(steps):
        batch = [datum(work["tokens"]) for _ in range(work["rows"])]
        futures = [model.forward_backward(batch, "cross_entropy"), model.optim_step(ADAM)]
        for future in before:
            future.result()
        before = futures
        yield


def sampled(model: Any, work: dict[str, int], steps: int) -> Iterator[None]:
    """GRPO, each result awaited."""
    for _ in range(steps):
        sampler = model.save_weights_and_get_sampling_client().result()
        model.forward_backward(samples(sampler, work), "importance_sampling").result()
        model.optim_step(ADAM).result()
        yield


def sampled_together(model: Any, work: dict[str, int], steps: int) -> Iterator[None]:
    """GRPO; the pass, the step and the next sampler are asked for at once."""
    coming = model.save_weights_and_get_sampling_client()
    for _ in range(steps):
        passed = model.forward_backward(samples(coming.result(), work), "importance_sampling")
        stepped = model.optim_step(ADAM)
        coming = model.save_weights_and_get_sampling_client()
        passed.result()
        stepped.result()
        yield


def samples(sampler: Any, work: dict[str, int]) -> list[types.Datum]:
    """Sample groups; a datum for each sample, as lorad's GRPO has them."""
    params = types.SamplingParams(max_tokens=work["new"], temperature=1.0)
    prompts = [
        [27, *random.choices(range(LOWEST, HIGHEST + 1), k=work["tokens"] - 1)] for _ in range(work["rows"])
    ]
    futures = [
        sampler.sample(types.ModelInput.from_ints(prompt), num_samples=work["group"], sampling_params=params)
        for prompt in prompts
    ]
    return [
        one
        for prompt, future in zip(prompts, futures, strict=True)
        for one in group(prompt, future.result().sequences)
    ]


def group(prompt: list[int], sequences: Sequence[Any]) -> list[types.Datum]:
    """Return the datums of a group."""
    rewards = [float(one.tokens[0] < (LOWEST + HIGHEST) // 2) for one in sequences]
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5 or 1.0
    made = []
    for one, reward in zip(sequences, rewards, strict=True):
        silent, text = [0.0] * (len(prompt) - 1), [*prompt, *one.tokens]
        inputs = {
            "target_tokens": text[1:],
            "logprobs": [*silent, *one.logprobs],
            "advantages": [*silent, *[(reward - mean) / deviation] * len(one.tokens)],
        }
        made.append(types.Datum(model_input=types.ModelInput.from_ints(text[:-1]), loss_fn_inputs=inputs))
    return made


def main() -> None:
    work = json.loads(sys.argv[1])
    loops = (sampled, sampled_together) if work["new"] else (awaited, ahead)
    for loop in loops:
        model = tinker.ServiceClient().create_lora_training_client(work["base"], rank=8).result()
        first, steps = work["first"], work["steps"]
        for number, _ in enumerate(loop(model, work, first + steps + 1), 1):
            if number in (first, first + steps):
                print("begin" if number == first else "end", loop.__name__, flush=True)
    os._exit(0)  # the threads of the client need not end


if __name__ == "__main__":
    main()
