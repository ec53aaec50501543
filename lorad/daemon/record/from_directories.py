"""Make rows from directories of runs and the gateway's table, where the daemon's journal is incomplete."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from lorad.bounds import SPEC_BODY_BYTES
from lorad.box.paths import RunDir
from lorad.daemon.process.processes import attempts_under, is_locked, read_status
from lorad.daemon.runs.take_in import end_of, last_facts
from lorad.daemon.storage.prune import REMOVED
from lorad.errors import IntegrityError
from lorad.files import read_file
from lorad.protocol.journal import read
from lorad.states import EndReason, RunState
from lorad.store.db import Row
from lorad.store.rebuild import Tables

_Fact = dict[str, Any]
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, IntegrityError)
_IMPORTED = "imported from "


def add_unknown(tables: Tables, runs_root: Path) -> Iterator[str]:
    """Add runs that only their directories know, except removed ones. Yields a sentence about each."""
    gone = {event["run"] for event in tables.rows["events"].values() if event["kind"] == "removed"}
    for directory in sorted(runs_root.iterdir()) if runs_root.is_dir() else []:
        name = directory.name
        is_known = (name,) in tables.rows["runs"] or name in gone or name.startswith((REMOVED, "."))
        if is_known or not (directory / "journal.jsonl").exists():
            continue
        try:
            row = row_of(directory) | _as_it_went(directory)
            attempts = list(_attempts_of(RunDir(directory)))
        except _UNREADABLE as error:
            yield f"{directory} is not taken over, as it cannot be read: {error!r}"
            continue
        tables.put("runs", row)
        for attempt in attempts:
            tables.put("attempts", {"run": name, **attempt})
        yield f"run {name} is as its directory describes it"


def add_attempts(tables: Tables) -> Iterator[str]:
    """Add what the attempt directories of known runs contain. Yields a sentence about each failure."""
    for (name,), run in tables.rows["runs"].items():
        try:
            for row in _attempts_of(RunDir(Path(run["directory"]))):
                recorded = tables.rows["attempts"].get((name, row["attempt"]), {})
                tables.put("attempts", {"run": name, **row} | recorded)
        except _UNREADABLE as error:
            yield f"the attempts of run {name} cannot be read: {error!r}"


def row_of(directory: Path) -> Row:
    """Make a run's row as it was when the run was made, with its newest attempt."""
    run = RunDir(directory)
    numbers = [int(attempt.root.name) for attempt in attempts_under(directory)]
    newest = run.attempt(max(numbers, default=0)).spec
    written = newest if newest.exists() else run.spec
    spec = json.loads(read_file(written, SPEC_BODY_BYTES) if directory.is_dir() else b"{}")
    lora = spec.get("lora") or {}
    # the weights that a fork began with lie in its directory, wherever that was when the spec was written
    if Path(lora.get("adapter_path") or "").parts[-2:] == run.origin.parts[-2:]:
        lora["adapter_path"] = str(run.origin)
    forked_from = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        manifest = json.loads(read_file(run.origin / "manifest.json", SPEC_BODY_BYTES))
        forked_from = f"{manifest['run']}@{manifest['version']}"
    about = directory.stat() if directory.is_dir() else None
    began = [record for record, _ in read(run.journal) if record.kind == "attempt"]
    # the directory belongs to a shared daemon, the journal to the user
    uid = (run.journal.lstat() if run.journal.exists() else about).st_uid if about else 0
    return {
        "name": directory.name,
        "owner": str(uid),
        "owner_uid": uid,
        "state": RunState.QUEUED.value,
        "reason": None,
        "detail": "",
        "spec": msgspec.json.encode(spec | {"name": directory.name}).decode(),
        "directory": str(directory),
        "priority": spec.get("resources", {}).get("priority", 0),
        "steps": began[-1].data["steps"] if began else spec.get("trainer", {}).get("steps", 0),
        "attempt": max([*numbers, *(record.attempt for record in began)], default=0),
        "origin": forked_from,
        "pool": began[-1].data["pool"] if began else None,
        "wanted": None,
        "resume_step": None,
        "started_at": began[0].at if began else None,
        "ended_at": None,
        "created_at": about.st_mtime if about else time.time(),
    }


def _as_it_went(directory: Path) -> Row:
    """Conclude the state of a run from its journal; one that died without a word is paused."""
    journal = RunDir(directory).journal
    records = [record for record, _ in read(journal)]
    if not any(record.kind == "attempt" for record in records):
        attestations = [record.data["attestation"] for record in records if record.kind == "version"]
        if not attestations or not attestations[-1].startswith(_IMPORTED):
            return {"state": RunState.PAUSED.value}
        source = attestations[-1].removeprefix(_IMPORTED).partition(": ")[0]
        ended = {"state": RunState.ENDED.value, "ended_at": records[-1].at}
        reason = EndReason.IMPORTED.value
        return ended | {"reason": reason, "detail": _IMPORTED + source, "origin": source, "steps": 0}
    newest = records[-1].attempt
    if is_locked(RunDir(directory).attempt(newest)):
        return {"state": RunState.RUNNING.value}
    end = end_of(last_facts(journal, newest))
    if end is None:
        return {"state": RunState.PAUSED.value}
    reason = end.reason if end.reason in EndReason.__members__.values() else "failed"
    ended = {"state": RunState.ENDED.value, "ended_at": records[-1].at}
    return ended | {"created_at": records[0].at, "reason": reason, "detail": end.detail}


def _attempts_of(directory: RunDir) -> Iterator[Row]:
    for attempt in attempts_under(directory.root):
        number = int(attempt.root.name)
        status = read_status(attempt) or {}
        if not attempt.command.exists():
            continue
        end = end_of(last_facts(directory.journal, number))
        times = (record.at for record, _ in read(directory.journal) if record.attempt == number)
        yield {
            "attempt": number,
            "started_at": next(times, attempt.command.stat().st_mtime),
            "reason": end.reason if end else None,
            **{key: status.get(key) for key in ("ended_at", "exit_code", "signal")},
        }


def add_served(tables: Tables, table: Path) -> None:
    """Add aliases and pins that the gateway knows, where the journal does not say otherwise."""
    try:
        served = json.loads(table.read_bytes())
    except (OSError, ValueError):
        return
    aliased = set()
    for alias, version in served.get("aliases", {}).items():
        run, _, number = version.rpartition("@")
        if (run,) in tables.rows["runs"]:
            aliased.add(version)
            owner = tables.rows["runs"][(run,)]["owner_uid"]
            row = {"alias": alias, "run": run, "version": int(number), "updated_at": table.stat().st_mtime}
            recorded = tables.rows["aliases"].get((alias,), {})
            tables.put("aliases", row | {"owner_uid": owner} | recorded)
    for about in served.get("versions", {}).values():
        if f"{about['run']}@{about['version']}" not in aliased:
            tables.put("versions", {"run": about["run"], "version": about["version"], "pinned": 1})
