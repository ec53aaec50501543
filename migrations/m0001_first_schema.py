"""Runs and what their journals say, pools with their leases, aliases, sweeps, and the events of all of them.

Times are Unix seconds. `lineage` is 1 while a fact counts and 0 after a rewind. `seq` is that of the journal
record. `owner_uid` is the user id of whoever made the row.

Attributes:
    runs.base: The model of its spec, kept because a list of runs shows it and a spec is long to parse.
    runs.sweep: The sweep that started the run.
    runs.origin: `run@version` that the run was forked from, or the directory that it was imported from.
    runs.serving: 1 keeps a pool of the run's base up, though no run works there.
    runs.preempted: The run of higher priority that this one makes room for.
    runs.restart_at: When a run that the daemon queued again may be placed; NULL while it waits for no
        automatic restart.
    runs.signals: JSON of what a dashboard shows of a run without reading its steps, see `Signals` in
        `lorad/client/shapes.py`; what is not known is left out.
    runs.recent: JSON of the mean rewards of the last steps, newest last.
    attempts.detail: Why the attempt ended, as text.
    journal_offsets.told_seq, told_crc: While a journal is read again, the last record that was read before;
        0 otherwise.
"""

from sqlite_utils import Database

RUNS = """
CREATE TABLE runs (
  name TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  owner_uid INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('queued', 'starting', 'running', 'stopping', 'paused', 'ended')),
  reason TEXT,
  detail TEXT NOT NULL DEFAULT '',
  waiting TEXT NOT NULL DEFAULT '',
  wanted TEXT CHECK (wanted IN ('pause', 'stop', 'kill')),
  spec TEXT NOT NULL CHECK (json_valid(spec)),
  base TEXT NOT NULL AS (coalesce(json_extract(spec, '$.model.path'), '')) STORED,
  directory TEXT NOT NULL,
  priority INTEGER NOT NULL,
  pool TEXT,
  attempt INTEGER NOT NULL DEFAULT 0,
  resume_step INTEGER,
  step INTEGER NOT NULL DEFAULT 0,
  steps INTEGER NOT NULL,
  reward REAL,
  eval_first REAL,
  eval_last REAL,
  version INTEGER,
  tokens_per_second REAL,
  step_seconds REAL,
  created_at REAL NOT NULL,
  started_at REAL,
  ended_at REAL,
  first_event INTEGER NOT NULL DEFAULT 0,
  sweep TEXT,
  origin TEXT,
  serving INTEGER NOT NULL DEFAULT 0,
  preempted TEXT,
  restart_at REAL,
  signals TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(signals)),
  recent TEXT NOT NULL DEFAULT '[]' CHECK (json_valid(recent)),
  CHECK ((state = 'ended') = (reason IS NOT NULL))
) STRICT
"""

ATTEMPTS = """
CREATE TABLE attempts (
  run TEXT NOT NULL REFERENCES runs (name) ON DELETE CASCADE,
  attempt INTEGER NOT NULL,
  resumed_from INTEGER,
  started_at REAL NOT NULL,
  ended_at REAL,
  exit_code INTEGER,
  signal INTEGER,
  reason TEXT,
  detail TEXT NOT NULL DEFAULT '',
  PRIMARY KEY (run, attempt)
) STRICT, WITHOUT ROWID
"""

STEPS = """
CREATE TABLE steps (
  run TEXT NOT NULL REFERENCES runs (name) ON DELETE CASCADE,
  attempt INTEGER NOT NULL,
  step INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  at REAL NOT NULL,
  version INTEGER NOT NULL,
  samples TEXT NOT NULL,
  samples_sha256 TEXT NOT NULL,
  metrics TEXT NOT NULL CHECK (json_valid(metrics)),
  lineage INTEGER NOT NULL DEFAULT 1,
  PRIMARY KEY (run, attempt, step)
) STRICT
"""

EVALS = """
CREATE TABLE evals (
  run TEXT NOT NULL REFERENCES runs (name) ON DELETE CASCADE,
  attempt INTEGER NOT NULL,
  step INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  at REAL NOT NULL,
  version INTEGER NOT NULL,
  score REAL,
  problems INTEGER NOT NULL,
  failed INTEGER NOT NULL,
  lineage INTEGER NOT NULL DEFAULT 1,
  PRIMARY KEY (run, attempt, step)
) STRICT
"""

VERSIONS = """
CREATE TABLE versions (
  run TEXT NOT NULL REFERENCES runs (name) ON DELETE CASCADE,
  version INTEGER NOT NULL,
  attempt INTEGER NOT NULL,
  step INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  created_at REAL NOT NULL,
  sha256 TEXT NOT NULL,
  parent INTEGER,
  path TEXT NOT NULL,
  rank INTEGER NOT NULL,
  alpha REAL NOT NULL,
  bytes INTEGER NOT NULL,
  attested TEXT NOT NULL,
  attestation TEXT NOT NULL,
  pinned INTEGER NOT NULL DEFAULT 0,
  lineage INTEGER NOT NULL DEFAULT 1,
  PRIMARY KEY (run, version)
) STRICT
"""

