"""Copy the adapter that the KL penalty of a run is measured against, if it is one, before the run exists.

`algorithm.kl.reference` names the adapter that the run starts from (`start`), a version or a PEFT directory.
The run keeps a copy of its own, `runs/<name>/reference/`, which nothing prunes: the other run may be removed,
and a directory may change.
"""

import asyncio
import re
import uuid
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from lorad.adapters.adapter import Adapter
from lorad.adapters.directory import TEMPORARY, discard, write_directory
from lorad.adapters.peft import read_peft, write_peft
from lorad.box.paths import RunDir
from lorad.daemon.context import Context, request_of
from lorad.daemon.pools.as_owner import on_behalf
from lorad.daemon.process.user_files import own_directory
from lorad.daemon.process.users import Caller
from lorad.daemon.runs.bases import bases_of
from lorad.daemon.runs.create import expanded
from lorad.daemon.runs.versions import await_files, find_version, in_hand
from lorad.errors import (
    AdapterRefused,
    Conflict,
    IntegrityError,
    LoradError,
    NotFound,
    SpecError,
    StorageError,
)
from lorad.files import fsync
from lorad.protocol.journal import Reference
from lorad.protocol.preflight import SpecFacts
from lorad.spec.model import Spec
from lorad.store import runs
from lorad.store.rows import RunRow

_KEY = "algorithm.kl.reference"
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*@[0-9]{1,9}")


class Staged(NamedTuple):
    """The copy of a reference, on its way into a run's directory.

    root: the directory that the copy lies in until then.
    model: where the base lies on which the run of a version trained; "" for other adapters.
    """

    reference: Reference
    root: Path
    model: str = ""

    @property
    def directory(self) -> Path:
        return self.root / "reference"


class Begins(NamedTuple):
    """What a fork begins with.

    parent: the run that it comes from.
    inherited: the parent's reference, where the fork uses the name in the parent's spec. The parent's copy is
        taken, as the name may mean nothing any more.
    """

    directory: Path
    parent: RunRow
    inherited: Reference | None


async def staged(
    ctx: Context, caller: Caller, spec: Spec, cwd: str, fork: Begins | None = None
) -> Staged | None:
    """Copy the spec's reference; None where it is the base, or nothing is compared with it. `clear` it in the
    end. A version of another user, which the caller may see, is read as its owner.

    Raises SpecError (it begins with the key), NotFound, NotAllowed, Conflict (the files are gone) and
    StorageError.
    """
    name = chosen(spec, is_fork=fork is not None)
    if not spec.algorithm.has_reference or name == "base":
        return None
    if fork is not None and fork.inherited is not None:
        adapter = await _read(ctx, fork.parent.owner_uid, fork.parent.dir.reference, name)
        return await _written(ctx, caller.uid, spec, adapter, fork.inherited)
    if fork is not None and name == "start":
        adapter = await _read(ctx, caller.uid, fork.directory, name)
        return await _written(ctx, caller.uid, spec, adapter, Reference(name, ""))
    if name == "start" or not _VERSION.fullmatch(name):
        path = spec.lora.adapter_path if name == "start" else name
        place = Path(cwd) / expanded(str(path), ctx.user(caller.uid))
        adapter = await _read(ctx, caller.uid, place, name)
        return await _written(ctx, caller.uid, spec, adapter, Reference(name, ""))
    try:
        version = find_version(ctx, caller, name)
    except NotFound as error:
        hint = "`lorad adapters` shows which there are."
        raise SpecError(f"there is no {name}: {error.message}", key=_KEY, hint=hint) from None
    run = runs.get(ctx.store, version.run)
    with in_hand(ctx, version):
        await await_files(ctx, version)
        adapter = await _read(ctx, run.owner_uid, Path(version.path), name)
    recorded = Reference(name, version.sha256, bases=bases_of(ctx, run))
    copy = await _written(ctx, caller.uid, spec, adapter, recorded)
    return copy._replace(model=request_of(run).model_path)


