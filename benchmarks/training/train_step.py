"""Measure `train`: an optimizer step of the 100 M model, 2 prompts x 8, 32 + 32 tokens, against PEFT +
autograd.

The peer computes what TRL does: a forward over prompt and completion of every sample, logits of the
completions only (`logits_to_keep`), the clipped loss, backward, clipping, AdamW. Its logits come from a slice
that is not contiguous, which transformers multiplies row by row; `mended` is the same step without that
defect, see `peers.mended`.

gemm: the share counts the FLOP that this step cannot do without: prompts once, 4 per weight and token
(forward, and backward to the activations), 6 per adapter weight; attention and everything else count as
nothing.
"""

import asyncio
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from benchmarks.kit.models import SHAPES, make
from benchmarks.kit.workload import (
    ALPHA,
    GROUP,
    LEARNING_RATE,
    RANK,
    Figures,
    Stopwatch,
    Turn,
    play,
    random_ids,
)

MODEL = "100m"
PROMPTS, LENGTH, NEW = 2, 32, 32
WARM_UP = 1
CLIP = 0.2


def flop() -> float:
    """Count the FLOP of one step; the last token of each sample is never fed."""
    shape, samples = SHAPES[MODEL], PROMPTS * GROUP
    fed = PROMPTS * LENGTH + samples * (NEW - 1)
    head = 4 * shape.head_parameters * samples * NEW
    return fed * (4 * shape.layer_parameters + 6 * shape.lora_parameters(RANK)) + head


def data(call: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(prompts [P, LENGTH], completions [P * GROUP, NEW], advantages [P * GROUP])."""
    vocab = SHAPES[MODEL].vocab
    prompts, completions = (
        random_ids(call, PROMPTS, LENGTH, vocab),
        random_ids(call, PROMPTS * GROUP, NEW, vocab),
    )
    return prompts, completions, np.random.default_rng(call).normal(size=PROMPTS * GROUP).astype(np.float32)


def lorad(turn: Turn, dtype: str) -> Figures:
    from benchmarks.kit.limits import Limits
    from benchmarks.kit.ours import opened
    from lorad.adapters.adapter import AdapterConfig
    from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets
    from lorad.trainers.base import SlotSpec

    async def run() -> Figures:
        figures: Figures = {"step": [], "gemm": [], "flops": []}
        async with opened(make(MODEL, turn.models), dtype) as held:
            modules = tuple(sorted(name for name in held.trainer.modules() if name != "lm_head"))
            await held.trainer.open("bench", SlotSpec(AdapterConfig(RANK, ALPHA, modules)))
            limits = Limits(held.base.dtype, 1 << 20)
            for index in range(turn.repeats + WARM_UP):
                prompts, completions, advantages = data(turn.call(index))
                groups = completions.reshape(PROMPTS, GROUP, NEW)
                batch = Batch.of([(prompts[p], list(groups[p])) for p in range(PROMPTS)])
                each = np.repeat(advantages, batch.completion_lengths)
                targets = PolicyTargets(each, np.full(completions.size, -10.0, np.float32))
                watch = Stopwatch()
                await held.trainer.forward_backward(
                    "bench", batch, targets, PolicyLoss(), float(completions.size)
                )
                await held.trainer.optim_step("bench", LEARNING_RATE, 1.0)
                figures["step"].append(watch.lap())
                figures["flops"].append(flop() / figures["step"][-1])
                figures["gemm"].append(limits.gemm())
        return figures

    return {name: values[WARM_UP:] for name, values in asyncio.run(run()).items()}


def peer(turn: Turn, dtype: str) -> Figures:
    import torch

    from benchmarks.kit.peers import mended, peft_model

    model = peft_model(make(MODEL, turn.models), dtype).train()
    for parameter in model.parameters():
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], LEARNING_RATE, weight_decay=0.0
    )
    figures: Figures = {"step": [], "mended": []}
    for index in range(2 * (turn.repeats + WARM_UP)):
        name, context = (("step", nullcontext()), ("mended", mended(model)))[index % 2]
        batch = [torch.from_numpy(array) for array in data(turn.call(index))]
        watch = Stopwatch()
        with context:
            loss = policy_loss(model, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        figures[name].append(watch.lap())
    return {name: values[WARM_UP:] for name, values in figures.items()}


def policy_loss(model: Any, prompts: Any, completions: Any, advantages: Any) -> Any:
    """The clipped loss, on policy: the mean over all completion tokens."""
    import torch

    ids = torch.cat([prompts.repeat_interleave(GROUP, 0), completions], 1)
    logits = model(input_ids=ids, logits_to_keep=NEW + 1).logits[:, :-1]
    logprobs = torch.log_softmax(logits.float(), -1).gather(2, completions[..., None])[..., 0]
    ratio = torch.exp(logprobs - logprobs.detach())
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None]).mean()


if __name__ == "__main__":
    pairs = {"lorad": lorad, "peer": peer}
    play(
        {
            f"{side}-{dtype}": partial(run, dtype=dtype)
            for side, run in pairs.items()
            for dtype in ("fp32", "bf16")
        }
    )
