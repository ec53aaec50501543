"""The rows that each kind of journal record makes, see `lorad.protocol.journal`.

What no driver of lorad writes is refused: the journal may belong to another user than the daemon. What is too
much is cut.
"""

import math
import re
import sqlite3
from typing import Any

import msgspec

from lorad.bounds import EVENT_BYTES, METRIC_NAME, METRICS, TEXT
from lorad.errors import IntegrityError
from lorad.protocol.evals import SetScore
from lorad.protocol.journal import Record
from lorad.store.db import Row, Rows

_PATHS = {
    "version": ("path", "versions"),
    "checkpoint": ("path", "checkpoints"),
    "step": ("samples", "samples"),
    "eval": ("samples", "evals"),
}
_NUMBERS = (
    *("version", "parent", "rank", "bytes", "problems", "failed", "position", "consumed"),
    *("to", "resumed_from"),
)
_OPTIONAL = {
    "nll": None,
    "accuracy": None,
    "token_accuracy": None,
    "samples": "",
    "samples_sha256": "",
}  # an older lorad lacks them
_WORDS = ("sha256", "samples_sha256", "attested", "attestation", "reason", "score", "alpha", *_OPTIONAL)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")
_MOST_STEPS, _MOST_ATTEMPTS, _MOST = 10**12, 10**6, 2**53
_LATEST = 4.0e9  # Unix seconds
_AGES = {"versions": "created_at", "checkpoints": "created_at"}  # where a table keeps the record's `at`
_COLUMNS = {
    "step": ("steps", ("version", "samples", "samples_sha256")),
    "eval": ("evals", ("version", "score", "problems", "failed", *_OPTIONAL)),
    "version": (
        "versions",
        ("version", "sha256", "parent", "path", "rank", "alpha", "bytes", "attested", "attestation"),
    ),
    "checkpoint": ("checkpoints", ("version", "path", "bytes")),
}
_SIGNALS = (
    *("kl", "entropy", "truncated", "logprob_difference", "explained_variance"),
    *("failed_rewards", "failed_rewards_total", "skipped_updates", "skipped_updates_total"),
    *("idle_steps_total", "pair_accuracy", "reward_margin", "on_request"),
)
RECENT = 24  # steps
# without problems of data.eval, the first set stands for them
_SCORE = (
    "CASE WHEN problems THEN score ELSE (SELECT json_extract(value, '$.score') FROM json_each(sets) LIMIT 1) "
    "END AS score"
)
_SETS = 32  # of an evaluation, and figures of each
_MOST_NAMES = 8  # metrics that are listed by name
_TABLES = tuple(table for table, _ in _COLUMNS.values())
_OF_FACTS = {column for _, columns in _COLUMNS.values() for column in columns}
_KNOWN = {"metrics", "sets", "message", "reason", "detail", "hint", "to", "resumed_from", *_OF_FACTS}
_TOO_MUCH = f"of a record of more than {EVENT_BYTES} bytes, only what lorad knows is kept"
_LEFT_OUT = (
    f"of the metrics of a step, only {METRICS} are kept, the first by name: numbers whose names have at most "
    f"{METRIC_NAME} characters"
)


def _refuse_strange(run: str, record: Record) -> None:
    """Paths lie in the run's own directories, one step below; numbers are such as files and rows are named
    by.

    Raises IntegrityError, which names the record.
    """
    if wrong := strange(record):
        raise IntegrityError(
            f"record {record.seq} of the journal of run {run}: {wrong}",
            hint="No driver of lorad writes that: somebody else did. Nothing of it was taken in.",
        )


def strange(record: Record) -> str:
    """Say what is wrong with a record; "" when nothing is."""
    places = (
        ("step", record.step, _MOST_STEPS),
        ("attempt", record.attempt, _MOST_ATTEMPTS),
        ("seq", record.seq, _MOST),
    )
    for name, number, most in places:
        if not 0 <= number <= most:
            return f"its {name} is {number}"
    if not (math.isfinite(record.at) and 0 <= record.at <= _LATEST):
        return f"its time is {record.at}"
    if record.kind in _PATHS:
        key, directory = _PATHS[record.kind]
        is_nothing = record.kind in ("eval", "step") and record.data.get(key) == ""  # nothing was sampled
        if key in record.data and not is_nothing and not _is_below(record.data[key], directory):
            return f"{key} {str(record.data[key])[:200]!r} is not in {directory}/"
    if wrong := next((key for key in _WORDS if isinstance(record.data.get(key), dict | list)), ""):
        return f"{wrong} is {str(record.data[wrong])[:80]!r}"
    return next(
        (f"{key} is {str(record.data[key])[:80]!r}" for key in _NUMBERS if not _fits(record.data.get(key))),
        "",
    )


