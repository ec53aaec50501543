"""The command `lorad doctor`: checks this machine and this home."""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from lorad.box.config import load
from lorad.box.gpus import all_gpus, visible_gpus
from lorad.box.paths import SOCKET_PATH_LIMIT, Home, default_home
from lorad.box.tokens import tokens_trouble
from lorad.children.interpreter import InterpreterFinding
from lorad.cli.doctor.cluster import cluster_checks, ray_job_check
from lorad.cli.doctor.database import database_checks, end_orphans, orphan_checks, orphan_in_words, repair
from lorad.cli.doctor.engines import engine_checks, trainer_checks
from lorad.cli.doctor.logout import logout_check, own_name
from lorad.cli.doctor.runtime import runtime_checks
from lorad.cli.options import AsJson
from lorad.cli.output import print_json, printable, report, size
from lorad.client.client import Client
from lorad.errors import LoradError, NotAllowed, SpecError
from lorad.records.daemon import Orphan, Repaired
from lorad.servers.table import Server

_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "fuse.sshfs", "beegfs")
_MINIMUM_FREE = 2 << 30
_WRITABLE = "Set LORAD_HOME to a directory that you may write."


def doctor(
    engine: Annotated[
        Server | None,
        typer.Option(help="Check the installation of this server instead, and try it out on a tiny model."),
    ] = None,
    trainer: Annotated[
        Literal["fsdp", "megatron"] | None,
        typer.Option(help="Check the installation of this trainer instead."),
    ] = None,
    probe: Annotated[bool, typer.Option(help="With --engine: start the server (30 to 90 s).")] = True,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Try out the nodes of the cluster instead: a grant, each node.")
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            help="With --cluster: how many nodes; default: all of kind static, one of a Ray cluster.", min=1
        ),
    ] = None,
    mend: Annotated[
        bool,
        typer.Option(
            "--repair", help="Rebuild the database from the journals, keep the old one; end orphans."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what is fine and what is not, and what to do about it. Exit 1 when something must be mended."""
    home = Home(default_home())
    if mend and home.shared_by is not None:
        hint = "Its user, or root, repairs it."
        raise NotAllowed(f"{home.root} belongs to user {home.shared_by}", hint=hint)
    if mend:
        _show_repaired(repair(home), end_orphans(home), as_json)
        return
    checks: list[InterpreterFinding] = []
    findings = _everything(home)
    if engine is not None or trainer is not None:
        trainers = [] if trainer is None else trainer_checks(home, trainer)
        engines = [] if engine is None else engine_checks(home, engine, start=probe)
        findings = chain(trainers, engines)
    elif cluster:
        findings = cluster_checks(home, nodes)
    for finding in findings:
        hint = "" if finding.ok else finding.hint
        checks.append(msgspec.structs.replace(finding, detail=printable(finding.detail), hint=hint))
        if not as_json:
            report(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.name:<14} {finding.detail}")
            for line in hint.splitlines():
                report(f"      {'':<14}{line}")
    if as_json:
        print_json(checks)
    if not all(finding.ok for finding in checks):
        raise typer.Exit(1)


def _show_repaired(done: Repaired, ended: list[Orphan], as_json: bool) -> None:
    if as_json:
        print_json({**msgspec.to_builtins(done), "orphans": ended})
        return
    for word in done.told:
        report(f"note  {word}")
    counts = ", ".join(f"{count} {rows}" for rows, count in done.counts.items() if count)
    report(f"{done.database} is rebuilt: {counts or 'nothing was in it'}.")
    if done.kept:
        report(f"The old one is kept as {done.kept}.")
    for orphan in ended:
        report(f"Ended: {orphan_in_words(orphan)}.")
    report("`lorad daemon start` takes over what is running; runs continued meanwhile.")


def _everything(home: Home) -> Iterator[InterpreterFinding]:
    hint = "lorad needs Python 3.11 to 3.14."
    yield InterpreterFinding("python", sys.version_info >= (3, 11), platform.python_version(), hint)
    for package in ("torch", "transformers", "peft"):
        try:
            yield InterpreterFinding(package, True, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield InterpreterFinding(package, False, "not installed", f"pip install {package}")
    gpus = []  # that runs are placed on, as the daemon finds them
    try:
        gpus = visible_gpus()
    except SpecError as error:
        yield InterpreterFinding("gpus", False, error.message, error.hint)
    else:
        named = [f"{gpu.label}, {size(gpu.memory)}" for gpu in gpus] or ["none: runs use the CPU"]
        split = [gpu.number for gpu in all_gpus() if gpu.is_split]
        left = [f"not GPU {number}, which is split into slices (MIG)" for number in split]
        facts = {"uuids": [gpu.uuid for gpu in gpus]}
        yield InterpreterFinding("gpus", True, "; ".join(named + left), facts=facts)
    yield from _home_checks(home)
    yield from _config(home)
    yield from runtime_checks(home, "cuda:0" if gpus else "cpu")
    yield from _daemon(home)
    if home.shared_by is None:  # else they are for its admins
        yield from database_checks(home)
        yield from orphan_checks(home)
    # what a logout would end: what is running now, or without a daemon what this shell would start
    pids = {"lorad": os.getpid()}
    with contextlib.suppress(LoradError):
        pids = {"the daemon": Client(home).status().pid}
        pids |= {f"pool {pool.pool}": pool.pid for pool in Client(home).pools() if pool.pid}
    yield logout_check(own_name(), pids, uid=os.getuid())


def _home_checks(home: Home) -> Iterator[InterpreterFinding]:
    try:
        existing = next(p for p in (home.root, *home.root.parents) if p.exists())
    except OSError as error:
        yield InterpreterFinding("home", False, f"{home.root}: {error.strerror}", _WRITABLE)
        return
    owner = home.shared_by if existing == home.root else None
    needed = os.W_OK | os.X_OK if owner is None else os.X_OK
    detail = str(home.root) if owner is None else f"{home.root}, shared by a daemon of user {owner}"
    yield InterpreterFinding("home", existing.is_dir() and os.access(existing, needed), detail, _WRITABLE)
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [(mount, kind) for mount, kind in mounts if existing.is_relative_to(mount)]
    _, kind = max(holding, key=lambda mounted: len(mounted[0]), default=("", "unknown"))
    local = kind not in _NETWORK_FILESYSTEMS
    hint = "Put LORAD_HOME on a local disk and bulk files elsewhere with `storage:` in config.yaml."
    yield InterpreterFinding("filesystem", local, kind, hint)
    free = shutil.disk_usage(existing).free
    hint = "Versions and checkpoints need space."
    yield InterpreterFinding("disk", free > _MINIMUM_FREE, f"{size(free)} free", hint)
    length = len(os.fsencode(home.root / "lorad.sock"))
    aside = f" ({length} bytes are too many for a socket; side-stepped)"
    yield InterpreterFinding("socket", True, f"{home.socket}{aside * (length > SOCKET_PATH_LIMIT)}")


def _config(home: Home) -> Iterator[InterpreterFinding]:
    if home.shared_by is not None:
        return
    try:
        settings = load(home.config)
    except LoradError as error:
        yield InterpreterFinding("config", False, error.message, error.hint)
        return
    yield from ray_job_check(settings)
    if trouble := tokens_trouble(settings.gateway):
        hint = "`lorad daemon status` shows it as well; no restart is needed."
        yield InterpreterFinding("gateway", False, trouble, hint)


def _daemon(home: Home) -> Iterator[InterpreterFinding]:
    try:
        status = Client(home).status()
    except LoradError:
        yield InterpreterFinding("daemon", True, "not running; `lorad run` starts it")
        return
    schema = status.database.schema
    yield InterpreterFinding("daemon", True, f"pid {status.pid}, version {status.version}, schema {schema}")
    if (forecasts := status.forecasts).off is not None:
        off = f"off by {forecasts.off:.0%} of the wait (median)"
        detail = f"{forecasts.count} of the last {forecasts.days} days, {off}"
        yield InterpreterFinding("forecasts", True, detail)
    hint = "The daemon tries again every few seconds; everything else continues."
    yield from (InterpreterFinding("trouble", False, trouble, hint) for trouble in status.troubles)
