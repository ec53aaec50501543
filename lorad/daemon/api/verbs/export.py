"""Copy a version out of lorad as a plain PEFT directory."""

from __future__ import annotations

import json
from pathlib import Path

from msgspec import Struct

from lorad.adapters.directory import MANIFEST, amend, read_manifest, verify
from lorad.adapters.peft import CONFIG
from lorad.bounds import JSON_BYTES
from lorad.client.shapes import Exported
from lorad.daemon.api.call import Call
from lorad.daemon.context import Context
from lorad.daemon.pools.as_owner import in_thread
from lorad.daemon.process.as_user import as_user
from lorad.daemon.process.user_files import files_into
from lorad.daemon.process.users import User
from lorad.daemon.runs.versions import find_version, has_files, in_hand
from lorad.errors import Conflict, NotFound, SpecError, StorageError
from lorad.files import read_file
from lorad.models.directory import BUILTIN
from lorad.store import runs


class Body(Struct):
    directory: str


async def handle(ctx: Context, call: Call) -> Exported:
    """Raises NotFound, IntegrityError, Conflict (the directory is there and not empty), StorageError."""
    version = find_version(ctx, call.request.match_info["version"])
    target = Path(call.json(Body).directory)
    if not target.is_absolute():
        raise SpecError(f"{target} is not an absolute path", hint="Give the whole path.")
    owner, caller = ctx.user(runs.get(ctx.store, version.run).owner_uid), ctx.user(call.caller.uid)
    with in_hand(ctx, version):
        await in_thread(ctx, call.caller.uid, copy, Path(version.path), target, owner, caller)
    return Exported(f"{version.run}@{version.version}", str(target), version.sha256)


def copy(source: Path, target: Path, owner: User | None, caller: User | None) -> None:
    """Verified before, on disk after; read as the version's owner, written as who asks for it.

    The copy names its base as transformers opens it.
    """
    with as_user(owner):
        if not has_files(source):
            hint = "Export a version of a checkpoint."
            raise NotFound(f"the files of {source} are gone or not written yet", hint=hint)
        verify(source)
        names = (*read_manifest(source).files, MANIFEST)
    try:
        with as_user(caller):
            if target.exists() and (not target.is_dir() or any(target.iterdir())):
                raise Conflict(f"{target} exists and is not empty", hint="Choose another directory.")
            target.mkdir(parents=True, exist_ok=True)
        files_into(source, target, names, owner, caller)
    except OSError as error:
        raise StorageError(
            f"{error.filename or target}: {error.strerror}", hint="Choose another directory."
        ) from error
    with as_user(caller):
        verify(target)
        name_base(target)


def name_base(directory: Path) -> None:
    """The directory of a base that ships with lorad instead of `builtin:tiny`; a hub id and its revision
    apart.
    """
    try:
        settings = json.loads(read_file(directory / CONFIG, JSON_BYTES))
        base = str(settings["base_model_name_or_path"])
    except (ValueError, RecursionError, KeyError, TypeError):  # not of lorad's making
        return
    name, _, revision = base.partition("@")
    if base in BUILTIN:
        named = {"base_model_name_or_path": str(BUILTIN[base])}
    elif revision and not Path(base).is_absolute():
        named = {"base_model_name_or_path": name, "revision": revision}
    else:
        return
    amend(directory, CONFIG, json.dumps(settings | named, indent=2, sort_keys=True).encode() + b"\n")