def chosen(spec: Spec, *, is_fork: bool) -> str:
    """Choose the reference: without one in the spec it is `start` where the run starts from an adapter, else
    `base`. With a teacher that is another model it is an adapter of the teacher.
    """
    starts = (is_fork or spec.lora.adapter_path is not None) and spec.algorithm.teacher is None
    name = spec.algorithm.kl.reference or ("start" if starts else "base")
    if name == "start" and not starts:
        hint = "Set lora.adapter_path, or use base, a version (run@number) or a PEFT directory."
        raise SpecError("start, but this run starts from no adapter", key=_KEY, hint=hint)
    return name


async def _read(ctx: Context, uid: int, directory: Path, name: str) -> Adapter:
    """Read an adapter as the user of `uid`. Raises SpecError for a directory that holds no adapter."""
    key = "lora.adapter_path" if name == "start" else _KEY
    try:
        return await on_behalf(ctx, uid, read_peft, directory)
    except AdapterRefused as error:
        raise SpecError(error.message, key=key, hint=error.hint) from error
    except OSError as error:
        hint = f"{_KEY} is start, base, a version (run@number) or a PEFT directory."
        raise SpecError(f"{error.filename or directory}: {error.strerror}", key=key, hint=hint) from error


async def _written(ctx: Context, uid: int, spec: Spec, adapter: Adapter, recorded: Reference) -> Staged:
    """Write a reference into a directory of the user's. Raises IntegrityError, StorageError.

    recorded: the reference, with the sha256 that its tensors must have where that is known.
    """
    sha256 = await asyncio.to_thread(adapter.digest)
    if recorded.sha256 not in ("", sha256):
        problem = f"{_KEY}: the tensors of {recorded.name} have sha256 {sha256}, not {recorded.sha256}"
        raise IntegrityError(problem, hint="Its files were replaced; use another version.")
    root = ctx.runs_root / f"{TEMPORARY}{spec.name}-{uuid.uuid4().hex[:12]}"
    copy = Staged(replace(recorded, sha256=sha256), root)
    try:
        root.mkdir(mode=0o700)
        if (user := ctx.user(uid)) is not None:
            own_directory(root, user)
        model = spec.algorithm.teacher or spec.model.path
        facts = {"reference": recorded.name, "sha256": sha256, "model": model}
        write = partial(write_peft, adapter, base_model=model)
        await on_behalf(ctx, uid, write_directory, copy.directory, write, facts)
    except OSError as error:
        discard(root)
        where = f"{error.filename or root}: {error.strerror}"
        raise StorageError(where, hint="Free some space, or mend the permissions.") from error
    except LoradError:
        discard(root)
        raise
    return copy


def refuse_other_model(copy: Staged | None, facts: SpecFacts) -> None:
    """Raise SpecError for a version of a run on another model than this run's or its teacher's."""
    model_path = facts.teacher_path or facts.model_path
    if copy is not None and copy.model and Path(copy.model).resolve() != Path(model_path).resolve():
        problem = f"{copy.reference.name} is an adapter of {copy.model}, not of {model_path}"
        hint = "If both are the same model, export the version and give its directory."
        raise SpecError(problem, key=_KEY, hint=hint)


def settle(copy: Staged | None, directory: Path) -> None:
    """Move the copy to where it stays, before the run exists. Never awaits. Raises Conflict."""
    own = RunDir(directory).reference
    discard(own)  # left by a run that was never made
    if copy is None:
        return
    try:
        copy.directory.rename(own)
        fsync(directory)
    except OSError as error:
        raise Conflict(f"{own} cannot be made: {error.strerror}", hint="Choose another name.") from error


def clear(copy: Staged | None) -> None:
    """Remove what was staged, whether it was settled or not."""
    if copy is not None:
        discard(copy.root)
