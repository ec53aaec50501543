"""The beginning of an attempt: wait for the pool, open the slot (fresh or from a checkpoint), publish, evaluate."""

from __future__ import annotations

import os
import time
from pathlib import Path

from lorad.adapters.targets import match_modules
from lorad.driver import checkpoint
from lorad.driver.evaluate import evaluate, is_due
from lorad.driver.params import Params
from lorad.driver.publish import publish
from lorad.driver.session import Session, State, StopFlag
from lorad.errors import Conflict, PoolLost
from lorad.models.directory import linear_shapes, read_config
from lorad.protocol.calls import Nothing, Open, Opened, PoolInfo
from lorad.protocol.connection import Connection
from lorad.protocol.journal import Attempt, Record, lineage, read


def connect(params: Params, stop: StopFlag) -> Connection | None:
    """A connection to the pool, which may still be loading its base; None when a stop came first.

    Raises PoolLost after `params.pool_timeout` seconds.
    """
    deadline = time.monotonic() + params.pool_timeout
    while not stop.wanted:
        try:
            return Connection(Path(params.pool_socket), run=params.run, attempt=params.attempt)
        except PoolLost:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    return None


def begin(session: Session) -> PoolInfo:
    """After it, the slot is open, the current version is attested, and `attempt` (and `rewind`) are journaled."""
    info: PoolInfo = session.pool.call("hello", Nothing())
    records = [r for r, _ in read(session.run_dir.journal)]
    facts = lineage(records)
    compare_with_before(session, info, records)
    restored = checkpoint.find(session, facts)
    opened = open_slot(session, info, restored)
    session.journal.append("attempt", restored.state.step if restored else 0, _attempt(session, info, restored, opened))
    if any(r.kind in ("step", "version", "eval") for r in records):
        session.journal.append("rewind", session.state.step, {"to": restored.state.step if restored else -1})
    _restore(session.state, restored)
    session.state.next_version = max(1 + newest_version(session, records), session.params.first_version)
    publish(session, session.state.step)
    if restored is None and is_due(session):
        evaluate(session)
    return info


def open_slot(session: Session, info: PoolInfo, restored: checkpoint.Restored | None) -> Opened:
    spec = session.spec
    shapes = linear_shapes(read_config(Path(info.model_path)))
    opened: Opened = session.pool.call(
        "open",
        Open(
            modules=match_modules(shapes, spec.lora.target_modules, spec.lora.exclude_modules),
            rank=spec.lora.rank,
            alpha=spec.lora.alpha,
            dropout=spec.lora.dropout,
            rslora=spec.lora.rslora,
            init=spec.lora.init,
            seed=spec.seed,
            betas=spec.trainer.betas,
            eps=spec.trainer.eps,
            weight_decay=spec.trainer.weight_decay,
            tokens_per_microbatch=spec.trainer.tokens_per_microbatch,
            activation_checkpointing=spec.trainer.activation_checkpointing,
            source=_source(session),
            resume_from=str(restored.path) if restored else None,
            canaries=spec.attest.canaries,
            canary_tokens=spec.attest.tokens,
        ),
    )
    return opened


def _source(session: Session) -> str | None:
    path = session.spec.lora.adapter_path
    return str(session.params.cwd / Path(path).expanduser()) if path else None


def compare_with_before(session: Session, info: PoolInfo, records: list[Record]) -> None:
    """Other data than before is told; another base is refused (Conflict): an adapter belongs to one."""
    before = next((r.data for r in reversed(records) if r.kind == "attempt"), None)
    if before is None:
        return
    if before["base_checksum"] != info.base_checksum:
        raise Conflict(
            f"the weights of {info.model} are not those that this run was trained on",
            hint="Put the model back, or start a new run with lora.adapter_path set to an exported version.",
        )
    if before.get("data_sha256", "") != session.train_data.digest:
        session.warn(f"{session.spec.data.train} is not what it was in the attempt before: other batches will come")


def newest_version(session: Session, records: list[Record]) -> int:
    """The highest version number ever used, journaled or only on disk: numbers never rewind."""
    journaled = [r.data["version"] for r in records if r.kind == "version"]
    directory = session.run_dir.versions
    on_disk = [int(p.name) for p in directory.iterdir() if p.name.isdigit()] if directory.exists() else []
    return max((-1, *(int(n) for n in journaled), *on_disk))


def _attempt(session: Session, info: PoolInfo, restored: checkpoint.Restored | None, opened: Opened) -> Attempt:
    return Attempt(
        pid=os.getpid(),
        steps=session.params.steps,
        pool=info.pool,
        base_checksum=info.base_checksum,
        resumed_from=restored.state.step if restored else None,
        parameters=opened.parameters,
        data_sha256=session.train_data.digest,
    )


def _restore(state: State, restored: checkpoint.Restored | None) -> None:
    for field in State.__struct_fields__:
        setattr(state, field, getattr(restored.state if restored else State(), field))
