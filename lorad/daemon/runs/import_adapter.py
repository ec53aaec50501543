"""Import adapters: a PEFT directory becomes a version of a run that never trained, once a pool serves it.

Everything is prepared in a directory of its own. Nothing else is touched before the version is loaded and
attested, so that an adapter that is refused leaves nothing behind.
"""

import asyncio
import contextlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from lorad.adapters.adapter import Adapter, AdapterConfig, Outline
from lorad.adapters.directory import TEMPORARY, discard, write_directory
from lorad.adapters.peft import CONFIG, read_peft, write_peft
from lorad.adapters.readers import refuse_interleaved
from lorad.adapters.validate import refuse_unfit, validate
from lorad.backends.setup import lora_of, served_experts, targets_of
from lorad.bounds import CONFIG_BYTES
from lorad.box.paths import RunDir
from lorad.daemon.context import Context, Request
from lorad.daemon.pool import Pool
from lorad.daemon.pools.as_owner import on_behalf
from lorad.daemon.process.as_user import as_user
from lorad.daemon.process.processes import write_json
from lorad.daemon.process.user_files import make_run, refuse_strange_journal
from lorad.daemon.process.users import Caller
from lorad.daemon.runs.bases import base_in
from lorad.daemon.runs.create import create, make_directory, refuse_used
from lorad.daemon.runs.versions import believed_pools
from lorad.errors import AdapterRefused, Conflict
from lorad.files import fsync, read_file
from lorad.models.directory import weight_files
from lorad.models.facts import read_facts
from lorad.models.families import FUSED
from lorad.protocol.calls import Attestation
from lorad.protocol.journal import JournalWriter, VersionFact
from lorad.spec.model import Spec, to_json
from lorad.states import EndReason, Move, RunState
from lorad.store import aliases, runs
from lorad.store.ingest import ingest
from lorad.store.rows import RunRow, VersionRow
from lorad.store.versions import first_number, get_version, versions


@dataclass(frozen=True)
class Import:
    """An adapter that is to be served as `name`.

    number: the number of the version.
    staged: a directory like a run's.
    files: the directory of the version, below `staged` unless it is known.
    known: a run of this name has the version already.
    """

    name: str
    owner_uid: int
    source: Path
    spec: Spec
    request: Request
    sha256: str
    bytes: int
    number: int
    staged: Path
    files: Path
    known: bool

    def row(self) -> RunRow:
        """Make the row that the run would have, by which a pool is chosen."""
        return RunRow(
            name=self.name,
            owner_uid=self.owner_uid,
            state=RunState.ENDED,
            reason=EndReason.IMPORTED,
            spec=to_json(self.spec).decode(),
            directory=str(self.staged),
        )

    def version(self) -> VersionRow:
        """Make the row that the version would have, by which a pool loads it."""
        path = str(self.files)
        owner = self.owner_uid
        return VersionRow(run=self.name, version=self.number, path=path, sha256=self.sha256, owner_uid=owner)


def refuse_taken(ctx: Context, name: str, model: str) -> None:
    """Raise SpecError for what is no name, and Conflict where the name means something else already."""
    aliases.check_name(name)
    if (alias := aliases.find(ctx.store, name)) and alias.run != name:
        swap = f"move it with `lorad swap {name}` after serving this one under another"
        hint = f"Choose another name, or {swap}."
        raise Conflict(f"alias {name} serves {alias.run}@{alias.version}", hint=hint)
    run = runs.find(ctx.store, name)
    if run is None:
        return
    other = "Choose another name for the adapter."
    if run.reason != EndReason.IMPORTED:
        hint = f"{other} `lorad swap` serves its versions."
        raise Conflict(f"{name} is a run that trains or has trained", hint=hint)
    if (other_model := msgspec.json.decode(run.spec)["model"]["path"]) != model:
        hint = f"{other} `lorad rm {name}` removes the one that is there."
        raise Conflict(f"{name} is an adapter of {other_model}, not of {model}", hint=hint)


def read(source: Path, outline: Outline, spec: Spec, model_path: Path) -> tuple[Adapter, Spec]:
    """Read the adapter, and make the spec of a run that would train one like it. It takes a while.

    Raises AdapterRefused unless it is whole, finite and made for this base; one that does not fit is not
    read.
    """
    if outline.config.dora and spec.rollout.backend != "builtin":
        problem = f"{source}: {spec.rollout.backend} has no place for the magnitudes of DoRA"
        raise AdapterRefused(problem, hint="Serve it with rollout.backend=builtin, or merged into its base.")
    facts = read_facts(model_path)
    experts = served_experts(spec.rollout.backend, facts)
    shapes = targets_of(spec.trainer.backend, facts.linears, experts)
    refuse_interleaved(outline, facts.model_type, FUSED)
    refuse_unfit(outline, shapes)
    adapter = read_peft(source, weight_files(model_path))
    validate(adapter, shapes)
    return adapter, replace(spec, lora=lora_of(spec.lora, adapter.config, shapes))


