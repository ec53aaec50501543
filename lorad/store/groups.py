"""Groups of queued runs, each of one owner, and how many runs of a group may work at a time."""

from lorad.states import ACTIVE
from lorad.store.db import Rows, Store, put_row
from lorad.store.rows import GroupRow


def set_limit(store: Store, owner_uid: int, name: str, runs: int | None) -> None:
    """Let at most `runs` runs of a group work at a time; None is no limit."""
    with store.write() as connection:
        if runs is None:
            connection.execute("DELETE FROM queue_groups WHERE owner_uid = ? AND name = ?", (owner_uid, name))
            return
        put_row(connection, "queue_groups", {"owner_uid": owner_uid, "name": name, "runs": runs})


def limit_of(store: Rows, owner_uid: int, name: str) -> int | None:
    """Find how many runs of the group may work; None is no limit."""
    row = store.row("SELECT runs FROM queue_groups WHERE owner_uid = ? AND name = ?", (owner_uid, name))
    return None if row is None else row["runs"]


def groups(store: Rows) -> list[GroupRow]:
    """List the groups that have a limit, or a run that is not over, by owner and name."""
    marks = ", ".join(f"'{state}'" for state in ACTIVE)
    sql = f"""
    WITH named AS (
      SELECT owner_uid, name FROM queue_groups
      UNION SELECT owner_uid, queue_group FROM runs
      WHERE queue_group IS NOT NULL AND (state = 'queued' OR state IN ({marks}))
    )
    SELECT n.owner_uid, n.name, g.runs AS "limit", coalesce(sum(r.state IN ({marks})), 0) AS working,
    coalesce(sum(r.state = 'queued'), 0) AS queued
    FROM named n LEFT JOIN queue_groups g ON g.owner_uid = n.owner_uid AND g.name = n.name
    LEFT JOIN runs r ON r.owner_uid = n.owner_uid AND r.queue_group = n.name
    GROUP BY n.owner_uid, n.name ORDER BY n.owner_uid, n.name
    """
    return [GroupRow(**row) for row in store.rows(sql)]
