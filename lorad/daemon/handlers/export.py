"""Copy a version out of lorad as a plain PEFT directory."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from msgspec import Struct

from lorad.adapters.directory import MANIFEST, fsync, read_manifest, verify
from lorad.daemon.context import Context
from lorad.daemon.request import Call
from lorad.daemon.versions import find_version
from lorad.errors import Conflict, NotFound, SpecError, StorageError


class Body(Struct):
    directory: str


async def handle(ctx: Context, call: Call) -> dict[str, Any]:
    """Raises NotFound, IntegrityError, Conflict (the directory is there and not empty), StorageError."""
    version = find_version(ctx, call.request.match_info["version"])
    target = Path(call.json(Body).directory)
    if not target.is_absolute():
        raise SpecError(f"{target} is not an absolute path", hint="Give the whole path.")
    await asyncio.to_thread(copy, Path(version["path"]), target)
    return {"version": f"{version['run']}@{version['version']}", "path": str(target), "sha256": version["sha256"]}


def copy(source: Path, target: Path) -> None:
    """Verified before, on disk after."""
    if not source.is_dir():
        raise NotFound(f"the files of {source} are gone or not written yet", hint="Export a version of a checkpoint.")
    verify(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Conflict(f"{target} exists and is not empty", hint="Choose another directory.")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in (*read_manifest(source).files, MANIFEST):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
        for path in (*target.rglob("*"), target):
            fsync(path)
    except OSError as error:
        raise StorageError(f"{error.filename or target}: {error.strerror}", hint="Choose another directory.") from error
    verify(target)
