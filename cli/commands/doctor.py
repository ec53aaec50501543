"""lorad doctor: check this machine and this home."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lorad.backends.engine_install import Server
from lorad.box.config import load
from lorad.box.paths import SOCKET_PATH_LIMIT, Home, default_home
from lorad.box.tokens import tokens_trouble
from lorad.cli.doctor.database import database_checks, repair
from lorad.cli.doctor.engines import engine_checks, trainer_checks
from lorad.cli.doctor.logout import logout_check, own_name
from lorad.cli.doctor.orphans import ended_orphans, orphan_checks, orphan_in_words
from lorad.cli.doctor.runtime import runtime_checks
from lorad.cli.options import AsJson
from lorad.cli.output import print_json, printable, report, size
from lorad.client.client import Client
from lorad.errors import LoradError, NotAllowed

NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "fuse.sshfs", "beegfs")
MINIMUM_FREE = 2 << 30
WRITABLE = "Set LORAD_HOME to a directory that you may write."

Check = dict[str, Any]  # {name, ok, detail, hint, facts}


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
        raise NotAllowed(
            f"{home.root} belongs to user {home.shared_by}", hint="Its user, or root, repairs it."
        )
    if mend:
        show_repaired(repair(home) | {"orphans": ended_orphans(home)}, as_json)
        return
    checks = []
    asked = engine is not None or trainer is not None
    for found in of_backends(home, engine, trainer, probe) if asked else everything(home):
        checks.append(found)
        if not as_json:
            show(found)
    if as_json:
        print_json(checks)
    if not all(found["ok"] for found in checks):
        raise typer.Exit(1)


def show_repaired(done: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(done)
        return
    for word in done["told"]:
        report(f"note  {word}")
    counts = ", ".join(f"{count} {rows}" for rows, count in done["counts"].items() if count)
    report(f"{done['database']} is rebuilt: {counts or 'nothing was in it'}.")
    if done["kept"]:
        report(f"The old one is kept as {done['kept']}.")
    for orphan in done["orphans"]:
        report(f"Ended: {orphan_in_words(orphan)}.")
    report("`lorad daemon start` takes over what is running; runs continued meanwhile.")


def everything(home: Home) -> Iterator[Check]:
    gpus = _command("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader") or ""
    yield from machine(gpus)
    yield from home_checks(home)
    yield from config(home)
    yield from runtime(home, gpus)
    yield from daemon(home)
    if home.shared_by is None:  # else they are for its admins
        yield from (check(*found) for found in database_checks(home))
        yield from (check(*found) for found in orphan_checks(home))
    yield from logout(home)


def of_backends(home: Home, engine: str | None, trainer: str | None, probe: bool) -> Iterator[Check]:
    if trainer is not None:
        for found in trainer_checks(home, trainer):
            yield check(**found)
    if engine is not None:
        for found in engine_checks(home, engine, start=probe):
            yield check(**found)


def show(found: Check) -> None:
    report(f"{'ok  ' if found['ok'] else 'FAIL'}  {found['name']:<14} {found['detail']}")
    for line in found["hint"].splitlines():
        report(f"      {'':<14}{line}")


def check(name: str, ok: bool, detail: str, hint: str = "", facts: dict[str, Any] | None = None) -> Check:
    return {
        "name": name,
        "ok": ok,
        "detail": printable(detail),
        "hint": "" if ok else hint,
        "facts": facts or {},
    }


def machine(gpus: str) -> Iterator[Check]:
    version = platform.python_version()
    yield check("python", sys.version_info >= (3, 11), version, "lorad needs Python 3.11 to 3.13.")
    for package in ("torch", "transformers", "peft"):
        try:
            yield check(package, True, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield check(package, False, "not installed", f"pip install {package}")
    yield check("gpus", True, "; ".join(gpus.splitlines()) or "none: runs use the CPU")


def home_checks(home: Home) -> Iterator[Check]:
    try:
        existing = next(p for p in (home.root, *home.root.parents) if p.exists())
    except OSError as error:
        yield check("home", False, f"{home.root}: {error.strerror}", WRITABLE)
        return
    owner = home.shared_by if existing == home.root else None
    needed = os.W_OK | os.X_OK if owner is None else os.X_OK
    detail = str(home.root) if owner is None else f"{home.root}, shared by a daemon of user {owner}"
    yield check("home", existing.is_dir() and os.access(existing, needed), detail, WRITABLE)
    kind = _filesystem(existing)
    local = kind not in NETWORK_FILESYSTEMS
    hint = "Put LORAD_HOME on a local disk and bulk files elsewhere with `storage:` in config.yaml."
    yield check("filesystem", local, kind, hint)
    free = shutil.disk_usage(existing).free
    yield check("disk", free > MINIMUM_FREE, f"{size(free)} free", "Versions and checkpoints need space.")
    wanted = len(os.fsencode(home.root / "lorad.sock"))
    aside = (
        "" if wanted <= SOCKET_PATH_LIMIT else f" ({wanted} bytes are too many for a socket; side-stepped)"
    )
    yield check("socket", True, f"{home.socket}{aside}")


def config(home: Home) -> Iterator[Check]:
    if home.shared_by is not None:
        return
    try:
        settings = load(home.config)
    except LoradError as error:
        yield check("config", False, error.message, error.hint)
        return
    if trouble := tokens_trouble(settings.gateway):
        yield check(
            "gateway", False, trouble, "`lorad daemon status` shows it as well; no restart is needed."
        )


def runtime(home: Home, gpus: str) -> Iterator[Check]:
    for name, detail, facts in runtime_checks(home, "cuda:0" if gpus else "cpu"):
        yield check(name, True, detail, facts=facts)


def daemon(home: Home) -> Iterator[Check]:
    try:
        status = Client(home).status()
    except LoradError:
        yield check("daemon", True, "not running; `lorad run` starts it")
        return
    schema = status.database.schema
    yield check("daemon", True, f"pid {status.pid}, version {status.version}, schema {schema}")
    for trouble in status.troubles:
        yield check(
            "trouble", False, trouble, "The daemon tries again every few seconds; everything else continues."
        )


def logout(home: Home) -> Iterator[Check]:
    """Check what a logout would end: what is running now, or without a daemon what this shell would start."""
    pids = {"lorad": os.getpid()}
    try:
        pids = {"the daemon": Client(home).status().pid}
        pids |= {f"pool {pool.pool}": pool.pid for pool in Client(home).pools() if pool.pid}
    except LoradError:
        pass
    yield check("logout", **logout_check(own_name(), pids, uid=os.getuid()))


def _command(*argv: str) -> str | None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _filesystem(path: Path) -> str:
    """The type of the filesystem that holds a path."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, name, *_ = line.split()
        inside = str(path) == mount or str(path).startswith(mount.rstrip("/") + "/")
        if inside and len(mount) > len(best):
            best, kind = mount, name
    return kind
