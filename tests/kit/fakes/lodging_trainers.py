"""Trainers apart from the pool's process, and their faults:
`trainer_class: tests.kit.fakes.lodging_trainers:Lodges`.

They are the builtin trainer with a base and a thread of its own; what needs the base while that is away is an
error.
"""

from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import torch

from lorad.errors import PoolLost, SpecError
from lorad.models.base import Base
from lorad.models.compute import Compute
from lorad.models.directory import resolve
from lorad.models.loading import load_base
from lorad.protocol.batch import Batch, Gradients, Optimizer, PolicyLoss, PolicyTargets, Predictions
from lorad.protocol.calls import StepResult
from lorad.protocol.pool_setup import RanksSetup
from lorad.trainers.base import Policy, SlotInfo, SlotSpec, TrainerCapabilities, TrainerHealth
from lorad.trainers.builtin.trainer import BuiltinTrainer
from lorad.trainers.ranks.remote import RanksSettings
from tests.kit.fakes.sleeping_engines import Sleeps

TINY = resolve("builtin:tiny")


class Lodges(BuiltinTrainer):
    """A trainer that counts its base's moves.

    told: the arguments of `start`.
    moves: of its base so far.
    left: starts without an end.
    """

    newest: "Lodges"
    left: ClassVar[int] = 0

    @classmethod
    async def start(cls, setup: RanksSetup, settings: RanksSettings, *, work: Path, logs: Path) -> Self:
        Lodges.left += 1
        compute = Compute()
        try:
            base = await compute.run(load_base, TINY, torch.float32, torch.device("cpu"))
        except BaseException:
            Lodges.left -= 1
            compute.close()
            raise
        return cls(base, compute, settings.name, told=(setup, settings))

    def __init__(self, base: Base, compute: Compute, model: str, told: Any = None) -> None:
        super().__init__(base, compute, model)
        self.told, self.own = told, compute
        self.moves: list[str] = []
        self.death = ""
        Lodges.newest = self

    @property
    def is_here(self) -> bool:
        return self.moves[-1:] != ["offload"]

    def capabilities(self) -> TrainerCapabilities:
        return msgspec.structs.replace(super().capabilities(), offload=True)

    def software(self) -> dict[str, str]:
        return {"torch": "0.0.1", "megatron-core": "0.19.2"}

    async def offload(self) -> None:
        assert self.is_here
        self.moves.append("offload")

    async def onload(self) -> None:
        assert not self.is_here and Sleeps.newest.is_asleep
        self.moves.append("onload")

    async def open(self, slot: str, spec: SlotSpec) -> SlotInfo:
        assert self.is_here
        return await super().open(slot, spec)

    async def predictions(self, policy: Policy, batch: Batch, temperature: float = 1.0) -> Predictions:
        assert self.is_here
        return await super().predictions(policy, batch, temperature)

    async def forward_backward(
        self,
        slot: str,
        batch: Batch,
        targets: PolicyTargets,
        loss: PolicyLoss,
        normaliser: float,
    ) -> Gradients:
        assert self.is_here
        return await super().forward_backward(slot, batch, targets, loss, normaliser)

    async def optim_step(
        self, slot: str, lr: float, max_grad_norm: float, optimizer: Optimizer | None = None
    ) -> StepResult:
        assert self.is_here
        return await super().optim_step(slot, lr, max_grad_norm, optimizer)

    async def health(self) -> TrainerHealth:
        return TrainerHealth(alive=not self.death, detail=self.death, memory=100, memory_peak=200)

    async def shut_down(self) -> None:
        Lodges.left -= 1
        self.own.close()


class NeverStarts(Lodges):
    """What it is given is not to its liking."""

    @classmethod
    async def start(cls, setup: RanksSetup, settings: RanksSettings, *, work: Path, logs: Path) -> Self:
        raise SpecError("trainer.backend_args: there is no flavour", hint="Leave it out.")


class DiesAsItBegins(Lodges):
    """When it is asked for the first time."""

    async def base_checksum(self) -> str:
        raise PoolLost("rank 1 was killed by SIGKILL", hint="Resume the run.")