CHECKPOINTS = """
CREATE TABLE checkpoints (
  run TEXT NOT NULL REFERENCES runs (name) ON DELETE CASCADE,
  attempt INTEGER NOT NULL,
  step INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  created_at REAL NOT NULL,
  version INTEGER NOT NULL,
  path TEXT NOT NULL,
  bytes INTEGER NOT NULL,
  deleted_at REAL,
  lineage INTEGER NOT NULL DEFAULT 1,
  PRIMARY KEY (run, attempt, step)
) STRICT
"""

JOURNAL_OFFSETS = """
CREATE TABLE journal_offsets (
  run TEXT PRIMARY KEY REFERENCES runs (name) ON DELETE CASCADE,
  start INTEGER NOT NULL,
  "offset" INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  crc INTEGER NOT NULL,
  told_seq INTEGER NOT NULL DEFAULT 0,
  told_crc INTEGER NOT NULL DEFAULT 0
) STRICT
"""

ALIASES = """
CREATE TABLE aliases (
  alias TEXT PRIMARY KEY,
  run TEXT NOT NULL,
  version INTEGER NOT NULL,
  updated_at REAL NOT NULL,
  owner_uid INTEGER NOT NULL,
  FOREIGN KEY (run, version) REFERENCES versions (run, version) ON DELETE RESTRICT
) STRICT
"""

ALIAS_MOVES = """
CREATE TABLE alias_moves (
  id INTEGER PRIMARY KEY,
  alias TEXT NOT NULL,
  run TEXT NOT NULL,
  version INTEGER NOT NULL,
  at REAL NOT NULL,
  "by" TEXT NOT NULL
) STRICT
"""

SWEEPS = """
CREATE TABLE sweeps (
  sweep TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  owner_uid INTEGER NOT NULL,
  created_at REAL NOT NULL,
  grid TEXT NOT NULL CHECK (json_valid(grid)),
  halving TEXT CHECK (halving IS NULL OR json_valid(halving)),
  rungs TEXT NOT NULL DEFAULT '[]' CHECK (json_valid(rungs))
) STRICT
"""

POOLS = """
CREATE TABLE pools (
  pool TEXT PRIMARY KEY,
  state TEXT NOT NULL,
  model TEXT NOT NULL,
  mode TEXT NOT NULL,
  device TEXT NOT NULL,
  pid INTEGER,
  attempt INTEGER NOT NULL DEFAULT 0,
  "key" TEXT NOT NULL DEFAULT '',
  detail TEXT NOT NULL DEFAULT '',
  created_at REAL NOT NULL,
  idle_since REAL
) STRICT
"""

LEASES = """
CREATE TABLE leases (
  device TEXT NOT NULL,
  pool TEXT NOT NULL REFERENCES pools (pool) ON DELETE CASCADE,
  why TEXT NOT NULL,
  taken_at REAL NOT NULL,
  PRIMARY KEY (device, pool)
) STRICT, WITHOUT ROWID
"""

EVENTS = """
CREATE TABLE events (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  at REAL NOT NULL,
  run TEXT,
  kind TEXT NOT NULL,
  data TEXT NOT NULL CHECK (json_valid(data))
) STRICT
"""

INDEXES = (
    "CREATE INDEX runs_by_age ON runs (created_at)",
    "CREATE INDEX runs_by_end ON runs (ended_at)",
    "CREATE INDEX runs_by_state ON runs (state, priority)",
    "CREATE INDEX runs_by_owner ON runs (owner_uid, state)",
    "CREATE INDEX runs_by_sweep ON runs (sweep) WHERE sweep IS NOT NULL",
    "CREATE INDEX runs_that_serve ON runs (name) WHERE serving = 1",
    "CREATE INDEX steps_that_count ON steps (run, step) WHERE lineage = 1",
    "CREATE INDEX evals_that_count ON evals (run, step) WHERE lineage = 1",
    "CREATE INDEX versions_that_are_pinned ON versions (run, version) WHERE pinned = 1",
    "CREATE INDEX aliases_by_version ON aliases (run, version)",
    "CREATE INDEX alias_moves_by_alias ON alias_moves (alias, id)",
    "CREATE INDEX leases_by_pool ON leases (pool)",
    "CREATE INDEX events_by_run ON events (run, id)",
    "CREATE INDEX warnings_by_run ON events (run, id) WHERE kind = 'warning'",
    "CREATE INDEX exports ON events (run) WHERE kind = 'exported'",
)

TRIGGERS = (
    "CREATE TRIGGER events_never_change BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events never "
    "change'); END",
    "CREATE TRIGGER events_never_go BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events never go'); "
    "END",
)

TABLES = (
    *(RUNS, ATTEMPTS, STEPS, EVALS, VERSIONS, CHECKPOINTS, JOURNAL_OFFSETS),
    *(ALIASES, ALIAS_MOVES, SWEEPS, POOLS, LEASES, EVENTS),
)


def apply(db: Database) -> None:
    for statement in (*TABLES, *INDEXES, *TRIGGERS):
        db.conn.execute(statement)
