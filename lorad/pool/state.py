"""Everything that a pool is while it runs; verbs read and change it."""

import asyncio
import itertools

from lorad.engines.base import Engine
from lorad.errors import Conflict
from lorad.pool.attest.attester import Attester
from lorad.pool.fencing import Fence
from lorad.pool.files import VersionFiles
from lorad.pool.joint import Joint
from lorad.pool.ledger import Ledger
from lorad.pool.loaded import LoadedVersions
from lorad.pool.machine import MachineMeter
from lorad.pool.microbatches import Room
from lorad.pool.phases import Phases
from lorad.pool.tenants import Parties, Tenant
from lorad.pool.usage_file import UsageFile
from lorad.pool.work import WorkDone, WorkMeter, WorkRate
from lorad.protocol.calls import Call, Open
from lorad.protocol.status import PoolInfo
from lorad.trainers.base import Trainer


class Pool:
    """One trainer, one engine, and the runs that share them.

    Attributes:
        ledger: Who is billed.
        memory: The bytes for slots and versions, 0 when not known.
        room: The memory for activations.
        uses: The file that the ledger is written to.

    Args:
        teacher: Holds another model, for log-probabilities.
        lodger: The trainer, where its base leaves the devices while the engine is awake; else None.
        rate: What the trainer's devices can do, see `lorad/pool/work.py`.
        joins: Whether gradients of several runs are made in the same passes.
    """

    def __init__(
        self,
        info: PoolInfo,
        trainer: Trainer,
        engine: Engine,
        *,
        teacher: Trainer | None = None,
        lodger: Trainer | None = None,
        rate: WorkRate | None = None,
        joins: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        self.info = info
        self.trainer = trainer
        self.engine = engine
        self.ledger = Ledger() if ledger is None else ledger
        self._teacher = teacher
        self.phases = Phases(
            engine,
            is_timesliced=info.mode == "timesliced",
            trainer=trainer,
            lodger=lodger,
            ledger=self.ledger,
        )
        self.attester = Attester(
            engine, trainer, self.phases, is_apart=info.mode != "fused", has_experts=info.experts > 0
        )
        self.loaded = LoadedVersions(engine, self.attester.forget)
        self.files = VersionFiles(info.model)
        self.meter = WorkMeter()
        self.work = WorkDone(trainer, rate)
        self.machine = MachineMeter()
        self.joint = Joint(trainer, joins=joins)
        self.parties = Parties()
        self.memory = 0
        self.room = Room()
        self.uses: UsageFile | None = None
        self.tenants: dict[str, Tenant] = {}
        self.fences: dict[str, Fence] = {}
        self.stopping = asyncio.Event()
        self._requests = itertools.count(1)

    def fence(self, run: str) -> Fence:
        return self.fences.setdefault(run, Fence(run, self.engine.abort))

    def tenant(self, call: Call) -> Tenant:
        """Return the caller's tenant. Raises Conflict when its slot is not open."""
        tenant = self.tenants.get(call.run)
        if tenant is None or tenant.attempt != call.attempt:
            raise Conflict(
                f"{call.run} attempt {call.attempt} has no open slot", hint="Its next call must be open."
            )
        return tenant

    @property
    def teacher(self) -> Trainer:
        """Return the teacher. Raises Conflict where the pool was started without one."""
        if self._teacher is None:
            raise Conflict(
                f"pool {self.info.pool} has no teacher", hint="A run that has one gets another pool."
            )
        return self._teacher

    def holder_of_reference(self, spec: Open) -> Trainer:
        """Return the trainer that holds the reference of a slot."""
        return self.teacher if spec.has_teacher else self.trainer

    def request(self, call: Call) -> str:
        """Return a name for a generate call that no other one has."""
        return f"{call.run or 'serve'}:{call.attempt}:{next(self._requests)}"

    async def evict(self, tenant: Tenant) -> None:
        """Forget a run's slot, and its versions unless somebody is served from them."""
        self.tenants.pop(tenant.run, None)
        self.ledger.leaves(tenant.run)
        self.joint.returns.forget(tenant.run)
        for entry in tenant.versions:
            self.loaded.release(entry)
        critics = [] if tenant.spec.critic is None else [tenant.critic]
        for slot in (tenant.run, *critics):
            self.work.forget(slot)
            self.machine.forget(slot)
            await self.trainer.close(slot)
        if tenant.spec.reference is not None:
            await self.holder_of_reference(tenant.spec).close(tenant.reference)

    async def close(self) -> None:
        """Finish what changes slots, write what is pending.

        The engine is the caller's to close, after this.
        """
        self.engine.stop_waiting()
        for fence in self.fences.values():
            await fence.settle()
        await self.phases.settle()
        await self.loaded.settle()
        await asyncio.to_thread(self.files.close)
