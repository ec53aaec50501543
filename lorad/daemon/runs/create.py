"""Make a run: its name, its directory, its row. `run`, `sweep`, `fork` and `serve` have this in common."""

import contextlib
import itertools
import json
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from lorad.box.models import downloaded, own_models
from lorad.box.paths import Home, RunDir, default_home
from lorad.daemon.context import Context, Request
from lorad.daemon.pools.as_owner import in_thread
from lorad.daemon.process.as_user import as_user
from lorad.daemon.process.processes import write_json
from lorad.daemon.process.user_files import passable
from lorad.daemon.process.users import Caller, User
from lorad.errors import Conflict, SpecError, StorageError
from lorad.files import write_whole
from lorad.records.requests import RunRequest
from lorad.spec.model import Spec, to_json
from lorad.spec.text import load_task
from lorad.store import events, runs
from lorad.store.rows import RunRow

_ADJECTIVES = """
amber bold brisk calm clever crisp deft eager fair fleet gentle keen kind lively lucid mellow nimble plucky
quick quiet rapid serene sharp silver smooth spry steady sunny swift tidy vivid warm wise witty
"""
_ANIMALS = """
badger beaver bison cobra condor crane dolphin eagle falcon ferret finch fox gecko heron ibex jackal koala
lark lemur lynx marten mole moose newt otter owl panda puffin raven seal stork swan tapir tern wolf wren yak
"""
_NAME_CHARACTERS = 63  # of a name at most


def anchored(spec: Spec, cwd: Path, user: User | None) -> Spec:
    """Make paths of local models absolute: the pool does not run where the user is. Raises SpecError."""
    if not cwd.is_absolute():
        raise SpecError(f"{cwd} is not an absolute path", hint="Say where the paths of the spec begin.")
    model = replace(spec.model, path=_absolute(spec.model.path, cwd, user))
    if (teacher := spec.algorithm.teacher) is None:
        return replace(spec, model=model)
    algorithm = replace(spec.algorithm, teacher=_absolute(teacher, cwd, user))
    return replace(spec, model=model, algorithm=algorithm)


def _absolute(model: str, cwd: Path, user: User | None) -> str:
    """Make a model's path absolute where it is a directory that this user may look into, or a model that
    `lorad models get` brought to them or to the home.
    """
    path = cwd / expanded(model, user)
    places = [own_models(Path(user.home))] if user is not None else []
    places.append(Home(default_home()).models)
    with as_user(user):
        directory = path if os.path.isdir(path) else downloaded(model, *places)
        return model if directory is None else str(directory.resolve())


def expanded(path: str, user: User | None) -> Path:
    """Expand `~` as that user means it; without one, as the daemon does. Raises SpecError."""
    first, _, rest = path.partition("/")
    if user is not None and first == "~":
        return Path(user.home) / rest
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SpecError(f"{path}: {first} is no user's home", hint="Write the whole path.") from None


def fresh_name(ctx: Context) -> str:
    """Make a name such as brisk-otter-3; two with different numbers never meet."""
    adjectives = _ADJECTIVES.split()
    animals = _ANIMALS.split()
    numbers = itertools.count(ctx.store.count("runs") + 1)
    names = (f"{random.choice(adjectives)}-{random.choice(animals)}-{number}" for number in numbers)
    return next(name for name in names if not (ctx.runs_root / name).exists())


async def read_spec(ctx: Context, caller: Caller, body: RunRequest) -> Spec:
    """Read the spec of a request, and give it a name and absolute paths of models. Nothing else is looked at.

    Where the name is in use and the request asks for a suffix, the name is the first of NAME-2, NAME-3, …
    that is free. Raises SpecError.
    """
    overrides = [*body.overrides, *([] if body.name is None else [f"name={json.dumps(body.name)}"])]
    spec = await in_thread(ctx, caller.uid, load_task, body.spec, source=body.source, overrides=overrides)
    spec = await in_thread(ctx, caller.uid, anchored, spec, Path(body.cwd), ctx.user(caller.uid))
    name = first = spec.name or fresh_name(ctx)
    for number in itertools.count(2) if body.suffix else ():
        is_used = name.lower() in ctx.queue.being_made or runs.name_in_use(ctx.store, name)
        if not is_used and not (ctx.runs_root / name / "journal.jsonl").exists():
            break
        name = f"{first[: _NAME_CHARACTERS - 1 - len(str(number))]}-{number}"
    return replace(spec, name=name)


def refuse_used(ctx: Context, spec: Spec) -> None:
    """Raise Conflict when a run, or files of one, have the name in any capitals: disks may ignore those."""
    if str(spec.name).lower() in ctx.queue.being_made:
        raise Conflict(f"a run named {spec.name} is being made", hint="Choose another name.")
    if taken_name := runs.name_in_use(ctx.store, str(spec.name)):
        capitals = " in other capitals, and capitals alone do not tell runs apart"
        like = "" if taken_name == spec.name else capitals
        hint = f"Choose another name, let --suffix choose {spec.name}-2, or `lorad rm` that run."
        raise Conflict(f"there is a run named {spec.name}{like}", hint=hint)
    directory = ctx.runs_root / str(spec.name)
    if (directory / "journal.jsonl").exists():
        hint = "Choose another name, or move that directory away."
        raise Conflict(f"{directory} holds the files of a run that the database does not know", hint=hint)


@contextlib.contextmanager
def being_made(ctx: Context, names: Iterable[str]) -> Iterator[None]:
    """Keep these names from other requests while the block writes the files of the runs."""
    taken = {name.lower() for name in names}
    ctx.queue.being_made |= taken
    try:
        yield
    finally:
        ctx.queue.being_made -= taken


def make_directory(ctx: Context, spec: Spec, text: str, request: Request) -> Path:
    """Make `runs/<name>/` with the spec and the request; it is on disk before the run exists."""
    directory = ctx.runs_root / str(spec.name)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if ctx.users.shared:
            passable(directory)
        write_whole(RunDir(directory).spec_text, text.encode())
        write_whole(RunDir(directory).spec, to_json(spec))
        write_json(directory / "request.json", msgspec.to_builtins(request))
    except OSError as error:
        problem = f"{error.filename or directory}: {error.strerror}"
        raise StorageError(problem, hint="Free some space, or mend the permissions.") from error
    return directory


def create(ctx: Context, spec: Spec, directory: Path, caller: Caller, warnings: list[str]) -> RunRow:
    """Create the row, and the run's first events: the warnings of the preflight."""
    with ctx.store.write():
        row = runs.create(
            ctx.store,
            name=str(spec.name),
            owner=caller.name,
            owner_uid=caller.uid,
            spec_json=to_json(spec).decode(),
            directory=str(directory),
            steps=spec.planned_steps,
            priority=spec.resources.priority,
        )
        runs.set_labels(ctx.store, row.name, spec.tags, "")
        runs.set_fields(ctx.store, row.name, queue_group=spec.resources.group)
        for warning in warnings:
            events.append(ctx.store, row.name, "warning", {"message": warning})
        return runs.get(ctx.store, row.name)
