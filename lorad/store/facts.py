"""The rows that each kind of journal record makes, see `lorad.protocol.journal`.

A journal may belong to another user than the daemon: records that no driver of lorad writes are refused, and
long ones are cut.
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
from lorad.store.db import Row, Rows, put_row, update_rows

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
# an older lorad lacks them
_OPTIONAL: Row = {**dict.fromkeys(("nll", "accuracy", "token_accuracy")), "samples": "", "samples_sha256": ""}
_WORDS = ("sha256", "samples_sha256", "attested", "attestation", "reason", "score", "alpha", *_OPTIONAL)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")
_MOST_STEPS = 10**12
_MOST_ATTEMPTS = 10**6
_MOST = 2**53
_LATEST = 4.0e9  # Unix seconds
_AGES = {"versions": "created_at", "checkpoints": "created_at"}  # where a table keeps the record's `at`
_OF_ALL = ("attempt", "step", "seq")  # columns that all these tables have
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
TABLES = tuple(table for table, _ in _COLUMNS.values())
_OF_FACTS = {column for _, columns in _COLUMNS.values() for column in columns}
_KNOWN = {"metrics", "sets", "message", "reason", "detail", "hint", "to", "resumed_from", *_OF_FACTS}
_TOO_MUCH = f"of a record of more than {EVENT_BYTES} bytes, only what lorad knows is kept"
_LEFT_OUT = (
    f"of the metrics of a step, only {METRICS} are kept, the first by name: numbers whose names have at most "
    f"{METRIC_NAME} characters"
)


def _mistake(record: Record) -> str:
    """Say what no driver of lorad would write in a record; "" when nothing is wrong.

    Paths lie directly in a directory of the run, and numbers are small enough for names of files and rows.
    """
    for name, most in (("step", _MOST_STEPS), ("attempt", _MOST_ATTEMPTS), ("seq", _MOST)):
        if not 0 <= (number := getattr(record, name)) <= most:
            return f"its {name} is {number}"
    if not (math.isfinite(record.at) and 0 <= record.at <= _LATEST):
        return f"its time is {record.at}"
    if record.kind in _PATHS:
        key, directory = _PATHS[record.kind]
        is_nothing = record.kind in ("eval", "step") and record.data.get(key) == ""  # nothing was sampled
        if key in record.data and not is_nothing:
            path = record.data[key]
            parent, _, name = path.partition("/") if isinstance(path, str) else ("", "", "")
            if parent != directory or not _NAME.fullmatch(name):
                return f"{key} {str(path)[:200]!r} is not in {directory}/"
    if wrong := next((key for key in _WORDS if isinstance(record.data.get(key), dict | list)), ""):
        return f"{wrong} is {str(record.data[wrong])[:80]!r}"
    for key in _NUMBERS:
        value = record.data.get(key)
        if value is not None and not (isinstance(value, int) and -1 <= value <= _MOST):
            return f"{key} is {str(value)[:80]!r}"
    return ""


def put(connection: sqlite3.Connection, run: str, record: Record) -> None:
    """Make the index say what the record says. A kind without rows of its own changes nothing.

    Raises IntegrityError for what no driver of lorad writes.
    """
    if wrong := _mistake(record):
        raise IntegrityError(
            f"record {record.seq} of the journal of run {run}: {wrong}",
            hint="No driver of lorad writes that: somebody else did. Nothing of it was taken in.",
        )
    if record.kind in _COLUMNS:
        table, columns = _COLUMNS[record.kind]
        data = _OPTIONAL | record.data
        row: Row = {"run": run, "lineage": 1, **{key: getattr(record, key) for key in _OF_ALL}}
        row |= {_AGES.get(table, "at"): record.at} | {column: data[column] for column in columns}
        if table == "steps":
            row["metrics"] = msgspec.json.encode(record.data["metrics"]).decode()
        if table == "evals":
            row["sets"] = msgspec.json.encode(_sets_of(record.data)).decode()
        put_row(connection, table, row)
    elif record.kind == "rewind":
        for table in TABLES:
            sql = f"UPDATE {table} SET lineage = 0 WHERE run = ? AND step > ? AND lineage = 1"
            connection.execute(sql, (run, record.data["to"]))
    elif record.kind == "attempt":
        values = (run, record.attempt, record.data["resumed_from"], record.at)
        sql = "INSERT OR IGNORE INTO attempts (run, attempt, resumed_from, started_at) VALUES (?, ?, ?, ?)"
        connection.execute(sql, values)
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


def summarize(store: Rows, connection: sqlite3.Connection, run: str) -> None:
    """Write the run's newest figures into its row, from the facts that count."""
    where = "WHERE run = ? AND lineage = 1 ORDER BY step"
    last = store.row(f"SELECT step, at, metrics FROM steps {where} DESC, attempt DESC LIMIT 1", (run,))
    first_eval = store.row(f"SELECT {_SCORE}, nll FROM evals {where}, attempt LIMIT 1", (run,)) or {}
    sql = f"SELECT {_SCORE}, nll, accuracy, token_accuracy FROM evals {where} DESC, attempt DESC LIMIT 1"
    last_eval = store.row(sql, (run,)) or {}
    sql = "SELECT version, attested FROM versions WHERE run = ? AND lineage = 1 ORDER BY version DESC LIMIT 1"
    current = store.row(sql, (run,))
    reward = "round(json_extract(metrics, '$.reward'), 6)"
    sql = f"SELECT {reward} FROM steps WHERE run = ? AND lineage = 1 ORDER BY step DESC LIMIT ?"
    recent = [reward for (reward,) in store.tuples(sql, (run, RECENT))][::-1]  # the newest last
    metrics = msgspec.json.decode(last["metrics"]) if last else {}
    columns = {
        "step": last["step"] if last else 0,
        "reward": metrics.get("reward"),
        "tokens_per_second": metrics.get("tokens_per_second"),
        "step_seconds": metrics.get("seconds"),
        "eval_first": first_eval.get("score"),
        "eval_last": last_eval.get("score"),
        "nll_first": first_eval.get("nll"),
        "nll_last": last_eval.get("nll"),
        "accuracy_last": last_eval.get("accuracy"),
        "token_accuracy_last": last_eval.get("token_accuracy"),
        "version": current and current["version"],
        "signals": _signals(store, run, last, metrics, current),
        "recent": msgspec.json.encode(recent).decode(),
    }
    update_rows(connection, "runs", columns, name=run)