async def stage(ctx: Context, uid: int, spec: Spec, request: Request, adapter: Adapter) -> Import:
    """Write the files of a version with this adapter, unless the run of its name has the same one already.

    Raises Conflict when the files of a run that the database does not know lie where its own should, and
    StorageError.
    """
    name = str(spec.name)
    sha256 = await asyncio.to_thread(adapter.digest)
    if not runs.exists(ctx.store, name):
        refuse_used(ctx, spec)
    same_tensors = [row for row in versions(ctx.store, name) if row.sha256 == sha256]
    same = await on_behalf(ctx, uid, _alike, same_tensors, adapter.config)
    if same:
        number = same[-1].version
    else:  # one that no engine has ever seen with this name, not even of an import that was refused just now
        loaded = [
            version for pool in believed_pools(ctx, uid) if pool.status for version in pool.status.loaded
        ]
        seen = [text.removeprefix(f"{name}@") for text in loaded if text.startswith(f"{name}@")]
        seen += [path.name for path in RunDir(ctx.runs_root / name).versions.glob("[0-9]*")]
        number = max([first_number(ctx.store, name), *(1 + int(text) for text in seen)])
    staged = ctx.runs_root / f"{TEMPORARY}{name}-{uuid.uuid4().hex[:12]}"
    files = Path(same[-1].path) if same else RunDir(staged).version(number)
    source = Path(request.source)
    adapter_import = Import(
        name, uid, source, spec, request, sha256, adapter.bytes, number, staged, files, known=bool(same)
    )
    try:
        staged.mkdir(mode=0o700)
        make_run(RunDir(staged), ctx.user(uid))
        write_json(staged / "request.json", msgspec.to_builtins(request))
        if not adapter_import.known:
            model = spec.model.path
            facts = {"run": name, "version": number, "step": 0, "parent": None}
            facts |= {"sha256": sha256, "model": model}
            write = partial(write_peft, adapter, base_model=model)
            await on_behalf(ctx, uid, write_directory, files, write, facts)
    except BaseException:
        discard(staged)
        raise
    return adapter_import


def _alike(versions: Sequence[VersionRow], config: AdapterConfig) -> list[VersionRow]:
    """Keep the versions whose files are present, with the scale of `config`: a digest is of tensors alone."""
    alike = []
    for version in versions:
        with contextlib.suppress(OSError, ValueError, KeyError):
            settings = json.loads(read_file(Path(version.path) / CONFIG, CONFIG_BYTES, links=False))
            meaning = float(settings["lora_alpha"]), bool(settings["use_rslora"])
            if meaning == (config.alpha, config.rslora):
                alike.append(version)
    return alike


def settle(
    ctx: Context, adapter_import: Import, attestation: Attestation, caller: Caller, pool: Pool
) -> VersionRow:
    """Move the files to where they stay, record the version, which is served from now on, and return its row.

    Raises Conflict where something is in their place. Never awaits.
    """
    name = adapter_import.name
    spec = adapter_import.spec
    is_new = not runs.exists(ctx.store, name)
    directory = make_directory(ctx, spec, "", replace(adapter_import.request, bases=base_in(pool)))
    if is_new:
        with ctx.store.write():
            create(ctx, spec, directory, caller, warnings=[])
            detail = f"imported from {adapter_import.source}"
            runs.move(ctx.store, name, Move.END, reason=EndReason.IMPORTED, detail=detail, by=caller.name)
            runs.set_fields(ctx.store, name, steps=0)
    if not adapter_import.known:
        run = runs.get(ctx.store, name)
        final = run.dir.version(adapter_import.number)
        if final.exists():
            hint = "Serve it again: it gets another number."
            raise Conflict(f"{final} exists already and is never replaced", hint=hint)
        user = ctx.user(run.owner_uid)
        make_run(run.dir, user)
        final.parent.mkdir(exist_ok=True)
        adapter_import.files.rename(final)
        fsync(final.parent)
        fact = VersionFact(
            version=adapter_import.number,
            sha256=adapter_import.sha256,
            parent=run.version,
            path=str(final.relative_to(run.dir.root)),
            rank=spec.lora.rank,
            alpha=spec.lora.alpha,
            bytes=adapter_import.bytes,
            attested=attestation.verdict,
            attestation=f"imported from {adapter_import.source}: {attestation.detail}",
            delivered_sha256=attestation.delivered_sha256,
        )
        refuse_strange_journal(run.dir, user)
        with as_user(user), JournalWriter(run.dir.journal, name, run.attempt) as journal:
            journal.append("version", 0, fact)
        ingest(ctx.store, name, run.dir.journal)
    columns = {"spec": to_json(spec).decode(), "origin": str(adapter_import.source), "pool": pool.id}
    runs.set_fields(ctx.store, name, **columns, serving=1)
    return get_version(ctx.store, name, adapter_import.number)
