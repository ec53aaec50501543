"""A base of two linears for trainers of several ranks, and what a test asks of it.

It fails and waits on demand.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lorad.adapters.adapter import AdapterConfig
from lorad.errors import AdapterRefused, SpecError
from lorad.limits.limit import BackendSetup
from lorad.protocol.batch import Batch, PolicyLoss, PolicyTargets
from lorad.trainers.base import SlotSpec
from lorad.trainers.sharded.body import Body, BodySettings, Mounted, MountKey
from lorad.trainers.sharded.head import Head, Visit
from lorad.trainers.sharded.rows import Rows
from lorad.trainers.sharded.workers import DataParallel

MODULE = "model.layers.0.mlp.up_proj"
HIDDEN, VOCAB, LONGEST = 8, 32, 64
FAILS, WAITS = 30, 31  # tokens: the last rank fails at the first, all wait at the second for the file `gate`
NO_MEMORY = 29  # a token: the last rank finds no memory for it and `MOST` others in a micro-batch
MOST = 12

REFUSED_ALPHA = 13.0  # by the last rank alone


def open_body(settings: BodySettings) -> Body:
    if "colour" in settings.args:
        raise SpecError(
            "trainer.backend_args: colour is none of this backend's",
            hint="Leave it out.",
            others=[SpecError("nor is any other")],
        )
    if "attention" in settings.args:
        is_on = torch.backends.cuda.cudnn_sdp_enabled()
        raise SpecError(f"the attention of cuDNN is {'on' if is_on else 'off'} here")
    return TinyBody(settings)


class TinyBody(Body):
    setup = BackendSetup(trainer="tiny")
    lockstep = False
    may_forget = True

    def __init__(self, settings: BodySettings) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table, self.weight, self.head = (
            torch.randn(shape, generator=generator) / 3
            for shape in ((VOCAB, HIDDEN), (HIDDEN, HIDDEN), (VOCAB, HIDDEN))
        )
        self.dp = DataParallel(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
        self.device, self.dtype = torch.device(settings.device), torch.float32
        self.gate = Path(str(settings.args.get("gate")))
        self.mounted: TinyMounted | None = None

    shapes: Mapping[str, tuple[int, int]] = {MODULE: (HIDDEN, HIDDEN)}
    vocab, hidden, max_tokens, parameter_count = VOCAB, HIDDEN, LONGEST, HIDDEN * (HIDDEN + 2 * VOCAB)

    def checksum(self) -> str:
        return f"{float(self.weight.sum()):.6f}"

    def mount(self, key: MountKey) -> Mounted:
        if key.adapter.alpha == REFUSED_ALPHA and self.dp.rank == self.dp.size - 1:
            raise AdapterRefused("not here")
        self.mounted = TinyMounted(key.adapter)
        return self.mounted

    def unmount(self) -> None:
        self.mounted = None

    def states(
        self, rows: Rows, *, adapter: bool, train: bool, recompute: bool, visit: Visit | None = None
    ) -> Tensor:
        self._obey(rows.ids)
        x = self.table[rows.ids[0]]
        y = x @ self.weight.T
        if adapter and self.mounted is not None:
            y = y + self.mounted.scale * (x @ self.mounted.parameters[0].T @ self.mounted.parameters[1].T)
        states = y.tanh()[rows.predictors]
        if visit is not None:
            visit(states, Head(lambda part: part @ self.head.T, VOCAB))
        return states

    def _obey(self, ids: Tensor) -> None:
        if (ids == FAILS).any() and self.dp.rank == self.dp.size - 1:
            raise RuntimeError("the middle of a call")
        if (ids == NO_MEMORY).any() and ids.numel() > MOST and self.dp.rank == self.dp.size - 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        while (ids == WAITS).any() and not self.gate.exists():
            self.gate.with_name(f"rank-{self.dp.rank}.waits").touch()
            time.sleep(0.01)

    def forget(self) -> None:
        pass

    def offload(self) -> None:
        pass

    def onload(self) -> None:
        pass


class TinyMounted(Mounted):
    def __init__(self, config: AdapterConfig) -> None:
        self.scale = config.scale
        self.parameters = [
            nn.Parameter(torch.zeros(config.rank, HIDDEN)),
            nn.Parameter(torch.zeros(HIDDEN, config.rank)),
        ]
        self.are_b = [False, True]

    def gather(self, local: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip((f"{MODULE}.lora_A.weight", f"{MODULE}.lora_B.weight"), local, strict=True))

    def scatter(self, logical: Mapping[str, np.ndarray]) -> list[Tensor]:
        return [torch.from_numpy(np.array(logical[f"{MODULE}.lora_{side}.weight"])) for side in "AB"]


SPEC = SlotSpec(AdapterConfig(rank=2, alpha=4.0, modules=(MODULE,)))


def batch(*extra: int) -> Batch:
    """Four samples of one prompt, each ending with `extra`."""
    tail = np.array(extra, np.int32)
    completions = [
        np.concatenate([np.array([k, k + 1, 5], np.int32), tail, np.array([2], np.int32)]) for k in range(4)
    ]
    return Batch.of([(np.array([1, 2, 3], np.int32), completions)])


def targets(of: Batch) -> PolicyTargets:
    return PolicyTargets(
        advantages=np.repeat(np.array([1, -1, 0.5, -0.5], np.float32), of.completion_lengths),
        sampler_logprobs=np.full(of.completions.size, -3.0, np.float32),
    )


LOSS = PolicyLoss()
