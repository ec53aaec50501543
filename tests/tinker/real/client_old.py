"""A few lines that every client since 0.25 understands: `python client_old.py BASE`, as client_check.py."""

import os
import sys
import warnings
from typing import Any

import tinker
from tinker import types

warnings.simplefilter("ignore")


def client_of(made: Any) -> Any:
    """Return the client; newer versions give a future of it."""
    return made.result() if type(made).__name__.startswith("Backcompat") or hasattr(made, "future") else made


def main() -> None:
    service = tinker.ServiceClient()
    model = client_of(service.create_lora_training_client(sys.argv[1], rank=4, seed=1))
    work = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
    )
    losses = []
    for _ in range(3):
        passed = model.forward_backward([work], "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm"] > 0
    assert losses == sorted(losses, reverse=True), losses
    path = model.save_state("x").result().path
    sampler = client_of(model.save_weights_and_get_sampling_client())
    made = sampler.sample(types.ModelInput.from_ints([5, 6]), 2, types.SamplingParams(max_tokens=4)).result()
    assert len(made.sequences) == 2
    assert len(sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7])).result()) == 3
    loaded = client_of(service.create_training_client_from_state_with_optimizer(path))
    pair = [one.forward([work], "cross_entropy").result().metrics["loss:sum"] for one in (loaded, model)]
    assert pair[0] == pair[1], pair
    print(f"all holds with tinker {tinker.__version__}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the threads of some versions abort a process that ends
