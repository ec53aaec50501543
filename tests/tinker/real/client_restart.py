"""Samples and steps across a door that is killed: `python client_restart.py BASE`, as client_check.py. Prints
`sampling`, and `training`, when the door may be killed, goes on after a line of its input, and at last prints
all numbers that it was told.
"""

import os
import sys
import warnings

import tinker
from tinker import types

warnings.simplefilter("ignore")
TEXT = [5, 9, 12, 7, 5, 9, 12, 7, 30, 31]


def pause(word: str) -> None:
    """Wait; what was asked of the door goes on in threads of the client's."""
    print(word, flush=True)
    sys.stdin.readline()


def main() -> None:
    model = tinker.ServiceClient().create_lora_training_client(sys.argv[1], rank=4, seed=1).result()
    work = types.Datum(
        model_input=types.ModelInput.from_ints(TEXT[:-1]),
        loss_fn_inputs={"target_tokens": TEXT[1:], "weights": [1.0] * 9},
    )
    sampler = model.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=100, temperature=0.0, stop=[])
    prompt = types.ModelInput.from_ints(TEXT[:4])
    before = sampler.sample(prompt, 1, params).result().sequences[0].tokens
    made = [sampler.sample(prompt, 2, params) for _ in range(10)]
    pause("sampling")
    steps = []
    for step in range(10):
        passed = model.forward_backward([work], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=1e-3))
        if step == 5:
            pause("training")
        steps.append((passed.result().metrics["loss:sum"], stepped.result().metrics["grad_norm"]))
    for future in made:
        for sequence in future.result().sequences:
            assert list(sequence.tokens) == list(before)
    assert steps[-1][0] < steps[0][0], steps
    print(steps, flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the threads of some versions abort a process that ends