def _is_below(path: Any, directory: str) -> bool:
    if not isinstance(path, str):
        return False
    parent, _, name = path.partition("/")
    return parent == directory and _NAME.fullmatch(name) is not None


def _fits(number: Any) -> bool:
    return number is None or (isinstance(number, int) and -1 <= number <= _MOST)


def put(connection: sqlite3.Connection, run: str, record: Record) -> None:
    """Make the index say what the record says. A kind without rows of its own changes nothing.

    Raises IntegrityError for what no driver of lorad writes.
    """
    _refuse_strange(run, record)
    if record.kind in _COLUMNS:
        _put_fact(connection, run, record)
    elif record.kind == "rewind":
        for table in _TABLES:
            sql = f"UPDATE {table} SET lineage = 0 WHERE run = ? AND step > ? AND lineage = 1"
            connection.execute(sql, (run, record.data["to"]))
    elif record.kind == "attempt":
        values = (run, record.attempt, record.data["resumed_from"], record.at)
        connection.execute(
            "INSERT OR IGNORE INTO attempts (run, attempt, resumed_from, started_at) VALUES (?, ?, ?, ?)",
            values,
        )
        begun = "signals = json_set(signals, '$.begun', ?)"
        sql = f"UPDATE runs SET attempt = max(attempt, ?), {begun} WHERE name = ?"
        connection.execute(sql, (record.attempt, record.at, run))
    elif record.kind == "end":
        connection.execute(
            "UPDATE attempts SET ended_at = coalesce(ended_at, ?), reason = coalesce(reason, ?) "
            "WHERE run = ? AND attempt = ?",
            (record.at, record.data["reason"], run, record.attempt),
        )


def event_data(record: Record) -> dict[str, Any]:
    """Make the data of a record's event: everything in the record except the ids of the prompts."""
    data = {key: value for key, value in record.data.items() if key != "prompts"}
    return {"attempt": record.attempt, "step": record.step} | data


def doubt(connection: sqlite3.Connection, run: str) -> None:
    """Mark all rows of a run as perhaps not in its journal; `put` clears the mark."""
    for table in _TABLES:
        connection.execute(f"UPDATE {table} SET seq = -seq, lineage = 0 WHERE run = ? AND seq > 0", (run,))


def forget_doubted(connection: sqlite3.Connection, run: str) -> None:
    """Drop the rows that still bear the mark.

    Versions stay, as facts that do not count: an alias may name them.
    """
    for table in _TABLES:
        if table != "versions":
            connection.execute(f"DELETE FROM {table} WHERE run = ? AND seq < 0", (run,))


def summarize(store: Rows, connection: sqlite3.Connection, run: str) -> None:
    """Step, reward, version, evaluations, rates, signals and recent rewards of a run, from the facts that
    count.
    """
    where = "WHERE run = ? AND lineage = 1 ORDER BY step"
    last = store.row(f"SELECT step, at, metrics FROM steps {where} DESC, attempt DESC LIMIT 1", (run,))
    score = _SCORE
    first_eval = store.row(f"SELECT {score}, nll FROM evals {where}, attempt LIMIT 1", (run,))
    last_eval = store.row(
        f"SELECT {score}, nll, accuracy, token_accuracy FROM evals {where} DESC, attempt DESC LIMIT 1",
        (run,),
    )
    sql = "SELECT version, attested FROM versions WHERE run = ? AND lineage = 1 ORDER BY version DESC LIMIT 1"
    current = store.row(sql, (run,))
    metrics = msgspec.json.decode(last["metrics"]) if last else {}
    connection.execute(
        "UPDATE runs SET step = ?, reward = ?, tokens_per_second = ?, step_seconds = ?, eval_first = ?, "
        "eval_last = ?, nll_first = ?, nll_last = ?, accuracy_last = ?, token_accuracy_last = ?, "
        "version = ?, signals = ?, recent = ? WHERE name = ?",
        (
            last["step"] if last else 0,
            *(metrics.get(key) for key in ("reward", "tokens_per_second", "seconds")),
            first_eval and first_eval["score"],
            last_eval and last_eval["score"],
            first_eval and first_eval["nll"],
            last_eval and last_eval["nll"],
            last_eval and last_eval["accuracy"],
            last_eval and last_eval["token_accuracy"],
            current and current["version"],
            _signals(store, run, last, metrics, current),
            _recent(store, run),
            run,
        ),
    )


