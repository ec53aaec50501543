"""Give a run another name.

What has happened under the old name counts for the new one: events, bill, results. What the run itself wrote,
its journal and its samples, keeps the name that it had then.
"""

import re

from msgspec.structs import replace

from lorad.errors import Conflict, SpecError
from lorad.spec.errors import NAME_HINT
from lorad.spec.model import to_json
from lorad.spec.numbers import NAME
from lorad.spec.text import from_json
from lorad.states import RunState
from lorad.store import events, runs
from lorad.store.db import Row, Rows, Store
from lorad.store.record import Renamed

_WHOLE = ("attempts", "steps", "evals", "versions", "checkpoints", "journal_offsets")  # those of a run alone
_IN_PART = {  # rows of a removed run may have the same name
    "events": "id >= :first_event",
    "uses": "gone = 0",
    "results": "at >= :created_at",
    "alias_moves": "at >= :created_at",
    "forecasts": "at >= :created_at",
}
# versions of the run by their old names
_NAMED = "IN (SELECT :old || '@' || version FROM versions WHERE run = :new)"
_REFERENCE = "json_extract(spec, '$.algorithm.kl.reference')"
_ADAPTER = "json_extract(spec, '$.lora.adapter_path')"
_MENTIONS = (
    f"UPDATE runs SET origin = :new || substr(origin, length(:old) + 1) WHERE origin {_NAMED}",
    "UPDATE runs SET spec = json_set(spec, '$.algorithm.kl.reference', "
    f":new || substr({_REFERENCE}, length(:old) + 1)) WHERE {_REFERENCE} {_NAMED}",
    f"UPDATE runs SET spec = json_set(spec, '$.lora.adapter_path', "
    f":to || substr({_ADAPTER}, length(:from) + 1)) "
    f"WHERE substr({_ADAPTER}, 1, length(:from) + 1) = :from || '/'",
    "UPDATE runs SET preempted = :new WHERE preempted = :old",
)


def is_of(renamed: Renamed, table: str, row: Row) -> bool:
    """Whether a row with the old name belongs to the renamed run and not to a removed one, see `_IN_PART`."""
    match table:
        case "events":
            return bool(row["id"] >= renamed.first_event)
        case "uses":
            return not row.get("gone")
        case "results" | "alias_moves" | "forecasts":
            return bool(row["at"] >= renamed.created_at)
    return True


def rename(store: Store, old: str, new: str, *, directory: str, by: str) -> None:
    """Give a run another name in all rows, also in those that mention its versions or files.

    directory: where the run's files will be. `runs.set_fields` later says so in the run's own row.

    Raises NotFound; Conflict while it works or one of its versions is served or pinned, where it belongs to
    a sweep, or where another run has or had the new name.
    """
    with store.write() as connection:
        run = runs.get(store, old)
        if not (RunState(run.state).is_over or run.state == RunState.QUEUED):
            raise Conflict(f"run {old} is {run.state}", hint=f"`lorad pause {old}` first.")
        if run.sweep is not None:
            hint = f"The sweep finds it by its name; `lorad tag {old} WORD` marks it."
            raise Conflict(f"run {old} is of sweep {run.sweep}", hint=hint)
        runs.refuse_held(store, old)
        refuse_name(store, old, new)
        ((newest,),) = store.tuples("SELECT max(version) FROM versions WHERE run = ?", (old,))
        values = {
            "old": old,
            "new": new,
            "first_event": events.first_id(store, old),
            "created_at": run.created_at,
            "from": run.directory,
            "to": directory,
            "spec": to_json(replace(from_json(run.spec.encode()), name=new)).decode(),
        }
        connection.execute("PRAGMA defer_foreign_keys = ON")
        connection.execute("UPDATE runs SET name = :new, spec = :spec WHERE name = :old", values)
        for table in _WHOLE:
            connection.execute(f"UPDATE {table} SET run = :new WHERE run = :old", values)
        connection.execute("DELETE FROM step_tokens WHERE run = :old", values)  # those of steps went along
        for table, which in _IN_PART.items():
            connection.execute(f"UPDATE {table} SET run = :new WHERE run = :old AND {which}", values)
        for statement in _MENTIONS:
            connection.execute(statement, values)
        about = {"to": new, "by": by, "attempt": run.attempt, "version": newest}
        events.add(connection, old, "renamed", about)
        events.add(connection, new, "renamed", {"from": old, "by": by})


def refuse_name(store: Rows, old: str, new: str) -> None:
    """Raise SpecError where `new` is no name of a run, Conflict where another run has or had that name."""
    if not re.fullmatch(NAME, new):
        raise SpecError(f"{new!r} is no name for a run", hint=NAME_HINT)
    if new == old:
        raise Conflict(f"run {old} has that name already")
    if (existing := runs.name_in_use(store, new)) not in (None, old):
        like = "" if existing == new else " in other capitals, and capitals alone do not tell runs apart"
        raise Conflict(f"there is a run named {new}{like}", hint="Choose another name, or remove that run.")
    sql = (
        "SELECT kind FROM events WHERE run = ? AND (kind = 'removed' OR kind = 'renamed' "
        "AND json_type(data, '$.to') IS NOT NULL) ORDER BY id DESC LIMIT 1"
    )
    how = (store.row(sql, (new,)) or {}).get("kind")  # the last run of this name lost it, if one did
    if how == "removed" or (how == "renamed" and events.present_name(store, new) != old):
        raise Conflict(
            f"another run was named {new}, and numbers of its versions are not used again",
            hint="Choose another name.",
        )
