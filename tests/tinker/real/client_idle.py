"""A model whose client does nothing for a while: `python client_idle.py BASE`, as client_check.py. It prints
`idle` and waits for a line, and at last prints all numbers that it was told.
"""

import os
import sys
import warnings

import tinker
from tinker import types

warnings.simplefilter("ignore")


def main() -> None:
    model = tinker.ServiceClient().create_lora_training_client(sys.argv[1], rank=4, seed=1).result()
    work = types.Datum(
        model_input=types.ModelInput.from_ints([5, 9, 12]),
        loss_fn_inputs={"target_tokens": [9, 12, 7], "weights": [1.0] * 3},
    )
    losses = []
    for is_idle in (False, False, True, False):
        passed = model.forward_backward([work], "cross_entropy")
        if is_idle:  # with gradients that are not applied yet
            passed.result()
            print("idle", flush=True)
            sys.stdin.readline()
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(passed.result().metrics["loss:sum"])
    print(losses, flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the threads of some versions abort a process that ends
