"""The pool of an attempt: the connection, the slot that a spec means, and whether the base is the same."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lorad.backends.setup import adapter_config
from lorad.box.paths import RunDir
from lorad.driver.attempt.main import StopFlag
from lorad.errors import PoolLost
from lorad.files import expanded
from lorad.limits.arguments import AXES
from lorad.models.facts import ModelFacts
from lorad.protocol.batch import Optimizer
from lorad.protocol.calls import Open
from lorad.protocol.connection import Connection
from lorad.protocol.driver_params import DriverParams
from lorad.protocol.heartbeat import HEART
from lorad.protocol.journal import Record
from lorad.protocol.status import PoolInfo
from lorad.spec.model import Spec
from lorad.spec.trainer import Trainer


def connect(params: DriverParams, stop: StopFlag) -> Connection | None:
    """Connect to the pool, which may still be loading its base; return None when a stop came first.

    Raises PoolLost after `params.pool_timeout` seconds.
    """
    deadline = time.monotonic() + params.pool_timeout
    with HEART.waits():
        while not stop.wanted:
            try:
                return Connection(Path(params.pool_socket), run=params.run, attempt=params.attempt)
            except PoolLost:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    return None


def open_of(spec: Spec, model: ModelFacts, cwd: Path) -> Open:
    """Return what a fresh run asks of its slot."""
    adapter = adapter_config(spec, model)
    source = spec.lora.adapter_path
    trainer = spec.trainer
    tokens = trainer.tokens_per_microbatch
    checkpointing = trainer.activation_checkpointing
    return Open(
        modules=adapter.modules,
        rank=adapter.rank,
        expert_rank=adapter.expert_rank,
        alpha=adapter.alpha,
        dropout=adapter.dropout,
        rslora=adapter.rslora,
        dora=adapter.dora,
        lora_type=spec.lora.type,
        init=spec.lora.init,
        seed=spec.seed,
        optimizer=Optimizer(trainer.betas, trainer.eps, trainer.weight_decay, trainer.loraplus_lr_ratio),
        tokens_per_microbatch=0 if tokens == "auto" else tokens,
        activation_checkpointing=None if checkpointing == "auto" else checkpointing,
        longest=spec.longest_row,
        source=str(cwd / expanded(source)) if source else None,
        canaries=spec.attest.canaries,
        canary_tokens=spec.attest.tokens,
        amplified_every=spec.attest.amplified_every,
        priority=spec.resources.priority,
    )


def is_same_base(
    attempts: Sequence[Mapping[str, Any]], info: PoolInfo, sizes: Mapping[str, int]
) -> bool | None:
    """Compare the base with that of attempts, newest first; return None when nothing can be compared.

    Its weight files are compared, which all trainers share, else the checksums of trainers that cut it alike.
    """
    if info.model_sha256:
        for digest in (attempt.get("model_sha256") for attempt in attempts):
            if digest:
                return bool(digest == info.model_sha256)
    for attempt in attempts:
        checksum = attempt.get("base_checksum")
        if checksum and (attempt.get("trainer"), attempt.get("sizes")) == (info.trainer, sizes):
            return bool(checksum == info.base_checksum)
    return None


def sizes_of(trainer: Trainer) -> dict[str, int]:
    return {axis: size for axis in AXES if (size := getattr(trainer, axis)) > 1}


def newest_version(run_dir: RunDir, records: Sequence[Record]) -> int:
    """Return the highest version number ever used, journaled or only on disk: numbers never rewind."""
    journaled = [r.data["version"] for r in records if r.kind == "version"]
    directory = run_dir.versions
    on_disk = [int(p.name) for p in directory.iterdir() if p.name.isdigit()] if directory.exists() else []
    return max((-1, *(int(n) for n in journaled), *on_disk))
