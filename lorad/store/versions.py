"""Versions of adapters, of which only pins and the like change, and the results of evaluating them.

A result belongs to a version by the digest of its tensors.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import structs

from lorad.bounds import RESULTS
from lorad.errors import NotFound
from lorad.records.measured import Result
from lorad.store import events
from lorad.store.db import Rows, Store, insert_row, update_rows
from lorad.store.rows import VersionRow

_RESULT = ", ".join(f'"{name}"' for name in Result.__struct_fields__)
_MOST_RESULTS = 1000  # rows that are read at once

_SELECT = """
SELECT v.run, v.version, v.attempt, v.step, v.created_at, v.sha256, v.parent, v.rank, v.alpha, v.bytes,
  v.attested, v.attestation, v.pinned, v.lineage, r.owner_uid, r.directory || '/' || v.path AS path,
  (SELECT json_group_array(alias) FROM aliases a WHERE a.run = v.run AND a.version = v.version) AS aliases
FROM versions v JOIN runs r ON r.name = v.run
"""


def versions(store: Rows, run: str | None = None) -> list[VersionRow]:
    """List the versions of one run or of all, in order of run and number."""
    which, values = ("", ()) if run is None else ("WHERE v.run = ? ", (run,))
    return _select(store, which + "ORDER BY v.run, v.version", values)


def _select(store: Rows, which: str, parameters: Sequence[Any] = ()) -> list[VersionRow]:
    versions = []
    for row in store.rows(_SELECT + which, parameters):
        truths = {key: bool(row[key]) for key in ("pinned", "lineage")}
        aliases = msgspec.json.decode(row["aliases"], type=list[str])
        versions.append(VersionRow(**row | truths | {"aliases": aliases}))
    return versions


def get_version(store: Rows, run: str, number: int) -> VersionRow:
    """Read a version. Raises NotFound."""
    if rows := _select(store, "WHERE v.run = ? AND v.version = ?", (run, number)):
        return rows[0]
    raise NotFound(f"no version {run}@{number}", hint=f"`lorad adapters {run}` shows what there is.")


def of_step(store: Rows, run: str, step: int) -> VersionRow:
    """Read the newest version that a step of the surviving lineage made.

    Raises NotFound, which names the nearest steps that made one.
    """
    which = "WHERE v.run = ? AND v.lineage = 1 AND v.step {} ? ORDER BY v.step {}, v.version DESC LIMIT 1"
    if rows := _select(store, which.format("=", "ASC"), (run, step)):
        return rows[0]
    before = _select(store, which.format("<", "DESC"), (run, step))
    after = _select(store, which.format(">", "ASC"), (run, step))
    near = " and ".join(f"{run}@step:{row.step}" for row in (*before, *after))
    hint = f"There is {near}." if near else f"`lorad adapters {run}` shows what there is."
    raise NotFound(f"no step {step} of run {run} made a version", hint=hint)


def exists(store: Rows, run: str, number: int) -> bool:
    return store.row("SELECT 1 FROM versions WHERE run = ? AND version = ?", (run, number)) is not None


def numbers(store: Rows) -> set[tuple[str, int]]:
    """List run and number of every version."""
    return {*store.tuples("SELECT run, version FROM versions")}


def is_anything_served(store: Rows) -> bool:
    """Check whether there is an alias, a pinned version, or a run that serves."""
    sql = """
    SELECT 1 FROM aliases UNION ALL SELECT 1 FROM versions WHERE pinned = 1
    UNION ALL SELECT 1 FROM runs WHERE serving = 1 LIMIT 1
    """
    return store.row(sql) is not None


def held_versions(store: Rows) -> list[VersionRow]:
    """List all versions that are pinned or aliased: pinned ones first, the oldest first."""
    in_use = "SELECT run, version FROM versions WHERE pinned = 1 UNION SELECT run, version FROM aliases"
    order = "ORDER BY v.pinned DESC, v.created_at, v.run, v.version"
    return _select(store, f"WHERE (v.run, v.version) IN ({in_use}) {order}")


def named_by_users(store: Rows) -> set[str]:
    """List the versions that users rely on without pin or alias, as `run@number` or as directories.

    Runs were forked or imported from them, specs name them, or they were exported.
    """
    sql = """
    SELECT origin AS named FROM runs WHERE origin IS NOT NULL
    UNION SELECT json_extract(spec, '$.algorithm.kl.reference') FROM runs
    UNION SELECT json_extract(spec, '$.lora.adapter_path') FROM runs
    UNION SELECT run || '@' || json_extract(data, '$.version') FROM events WHERE kind = 'exported'
    """
    return {row["named"] for row in store.rows(sql)}


def set_pinned(store: Store, run: str, number: int, pinned: bool, *, by: str) -> VersionRow:
    """Pin or unpin a version, with an event where that changes anything. Raises NotFound."""
    with store.write() as connection:
        if get_version(store, run, number).pinned != pinned:
            update_rows(connection, "versions", {"pinned": pinned}, run=run, version=number)
            events.add(connection, run, "pin" if pinned else "unpin", {"version": number, "by": by})
        return get_version(store, run, number)


def first_number(store: Rows, run: str) -> int:
    """Choose a number above all that versions of this name ever had, also those of a removed run."""
    kinds = "('version', 'removed', 'renamed')"
    sql = f"SELECT max(json_extract(data, '$.version')) FROM events WHERE run = ? AND kind IN {kinds}"
    ((newest,),) = store.tuples(sql, (run,))
    return 0 if newest is None else int(newest) + 1


# -- results -----------------------------------------------------------------------------------------------
def add_result(store: Store, result: Result) -> Result:
    """Keep the result of evaluating a version, with the time, and drop all but its newest RESULTS."""
    result = structs.replace(result, at=time.time())
    row = structs.asdict(result)
    row |= {key: msgspec.json.encode(row[key]).decode() for key in ("settings", "metrics")}
    own = (result.run, result.version)
    with store.write() as connection:
        insert_row(connection, "results", row)
        newest = "SELECT id FROM results WHERE run = ? AND version = ? ORDER BY id DESC LIMIT ?"
        old = f"DELETE FROM results WHERE run = ? AND version = ? AND id NOT IN ({newest})"
        connection.execute(old, (*own, *own, RESULTS))
    return result


def results(store: Rows, run: str | None = None) -> list[Result]:
    """List the newest results that fit into an answer, the newest last.

    run: only results of tensors that this run has as versions, under whatever name its owner evaluated them.
    """
    owner = "(SELECT owner_uid FROM runs WHERE name = ?)"  # what is older than a run is of a namesake
    same = "sha256 IN (SELECT sha256 FROM versions WHERE run = ?)"
    its = f"SELECT 1 FROM runs r WHERE r.name = run AND r.owner_uid = {owner} AND at >= r.created_at"
    which = "" if run is None else f"WHERE {same} AND EXISTS ({its})"
    values = () if run is None else (run, run)
    size = "length(data) + length(settings) + length(metrics)"
    rows = store.page(f"SELECT id, {_RESULT} FROM results {which}", values, size=size, limit=_MOST_RESULTS)
    results = []
    for row in rows:
        decoded = {key: msgspec.json.decode(row[key]) for key in ("settings", "metrics")}
        results.append(Result(**{key: row[key] for key in Result.__struct_fields__} | decoded))
    return results
