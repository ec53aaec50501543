"""The file `params.json` in the directory of an attempt, which the daemon writes and the driver reads."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from lorad.protocol.journal import Reference

FILE = "params.json"


class DriverParams(Struct, frozen=True, kw_only=True):
    """One attempt of a run.

    attempt: the number of the attempt, from 1.
    steps: the total number of steps of the run.
    resume_step: the step of the checkpoint to resume from; without it the newest whole one, or a fresh start.
    pool, pool_socket: the pool's id, and where it listens.
    cwd: the directory where relative paths of the spec begin.
    pool_timeout: seconds to wait for the pool's first answer.
    first_version: a number that no version of this name ever had, even of a run that was removed.
    spec: the file of the attempt's resolved spec; None for the run's.
    origin: the `run@version` that the run was forked from, or "".
    start_from: the directory of the checkpoint to begin with while the run has none of its own.
    bases: what is known of the base that the first weights were made on, newest first.
    date: when the run was made, in ISO 8601; chat templates take it for the present in every attempt.
    reference: what KL is measured against; None for the base.
    """

    run: str
    run_dir: str
    attempt: int
    steps: int
    resume_step: int | None = None
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


def write_params(attempt_dir: Path, params: DriverParams) -> None:
    (attempt_dir / FILE).write_bytes(msgspec.json.encode(params))


def read_params(attempt_dir: Path) -> DriverParams:
    """Raises OSError, MsgspecError."""
    return msgspec.json.decode((attempt_dir / FILE).read_bytes(), type=DriverParams)
