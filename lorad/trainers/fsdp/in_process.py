"""A trainer of one rank in the pool's process, on a base in one piece that an engine shares."""

from typing import TypeVar

import torch
import torch.distributed as dist
from msgspec.structs import replace

from lorad.errors import Conflict
from lorad.models.compute import Compute
from lorad.models.ops import prepare
from lorad.protocol.calls import TrainerVerb
from lorad.trainers.base import Offload, Trainer, TrainerCapabilities, check_verb
from lorad.trainers.fsdp.body import FsdpBody, open_body
from lorad.trainers.sharded.body import BodySettings
from lorad.trainers.sharded.trainer import RankTrainer
from lorad.trainers.sharded.workers import alone

T = TypeVar("T")


class FusedTrainer(Trainer):
    """Takes turns with the engine on `compute`, where that calls the body's model inside `FsdpBody.lent`."""

    @classmethod
    async def start(cls, compute: Compute, settings: BodySettings, name: str) -> "FusedTrainer":
        """Load the base on the compute thread. Raises what `open_body` raises.

        name: The base's name in configurations of adapters.
        """
        device = torch.device(settings.device)
        await compute.run(prepare, device)
        calls = await compute.run(alone, device)
        try:
            body = await compute.run(open_body, settings)
        except BaseException:
            dist.destroy_process_group()
            raise
        return cls(compute, body, RankTrainer(body, calls, name))

    def __init__(self, compute: Compute, body: FsdpBody, rank: RankTrainer) -> None:
        self.body = body
        self._compute = compute
        self._rank = rank

    def capabilities(self) -> TrainerCapabilities:
        return replace(self._rank.capabilities(), offload=False)

    def modules(self) -> dict[str, tuple[int, int]]:
        return self._rank.modules()

    def slots(self) -> tuple[str, ...]:
        return tuple(self._rank.slots)

    async def do(self, verb: TrainerVerb[T]) -> T:
        check_verb(verb, self.slots(), self.capabilities())
        if isinstance(verb, Offload):
            raise Conflict("the engine computes on this base", hint="use pool.mode: resident")
        return await self._compute.run(self._rank.do, verb)

    async def shut_down(self) -> None:
        if dist.is_initialized():  # by all trainers of this process
            await self._compute.run(dist.destroy_process_group)
