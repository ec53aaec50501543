"""`pool.json` in a pool's directory: what the daemon wants the pool to be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from lorad.errors import SpecError
from lorad.protocol.ranks import RanksSetup
from lorad.protocol.servers import ServerSetup

FILE = "pool.json"
PositiveFloat = Annotated[float, Meta(gt=0)]


class PoolConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One base model, with a trainer and an engine.

    model: as in the spec; model_path: the directory that it resolved to. dtype `auto` is the checkpoint's own on a GPU
    and float32 on the CPU. deterministic: samples of one call share a batch with no other call's. trainer_class and
    engine_class: `module:Class` that replaces what the name means; pythonpath: where such modules are found, separated
    as in PYTHONPATH. mode: where engine and trainer are: `fused` in one process with one base; `resident` side by side,
    each with its own; `timesliced` the same, but the engine sleeps while the trainer trains. server: of an engine that
    is a process of its own; ranks: of a trainer that is made of such. devices: of all GPUs, `device` being the first;
    none: there is no other. owner: user id of its runs. hang: seconds without a heartbeat after which a
    process of its trainer is hung. idle_timeout: seconds without use after which the pool ends by itself when no daemon
    lives.
    """

    pool: str
    model: str
    model_path: str
    socket: str
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    trainer: str = "builtin"
    engine: str = "builtin"
    trainer_class: str | None = None
    engine_class: str | None = None
    mode: Literal["fused", "resident", "timesliced"] = "fused"
    server: ServerSetup | None = None
    ranks: RanksSetup | None = None
    threads: Annotated[int, Meta(gt=0)] = 1
    device: str = "cpu"
    devices: tuple[str, ...] = ()
    deterministic: bool = True
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.85
    pythonpath: str | None = None
    owner: int = -1
    hang: PositiveFloat = 120.0
    idle_timeout: float = 600.0


def read(directory: Path) -> PoolConfig:
    """The configuration of a pool. Raises SpecError when it is missing or not usable."""
    path = directory / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=PoolConfig)
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}", hint="The daemon writes it before it starts a pool.") from error
    except msgspec.MsgspecError as error:
        raise SpecError(f"{path}: {error}", hint="Remove the pool's directory; the daemon makes a new one.") from error


def log_directory(directory: Path) -> Path:
    """Of the present life: the newest attempt, where the shim puts the pool's own log. Without a shim, the pool's.

    A pool that belongs to another user than the daemon sees no attempts but the one that its shim tells it.
    """
    if (attempt := os.environ.get("LORAD_ATTEMPT")) and (theirs := Path(attempt) / "work").is_dir():
        return theirs
    return max((directory / "attempts").glob("[0-9]*"), default=directory)


def write(config: PoolConfig, directory: Path) -> None:
    """Put the configuration where `read` finds it."""
    (directory / FILE).write_bytes(msgspec.json.encode(config))
