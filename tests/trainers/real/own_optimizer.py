"""python own_optimizer.py RANK WORLD DIRECTORY: lorad's steps beside those of Megatron's DDP and distributed
optimizer.

One data-parallel rank of Megatron. DIRECTORY has `model`, a base, and `start`, a PEFT directory; rank 0
leaves `lorad.safetensors` and `megatron.safetensors` there: the adapter after the same three steps. What
Megatron's optimizer wants of a GPU is put in its way here, since nothing of lorad's needs it.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from safetensors.numpy import save_file
from torch.overrides import TorchFunctionMode

from lorad.adapters.peft import read_peft
from lorad.protocol.batch import Batch, Optimizer, PolicyLoss, PolicyTargets
from lorad.protocol.calls import ForwardBackward, OptimStep
from lorad.trainers.base import ExportSlot, OpenSlot, SlotSpec
from lorad.trainers.megatron.body import MegatronBody, open_body
from lorad.trainers.sharded.body import BodySettings, MountKey
from lorad.trainers.sharded.losses import Losses
from lorad.trainers.sharded.rows import pack, sequences, share
from lorad.trainers.sharded.trainer import RankTrainer
from lorad.trainers.sharded.workers import Calls, join

STEPS, LR, CLIP, DECAY = 3, 1e-2, 0.5, 0.1
CPU = torch.device("cpu")


class NoGpu(TorchFunctionMode):
    """Megatron's optimizer makes tensors on `cuda`, and asks for `torch.cuda.FloatTensor`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        found = func(*args, **given)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.", 1)
        return found


def work(number: int) -> ForwardBackward:
    """The same on all ranks."""
    rng = np.random.default_rng(number)

    def tokens(low: int, high: int) -> np.ndarray:
        return rng.integers(0, 128, rng.integers(low, high + 1)).astype(np.int32)

    batch = Batch.of([(tokens(3, 9), [tokens(1, 8) for _ in range(4)]) for _ in range(3)])
    advantages = rng.normal(size=batch.completion_lengths.size).astype(np.float32)
    each = np.repeat(advantages, batch.completion_lengths)
    targets = PolicyTargets(each, np.zeros(batch.completions.size, np.float32))
    return ForwardBackward(batch, targets, PolicyLoss(), float(batch.completions.size), "a")


def lorad_steps(body: MegatronBody, calls: Calls, start: Path) -> dict[str, np.ndarray]:
    trainer = RankTrainer(body, calls, "base")
    optimizer = Optimizer(betas=(0.9, 0.99), weight_decay=DECAY)
    trainer.open(OpenSlot("a", SlotSpec(read_peft(start).config, optimizer=optimizer, source=start)))
    for number in range(STEPS):
        trainer.forward_backward(work(number))
        trainer.optim_step(OptimStep(LR, CLIP, slot="a"))
    return dict(trainer.export(ExportSlot("a")).tensors)


def megatron_steps(body: MegatronBody, start: Path) -> dict[str, np.ndarray]:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    source = read_peft(start)
    body.unmount()
    mounted = body.mount(MountKey(source.config))
    for parameter, part in zip(mounted.parameters, mounted.scatter(source.tensors), strict=True):
        parameter.data.copy_(part)
    with NoGpu():
        sharded = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        model = DistributedDataParallel(body._model.config, sharded, body._model)
        settings: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "clip_grad": CLIP, "adam_beta2": 0.99}
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", use_distributed_optimizer=True, params_dtype=torch.float32, **settings
            ),
            [model],
        )
        for number in range(STEPS):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            item = work(number)
            item = replace(item, normaliser=item.normaliser / body.dp.size)  # it averages
            row = pack(share(sequences(item.batch), body.dp.rank, body.dp.size), CPU)
            body.backward(row, Losses(item, CPU).of(row, lambda: None), recompute=False)
            finalize_model_grads([model])
            optimizer.step()
    found = mounted.gather([parameter.detach() for parameter in mounted.parameters])
    return {name: tensor.numpy() for name, tensor in found.items()}


def main() -> None:
    rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    calls = join(rank, world, directory / "meeting", CPU)
    body = open_body(BodySettings(model=str(directory / "model"), dtype="float32", device="cpu"))
    assert isinstance(body, MegatronBody)
    for name, steps in (
        ("lorad", lorad_steps(body, calls, directory / "start")),
        ("megatron", megatron_steps(body, directory / "start")),
    ):
        if rank == 0:
            save_file(steps, directory / f"{name}.safetensors")


if __name__ == "__main__":
    main()
