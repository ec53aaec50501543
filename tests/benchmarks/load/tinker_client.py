"""A loop of the official client, timed: `python tinker_client.py BASE ROWS TOKENS STEPS`.

Prints JSON: seconds of a step by how the loop waits. Steps are as those of a run with `algorithm: sft`: one
pass and one step.
"""

import json
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import tinker
from tinker import types

warnings.simplefilter("ignore")
Batches = list[list[Any]]
FIRST = 5  # steps that are not counted
ADAM = types.AdamParams(learning_rate=1e-4)


def datum(tokens: int) -> types.Datum:
    """As a row of the run: one token that is not trained, then random ones."""
    text = [27, *random.choices(range(5, 99), k=tokens - 1)]
    inputs = {"target_tokens": text[1:], "weights": [1.0] * (tokens - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(text[:-1]), loss_fn_inputs=inputs)


def one_by_one(model: Any, batches: Batches) -> Iterator[None]:
    """Wait for each result before the next request is sent."""
    for batch in batches:
        model.forward_backward(batch, "cross_entropy").result()
        model.optim_step(ADAM).result()
        yield


def together(model: Any, batches: Batches) -> Iterator[None]:
    """Send the step with its pass, as Tinker's documentation advises."""
    for batch in batches:
        passed = model.forward_backward(batch, "cross_entropy")
        stepped = model.optim_step(ADAM)
        passed.result()
        stepped.result()
        yield


def ahead(model: Any, batches: Batches) -> Iterator[None]:
    """Send a step while the one before it is computed, as the cookbook does."""
    before: list[Any] = []
    for batch in batches:
        futures = [model.forward_backward(batch, "cross_entropy"), model.optim_step(ADAM)]
        for future in before:
            future.result()
        if before:
            yield
        before = futures
    for future in before:
        future.result()
    yield


def main() -> None:
    base, rows, tokens, steps = sys.argv[1], *map(int, sys.argv[2:])
    found = {}
    for way in (one_by_one, together, ahead):
        model = tinker.ServiceClient().create_lora_training_client(base, rank=8).result()
        batches = [[datum(tokens) for _ in range(rows)] for _ in range(steps)]
        ends = [time.perf_counter() for _ in way(model, batches)]
        found[way.__name__] = (ends[-1] - ends[FIRST - 1]) / (steps - FIRST)
    print(json.dumps(found), flush=True)
    os._exit(0)  # the threads of the client need not end


if __name__ == "__main__":
    main()
