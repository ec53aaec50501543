"""A checkpoint: the pool writes the slot's state, the driver its own, one rename makes it whole."""

import os
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from lorad.adapters import directory
from lorad.driver import pending
from lorad.driver.attempt.checkpoints import STATE
from lorad.driver.session import Session, State
from lorad.protocol.calls import Save
from lorad.protocol.journal import CheckpointFact, lineage, read

_REFERENCE = "reference"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


class Restored(Struct, frozen=True):
    """A checkpoint to continue from."""

    path: Path
    state: State

    @property
    def reference(self) -> Path | None:
        """Return the directory of what algorithm.kl.reset_every put in the reference's place."""
        return self.path / _REFERENCE if self.state.reference_sha256 else None


def is_due(session: Session, step: int | None = None) -> bool:
    """Return whether a checkpoint is due after a step, which is the present one by default."""
    step = session.state.step if step is None else step
    setting = session.spec.checkpoint
    is_late = setting.minutes is not None and (
        time.monotonic() - session.checkpointed >= 60 * setting.minutes
    )
    return step > 0 and (is_late or step % setting.every == 0 or step >= session.params.steps)


def is_written(session: Session) -> bool:
    """Return whether there is a checkpoint of the present step in this lineage."""
    facts = lineage([record for record, _ in read(session.run_dir.journal)])
    present = [f for f in facts if f.kind == "checkpoint" and f.step == session.state.step]
    return any((session.run_dir.root / f.data["path"]).exists() for f in present)


def checkpoint(session: Session) -> None:
    """Write a checkpoint, with the samples that older versions make for the steps to come.

    Raises StorageError (disk full, the run's directory is gone): the checkpoints before it stay.
    """
    state = session.state
    final = session.run_dir.checkpoint(state.step, session.params.attempt)
    with session.timed("checkpoint"):
        session.journal.check_place()
        rollouts = session.ahead.of_earlier_versions() if session.ahead is not None else []
        temporary = directory.begin(final)
        session.pool.call("save", Save(str(temporary), state.step))
        if (stream := session.train_data.stream) is not None:
            state.stream = stream.bookmark(state.position)
        (temporary / STATE).write_bytes(msgspec.json.encode(state))
        pending.write(temporary, rollouts)
        if session.reference is not None:
            (temporary / _REFERENCE).mkdir()
            for name in _ADAPTER:  # links keep the files, whatever becomes of the place where they are
                os.link(session.reference / name, temporary / _REFERENCE / name)
        manifest = directory.commit(temporary, final, {"run": session.params.run, "step": state.step})
        size = sum(file.bytes for file in manifest.files.values())
        path = str(final.relative_to(session.run_dir.root))
        session.journal.append(
            "checkpoint", state.step, CheckpointFact(path=path, version=state.version, bytes=size)
        )
    if session.reference is not None:
        session.reference = final / _REFERENCE
    session.checkpointed = time.monotonic()
    print(f"checkpoint at step {state.step}: {path}", flush=True)
