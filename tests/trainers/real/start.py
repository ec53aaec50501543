"""The real backends of trainers, as they are started here."""

import os
import sys
from pathlib import Path
from typing import Any, Literal

from lorad.protocol.pool_setup import Quantize, RanksSetup
from lorad.trainers.base import Trainer
from lorad.trainers.ranks.remote import RanksSettings, RemoteTrainer
from tests.kit.warm.ranks import MEGATRON as VARIABLE
from tests.kit.warm.ranks import MEGATRON_CPU, interpreter

__all__ = ["MEGATRON_CPU", "VARIABLE", "python_of", "setup_of", "started"]

Dtype = Literal["float32", "bfloat16"]


def python_of(backend: str) -> str | None:
    """The interpreter of a backend; None where it is not named. FSDP is in lorad's own environment."""
    return "" if backend == "fsdp" else os.environ.get(VARIABLE) or None


def setup_of(backend: str, **sizes: Any) -> RanksSetup:
    """Ranks are forks: tests of how they begin and end have `tests.nodes.kit.tiny_trainer`."""
    env = {"PYTHONPATH": str(MEGATRON_CPU)} if backend == "megatron" else {}
    return RanksSetup(python=interpreter(python_of(backend) or sys.executable), env=env, **sizes)


async def started(
    backend: str,
    model: Path,
    work: Path,
    dtype: Dtype = "float32",
    quantize: Quantize | None = None,
    **sizes: Any,
) -> Trainer:
    """sizes: tp, dp, … of the ranks. work: an empty directory, for logs too."""
    settings = RanksSettings(backend=backend, model=model, name=str(model), dtype=dtype, quantize=quantize)
    return await RemoteTrainer.start(setup_of(backend, **sizes), settings, work=work, logs=work)
