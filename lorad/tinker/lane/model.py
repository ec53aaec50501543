"""Keeps the slot of a model in its pool, its versions and its checkpoints."""

import os
import re
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

from lorad.adapters import directory
from lorad.box.paths import RunDir
from lorad.driver.attempt.checkpoints import STATE, chosen_checkpoint
from lorad.driver.attempt.pool import is_same_base, newest_version, open_of, sizes_of
from lorad.driver.attempt.versions import version_fact
from lorad.errors import Conflict, LoradError, StorageError
from lorad.models.facts import read_facts
from lorad.protocol.batch import LABELS
from lorad.protocol.calls import Nothing, Opened, Publish, Save, SlotClosed
from lorad.protocol.calls import Published as PublishDone
from lorad.protocol.connection import Connection
from lorad.protocol.driver_params import DriverParams
from lorad.protocol.journal import AttemptFact, CheckpointFact, JournalWriter, Placed, lineage, read
from lorad.protocol.status import PoolInfo
from lorad.spec.model import Spec
from lorad.tinker.lane.state import WEIGHTS, State
from lorad.tinker.records import Published, Saved, SaveSampler, SaveWeights

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_FILES_SECONDS = 600.0  # for the files of a version to be on disk


class Model:
    """The model that a lane trains.

    Attributes:
        state: What the weights contain now.
        journaled: The last step that the journal has.
    """

    def __init__(
        self, spec: Spec, params: DriverParams, run_dir: RunDir, pool: Connection, journal: JournalWriter
    ) -> None:
        self.state = State()
        self._spec = spec
        self._params = params
        self._run_dir = run_dir
        self._pool = pool
        self._journal = journal
        self._records = [record for record, _ in read(run_dir.journal)]
        self._facts = lineage(self._records)
        self.journaled = max((fact.step for fact in self._facts if fact.kind == "step"), default=0)
        self._next_version = max(1 + newest_version(run_dir, self._records), params.first_version)
        self._info: PoolInfo = pool.call("hello", Nothing())
        self._is_open = False
        self._origin = dict[str, str | None]()
        self._saved_seq = -1

    def begin(self, state: State) -> None:
        """Open the slot as the newest checkpoint has it, if there is one.

        Args:
            state: Becomes the model's state.

        Raises Conflict where the pool's trainer is too old, or its base is not the run's base, and what
        `chosen_checkpoint` raises.
        """
        info = self._info
        run = self._params.run
        if LABELS not in info.losses:
            raise Conflict(
                f"pool {info.pool} does not know {LABELS}, which Tinker's losses need",
                hint=f"`lorad pools stop {info.pool}` ends it; `lorad resume {run}` starts one that does.",
            )
        attempts = [record.data for record in reversed(self._records) if record.kind == "attempt"]
        if is_same_base(attempts or self._params.bases, info, sizes_of(self._spec.trainer)) is False:
            raise Conflict(
                f"the weights of {info.model} are not those that {run} was trained on",
                hint="Put the model back, or make a new model.",
            )
        self.state = state
        checkpoint = chosen_checkpoint(self._run_dir, self._params, self._facts)
        if checkpoint is not None:
            restored = msgspec.json.decode((checkpoint / STATE).read_bytes(), type=State)
            for field in State.__struct_fields__:
                setattr(state, field, getattr(restored, field))
        versions = [fact.data["version"] for fact in self._facts if fact.kind == "version"]
        state.version = versions[-1] if versions else -1  # those after the checkpoint are not made again
        self._saved_seq = state.seq
        if checkpoint is not None:
            self._open({"resume_from": str(checkpoint)}, resumed_from=state.step)

    def create(self, source: str, *, optimizer: bool) -> None:
        """Open the slot afresh, or from the directory of a checkpoint."""
        own = self._params.start_from
        self._open({"resume_from" if optimizer else "source": source} if source else {"resume_from": own})

    def load(self, source: str, *, optimizer: bool) -> None:
        """Load the weights of a checkpoint; where that fails, they are as after the last step."""
        self.snapshot()
        self.close()
        try:
            self._open({"resume_from" if optimizer else "source": source})
        except LoradError:
            self._open(self._origin)
            raise

    def snapshot(self) -> bool:
        """Save the weights as after the last step, and return whether that was to be done.

        Gradients are in no checkpoint: requests after `state.seq` are done again.
        """
        state = self.state
        final = self._run_dir.checkpoint(state.step, self._params.attempt)
        if not state.step or state.seq <= self._saved_seq or final.exists():
            return False
        self._journal.check_place()
        temporary = directory.begin(final)
        self._pool.call("save", Save(str(temporary), state.step))
        (temporary / STATE).write_bytes(msgspec.json.encode(state))
        facts = {"run": self._params.run, "step": state.step}
        size = sum(file.bytes for file in directory.commit(temporary, final, facts).files.values())
        fact = CheckpointFact(self._relative(final), state.version, size)
        self._journal.append("checkpoint", state.step, fact)
        self._saved_seq = state.seq
        self._origin = {"resume_from": str(final)}
        print(f"checkpoint at step {state.step}: {fact.path}", flush=True)
        return True

    def save(self, seq: int, work: SaveWeights) -> Saved:
        """Keep weights and optimizer under a name. Raises ValueError where the name may not be used."""
        if _NAME.fullmatch(work.name) is None:
            raise ValueError(f"{work.name!r} is no name for a checkpoint")
        final = self._run_dir.root / WEIGHTS / work.name
        if final.exists() and directory.read_manifest(final).facts.get("seq") != seq:
            if not work.overwrite:
                raise ValueError(f"there is a checkpoint named {work.name}; save it with overwrite")
            directory.discard(final)
        if not final.exists():
            final.parent.mkdir(mode=0o700, exist_ok=True)
            temporary = directory.begin(final)
            self._pool.call("save", Save(str(temporary), self.state.step))
            directory.commit(temporary, final, {"run": self._params.run, "step": self.state.step, "seq": seq})
        size = directory.read_manifest(final).bytes
        expires = None if work.ttl is None else time.time() + work.ttl
        return Saved(work.name, self._relative(final), size, expires, work.metadata)

    def publish(self, work: SaveSampler) -> Published:
        """Make the next version, and wait until its files are on disk. Raises AttestationFailed."""
        state = self.state
        number = self._next_version
        path = self._run_dir.version(number)
        parent = state.version if state.version >= 0 else None
        before = (self._params.origin or None) if parent is None else f"{self._params.run}@{parent}"
        self._journal.check_place()
        self._next_version += 1
        done: PublishDone = self._pool.call("publish", Publish(number, state.step, before, str(path)))
        deadline = time.monotonic() + _FILES_SECONDS
        while not path.is_dir():
            self._pool.call("status", Nothing())  # raises PoolLost
            if time.monotonic() > deadline:
                raise StorageError(f"{path} was not written within {_FILES_SECONDS:.0f} s")
            time.sleep(0.01)
        fact = version_fact(done, number, parent, self._run_dir, self._spec.lora)
        self._journal.append("version", state.step, fact)
        state.version = number
        expires = None if work.ttl is None else time.time() + work.ttl
        about = (self._relative(path), done.sha256, done.bytes, expires, work.metadata)
        return Published(number, work.name, work.sampler, *about)

    def close(self) -> None:
        """Give the slot back. Raises LoradError when the base was changed."""
        if not self._is_open:
            return
        self._is_open = False
        closed: SlotClosed = self._pool.call("close", Nothing())
        if closed.base_checksum != self._info.base_checksum:
            raise LoradError("the base's weights changed; nothing of this attempt can be trusted")

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self._run_dir.root))

    def _open(self, start: dict[str, str | None], resumed_from: int | None = None) -> None:
        """Open the slot; the first time, journal the attempt."""
        info = self._info
        facts = read_facts(Path(info.model_path))
        request = replace(open_of(self._spec, facts, Path(self._params.cwd)), **start)
        opened: Opened = self._pool.call("open", replace(request, step=self.state.step))
        if not self._origin:
            attempt = AttemptFact(
                pid=os.getpid(),
                steps=self._params.steps,
                pool=info.pool,
                base_checksum=info.base_checksum,
                resumed_from=resumed_from,
                parameters=opened.parameters,
                model_sha256=info.model_sha256,
                base_parameters=info.parameters,
                trainer=info.trainer,
                engine=info.engine,
                sizes=sizes_of(self._spec.trainer),
                software=info.versions,
            )
            self._journal.append("attempt", self.state.step, attempt)
            if info.nodes:
                self._journal.append("placed", self.state.step, Placed(info.nodes, self._spec.trainer.ranks))
        self._is_open = True
        self._origin = start