def _signals(store: Rows, run: str, last: Row | None, metrics: Row, current: Row | None) -> str:
    """Collect what may need attention: in the last step's metrics, and whether the current version was
    attested.
    """
    found: Row = {key: metrics[key] for key in _SIGNALS if metrics.get(key) is not None}
    if not metrics.get("updates"):  # a critic that warms up may be as bad as it likes
        found.pop("explained_variance", None)
    if unsound := sorted(key for key, value in metrics.items() if value is None):  # JSON has no NaN
        found["not_finite"] = unsound[:_MOST_NAMES]
    sql = (
        "SELECT json_extract(spec, '$.data.prompts_per_step') AS groups, json_extract(signals, '$.begun') "
        "AS begun FROM runs WHERE name = ?"
    )
    (row,) = store.rows(sql, (run,))
    if (flat := metrics.get("zero_variance_groups")) is not None and row["groups"]:
        found["zero_variance"] = flat / row["groups"]
    if "response_length" not in metrics and (loss := metrics.get("loss")) is not None:
        found["loss"] = loss
    if (shift := metrics.get("chosen_shift")) is not None:
        found["chosen_fall"] = -shift
    if last:
        found["at"] = last["at"]
    if current:
        found["attested"] = current["attested"]
    if row["begun"] is not None:
        found["begun"] = row["begun"]
    return msgspec.json.encode(found).decode()


def _recent(store: Rows, run: str) -> str:
    """Mean rewards of the last steps, newest last."""
    sql = (
        "SELECT round(json_extract(metrics, '$.reward'), 6) AS reward FROM steps WHERE run = ? AND lineage "
        "= 1 ORDER BY step DESC LIMIT ?"
    )
    rewards = [row["reward"] for row in store.rows(sql, (run, RECENT))]
    return msgspec.json.encode(rewards[::-1]).decode()


def _put_fact(connection: sqlite3.Connection, run: str, record: Record) -> None:
    table, columns = _COLUMNS[record.kind]
    row: Row = {"run": run, "attempt": record.attempt, "step": record.step, "seq": record.seq, "lineage": 1}
    data = _OPTIONAL | record.data
    row |= {_AGES.get(table, "at"): record.at} | {column: data[column] for column in columns}
    if table == "steps":
        row["metrics"] = msgspec.json.encode(record.data["metrics"]).decode()
    if table == "evals":
        row["sets"] = msgspec.json.encode(_sets_of(record.data)).decode()
    names, values = ", ".join(row), ", ".join(f":{column}" for column in row)
    sets = ", ".join(f"{column} = excluded.{column}" for column in row)
    connection.execute(
        f"INSERT INTO {table} ({names}) VALUES ({values}) ON CONFLICT DO UPDATE SET {sets}", row
    )


def _sets_of(data: Row) -> dict[str, SetScore]:
    """Return the sets of an evaluation, no more than a spec may have; none where somebody else wrote what is
    no such thing.
    """
    try:
        found = msgspec.convert(data.get("sets", {}), dict[str, SetScore])
    except msgspec.ValidationError:
        return {}
    sound = [name for name, one in found.items() if len(name) <= METRIC_NAME and len(one.passed) <= _SETS]
    return {name: found[name] for name in sound[:_SETS]}


def bounded(record: Record) -> tuple[Record, str]:
    """Shorten a record to what is ingested. Also returns what was left out; "" for nothing."""
    data = {key: _cut(value) for key, value in record.data.items()}
    told = ""
    if record.kind == "step" and "metrics" in data:
        data["metrics"], told = _metrics(record)
    if record.kind == "eval" and "sets" in data:
        data["sets"] = msgspec.to_builtins(_sets_of(data))
    if len(msgspec.json.encode({**data, "prompts": None})) > EVENT_BYTES:
        data, told = {key: value for key, value in data.items() if key in _KNOWN}, _TOO_MUCH
    return msgspec.structs.replace(record, data=data), told


def _cut(value: Any) -> Any:
    return value[:TEXT] + "…" if isinstance(value, str) and len(value) > TEXT else value


def _metrics(record: Record) -> tuple[dict[str, Any], str]:
    """Null stands for a number that is not finite, as JSON has none."""
    metrics = record.data.get("metrics")
    if not isinstance(metrics, dict):
        return {}, _LEFT_OUT
    sound = {name: value for name, value in metrics.items() if len(name) <= METRIC_NAME and _is_number(value)}
    kept = {name: sound[name] for name in sorted(sound)[:METRICS]} if len(sound) > METRICS else sound
    return kept, _LEFT_OUT if len(kept) < len(metrics) else ""


def _is_number(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**63
    return value is None or (isinstance(value, float) and math.isfinite(value))


def is_told(connection: sqlite3.Connection, run: str, message: str) -> bool:
    """Check whether the run has an event with this warning."""
    sql = "SELECT 1 FROM events WHERE run = ? AND kind = 'warning' AND json_extract(data, '$.message') = ?"
    return connection.execute(sql, (run, message)).fetchone() is not None
