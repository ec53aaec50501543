"""What the daemon tells a driver: `params.json` in its attempt directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lorad.protocol.journal import Reference


class Params(Struct, frozen=True):
    """One attempt. `resume_step`: of the checkpoint to go on from; None: the newest whole one, or a fresh start.

    `steps` is the total; `pool_timeout` how long (seconds) to wait for the pool's first answer; `first_version` a
    number that no version of this name ever had, not even of a run that was removed. `spec`: the file of the attempt's
    resolved spec; None: the run's. origin: `run@version` that it was forked from, or ""; `start_from`: the directory of
    the checkpoint that it begins with while it has none of its own; `bases`: what was told, the newest first, of the
    base that its first weights were made on. date: when the run was made, in ISO 8601, which is what chat templates
    take for the present in every attempt; None: the present. reference: None: KL is to the base.
    """

    run: str
    run_dir: str
    attempt: int
    steps: int
    resume_step: int | None
    pool: str
    pool_socket: str
    cwd: str
    pool_timeout: float = 300.0
    first_version: int = 0
    spec: str | None = None
    origin: str = ""
    start_from: str | None = None
    bases: list[dict[str, Any]] = []
    date: str | None = None
    reference: Reference | None = None


def read(attempt_dir: Path) -> Params:
    return msgspec.json.decode((attempt_dir / "params.json").read_bytes(), type=Params)


def write(attempt_dir: Path, params: Params) -> None:
    (attempt_dir / "params.json").write_bytes(msgspec.json.encode(params))
