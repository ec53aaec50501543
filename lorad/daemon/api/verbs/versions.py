"""List versions and checkpoints, pin versions, and copy them out of lorad."""

import asyncio
import math
import os
import tarfile
from io import BufferedReader
from pathlib import Path

from aiohttp import web
from msgspec.structs import asdict

from lorad.adapters.directory import MANIFEST, read_manifest, verify
from lorad.client.transport import EXPORTED_HEADER
from lorad.daemon.access import seen_by_run
from lorad.daemon.api.call import Call
from lorad.daemon.api.verbs.aliases import publish
from lorad.daemon.api.views import version_view
from lorad.daemon.context import Context
from lorad.daemon.pools.as_owner import in_thread
from lorad.daemon.pools.life import refresh
from lorad.daemon.process.as_user import as_user
from lorad.daemon.process.user_files import files_into
from lorad.daemon.process.users import User
from lorad.daemon.runs.versions import await_files, files_gone, find_version, has_files, in_hand
from lorad.daemon.storage.prune import Doomed, delete, discard_all, may_go
from lorad.errors import Conflict, NotFound, SpecError, StorageError
from lorad.files import open_file
from lorad.models.hf.exported import name_base
from lorad.records.measured import Result
from lorad.records.requests import ExportRequest, ResultRequest
from lorad.records.versions import Checkpoint, Exported, Version
from lorad.store import events, runs
from lorad.store.checkpoints import checkpoints
from lorad.store.versions import add_result, get_version, results, set_pinned, versions

_PIECE = 1 << 20  # bytes of an archive that are read at a time


async def list_versions(ctx: Context, call: Call) -> list[Version]:
    """List the versions of one run or of all."""
    run = call.text("run")
    if run is not None:
        runs.get(ctx.store, run)
    await refresh(ctx)
    rows = seen_by_run(ctx, call.caller, await ctx.read(versions, run))
    by_weights: dict[str, list[Result]] = {}
    for result in seen_by_run(ctx, call.caller, await ctx.read(results, run)):
        by_weights.setdefault(result.sha256, []).append(result)
    # in a thread, as looking for the files of thousands of versions takes a while
    return await asyncio.to_thread(
        lambda: [version_view(ctx, row, by_weights.get(row.sha256, [])) for row in rows]
    )


async def list_checkpoints(ctx: Context, call: Call) -> list[Checkpoint]:
    """List the checkpoints from which a run can resume, oldest first."""
    return await ctx.read(checkpoints, call.run)


async def pin(ctx: Context, call: Call) -> Version:
    """Keep the files of a version, and keep it loaded in the pool of its base while that is up.

    Raises NotFound, Conflict (its files are gone).
    """
    version = find_version(ctx, call.caller, call.request.match_info["version"])
    with in_hand(ctx, version):
        await await_files(ctx, version)
        with ctx.store.write():
            before = get_version(ctx.store, version.run, version.version)
            if not has_files(before.path):
                raise files_gone(before)
            row = set_pinned(ctx.store, version.run, version.version, True, by=call.caller.name)
        publish(ctx)
        return version_view(ctx, row)


async def unpin(ctx: Context, call: Call) -> Version:
    """End a pin: the version goes when nothing else needs it. Raises NotFound."""
    version = find_version(ctx, call.caller, call.request.match_info["version"])
    row = set_pinned(ctx.store, version.run, version.version, False, by=call.caller.name)
    publish(ctx)
    return version_view(ctx, row)


async def discard_files(ctx: Context, call: Call) -> Version:
    """Delete the files of a version that nothing needs. Raises NotFound, Conflict."""
    version = find_version(ctx, call.caller, call.request.match_info["version"])
    await refresh(ctx)
    if has_files(version.path):
        if not may_go(ctx, runs.get(ctx.store, version.run), version.version):
            hint = "It may be the run's current one, of a checkpoint, pinned, aliased or loaded."
            raise Conflict(f"the files of {version.name} are needed", hint=hint)
        gone = delete(ctx, Doomed(version.run, Path(version.path), "version", "its owner discards it"))
        if gone is not None:
            await in_thread(ctx, version.owner_uid, discard_all, [gone])
    return version_view(ctx, version)