def _signals(store: Rows, run: str, last: Row | None, metrics: Row, current: Row | None) -> str:
    """Collect what may need attention: figures of the last step, and how the current version was attested.

    Returns JSON text of `lorad.records.runs.Signals`.
    """
    signals: Row = {key: metrics[key] for key in _SIGNALS if metrics.get(key) is not None}
    if not metrics.get("updates"):  # a critic that warms up may be as bad as it likes
        signals.pop("explained_variance", None)
    if unsound := sorted(key for key, value in metrics.items() if value is None):  # JSON has no NaN
        signals["not_finite"] = unsound[:_MOST_NAMES]
    sql = (
        "SELECT json_extract(spec, '$.data.prompts_per_step') AS groups, json_extract(signals, '$.begun') "
        "AS begun FROM runs WHERE name = ?"
    )
    (row,) = store.rows(sql, (run,))
    if (flat := metrics.get("zero_variance_groups")) is not None and row["groups"]:
        signals["zero_variance"] = flat / row["groups"]
    if "response_length" not in metrics and (loss := metrics.get("loss")) is not None:
        signals["loss"] = loss
    if (shift := metrics.get("chosen_shift")) is not None:
        signals["chosen_fall"] = -shift
    if last:
        signals["at"] = last["at"]
    if current:
        signals["attested"] = current["attested"]
    if row["begun"] is not None:
        signals["begun"] = row["begun"]
    return msgspec.json.encode(signals).decode()


def _sets_of(data: Row) -> dict[str, SetScore]:
    """Return the sets of an evaluation, no more than a spec may have; none where they cannot be read."""
    try:
        sets = msgspec.convert(data.get("sets", {}), dict[str, SetScore])
    except msgspec.ValidationError:
        return {}
    sound = [name for name, s in sets.items() if len(name) <= METRIC_NAME and len(s.passed) <= _SETS]
    return {name: sets[name] for name in sound[:_SETS]}


def bounded(record: Record) -> tuple[Record, str]:
    """Shorten a record to what is ingested. Also returns a sentence on what was left out; "" for nothing."""
    data = {
        key: value[:TEXT] + "…" if isinstance(value, str) and len(value) > TEXT else value
        for key, value in record.data.items()
    }
    left_out = ""
    if record.kind == "step" and "metrics" in data:
        metrics = record.data["metrics"]
        sound = {}
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            if isinstance(value, int) and not isinstance(value, bool):
                is_number = abs(value) < 2**63
            else:  # None stands for a number that is not finite, which JSON does not have
                is_number = value is None or (isinstance(value, float) and math.isfinite(value))
            if is_number and len(name) <= METRIC_NAME:
                sound[name] = value
        first = {name: sound[name] for name in sorted(sound)[:METRICS]} if len(sound) > METRICS else sound
        data["metrics"] = first
        left_out = _LEFT_OUT if not isinstance(metrics, dict) or len(first) < len(metrics) else ""
    if record.kind == "eval" and "sets" in data:
        data["sets"] = msgspec.to_builtins(_sets_of(data))
    if len(msgspec.json.encode({**data, "prompts": None})) > EVENT_BYTES:
        data = {key: value for key, value in data.items() if key in _KNOWN}
        left_out = _TOO_MUCH
    return msgspec.structs.replace(record, data=data), left_out