async def keep_result(ctx: Context, call: Call) -> Result:
    """Keep the result of an evaluation of a version, with an event. Raises NotFound, SpecError."""
    version = find_version(ctx, call.caller, call.request.match_info["version"])
    body = call.json(ResultRequest)
    if not all(map(math.isfinite, body.metrics.values())):
        raise SpecError("metrics are not finite numbers", hint="Leave some out.")
    about = asdict(body) | {"sha256": version.sha256, "run": version.run, "version": version.version}
    with ctx.store.write():
        result = add_result(ctx.store, Result(by=call.caller.name, **about))
        data = {"version": result.version, "by": result.by, "data": result.data, "metrics": result.metrics}
        events.append(ctx.store, version.run, "evaluated", data)
    return result


async def list_results(ctx: Context, call: Call) -> list[Result]:
    """List the results of the versions of one run, or the last ones of all."""
    run = call.text("run")
    if run is not None:
        runs.get(ctx.store, run)
    return seen_by_run(ctx, call.caller, await ctx.read(results, run))


async def export(ctx: Context, call: Call) -> Exported:
    """Copy a version out of lorad as a plain PEFT directory.

    Raises NotFound, IntegrityError, Conflict (the directory is there and not empty), StorageError.
    """
    version = find_version(ctx, call.caller, call.request.match_info["version"])
    target = Path(call.json(ExportRequest).directory)
    if not target.is_absolute():
        raise SpecError(f"{target} is not an absolute path", hint="Give the whole path.")
    owner = ctx.user(runs.get(ctx.store, version.run).owner_uid)
    caller = ctx.user(call.caller.uid)
    with in_hand(ctx, version):
        await in_thread(ctx, call.caller.uid, copy, Path(version.path), target, owner, caller)
        about = {"version": version.version, "directory": str(target), "by": call.caller.name}
        events.append(ctx.store, version.run, "exported", about)
    return Exported(version.name, str(target), version.sha256)


async def archive(ctx: Context, call: Call) -> web.StreamResponse:
    """Stream the files of a version as a tar for a client on another machine, verified before, and read as
    the version's owner. Raises NotFound, IntegrityError.
    """
    version = find_version(ctx, call.caller, call.request.match_info["version"])
    owner = ctx.user(runs.get(ctx.store, version.run).owner_uid)
    source = Path(version.path)
    with in_hand(ctx, version):
        names = await in_thread(ctx, call.caller.uid, _verify_files, source, owner)
        about = {"version": version.version, "directory": "", "by": call.caller.name}
        events.append(ctx.store, version.run, "exported", about)
        headers = {"Content-Type": "application/x-tar", EXPORTED_HEADER: f"{version.name} {version.sha256}"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(call.request)
        try:
            for file_name in names:
                file = await in_thread(ctx, call.caller.uid, _open, source / file_name, owner)
                with file:
                    header = tarfile.TarInfo(file_name)
                    remaining = header.size = os.fstat(file.fileno()).st_size
                    await response.write(header.tobuf())
                    while remaining:
                        piece = await in_thread(ctx, call.caller.uid, file.read, min(remaining, _PIECE))
                        if not piece:
                            raise StorageError(f"{file.name} has become shorter")
                        await response.write(piece)
                        remaining -= len(piece)
                    await response.write(bytes(-header.size % tarfile.BLOCKSIZE))
            await response.write(bytes(2 * tarfile.BLOCKSIZE))
        except (OSError, StorageError):  # the reader went, or a file cannot be read: half is no archive
            if call.request.transport is not None:
                call.request.transport.abort()
    return response


def _open(path: Path, owner: User | None) -> BufferedReader:
    """Open a file as a user. Raises StorageError."""
    try:
        with as_user(owner):
            return open_file(path, links=False)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error


def _verify_files(source: Path, owner: User | None) -> tuple[str, ...]:
    """Hash the files of a version again, and return their names. Raises NotFound, IntegrityError."""
    with as_user(owner):
        if not has_files(source):
            hint = "Export a version of a checkpoint."
            raise NotFound(f"the files of {source} are gone or not written yet", hint=hint)
        verify(source)
        return (*read_manifest(source).files, MANIFEST)


def copy(source: Path, target: Path, owner: User | None, caller: User | None) -> None:
    """Copy the files of a version, verified before and after, from its owner to who asks. The copy names its
    base as transformers opens it.
    """
    names = _verify_files(source, owner)
    try:
        with as_user(caller):
            if target.exists() and (not target.is_dir() or any(target.iterdir())):
                raise Conflict(f"{target} exists and is not empty", hint="Choose another directory.")
            target.mkdir(parents=True, exist_ok=True)
        files_into(source, target, names, owner, caller)
    except OSError as error:
        where = error.filename or target
        raise StorageError(f"{where}: {error.strerror}", hint="Choose another directory.") from error
    with as_user(caller):
        verify(target)
        name_base(target)
