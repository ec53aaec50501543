"""Runs with what their journals say, pools with their leases, aliases, sweeps, the bill, and events of all.

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
    runs.nll_first, nll_last: `evals.nll` of the first and the last evaluation.
    runs.tags: A JSON array of the words that its user wrote on it.
    runs.queue_group: `resources.group` of the spec.
    runs.yielded: Why the run is stopped and queued again, where that is for no other run; NULL otherwise.
    attempts.detail: Why the attempt ended, as text.
    evals.nll, accuracy, token_accuracy: See `EvalFact` in `lorad/protocol/journal.py`.
    evals.sets: JSON of the figures of the further sets, by name.
    journal_offsets.told_seq, told_crc: While a journal is read again, the last record that was read before;
        0 otherwise.
    leases.node: The node that has the device; empty for this machine.
    events: An event may get another name of its run, where the run is renamed; nothing else ever changes.
    events.kind: `renamed` is on the name that the run had, with `to`, and its newest attempt and version, so
        that a later run of that name uses none of their numbers again; on the name that it has since, with
        `from`.
    results: The figures of versions that were evaluated by hand.
    results.sha256: The digest of the version's tensors; its run and number are those that were asked for.
    results.suite: What it was evaluated on: `data` for rows, `lm_eval` or `inspect` for a suite.
    results.settings: JSON of reward, sampling and the like.
    results.metrics: JSON of figures by name.
    lives: One life of a pool: its devices, and how many there are.
    lives.ended_at: When its process ended, and all that it wrote is taken in; NULL until then.
    uses: See `Use` in `lorad/protocol/status.py`; owner and sweep are those of the run. They stay when the
        run is removed.
    uses.life: The life of a pool; for tokens of a removed run `removed:` and the number of its first event,
        which no pool has for a life.
    uses.sampled: Tokens that the steps of a removed run sampled; for other runs `step_tokens` has them.
    uses.gone: 1 when the run was removed; then `wasted` says whether a later attempt threw it away, which is
        otherwise seen from the other rows.
    step_tokens: Sums over the steps of an attempt, which triggers keep up to date; lineage as in `steps`.
    step_tokens.trained: Tokens with a loss, once for each pass.
    queue_groups.runs: How many runs of the group may work at a time; NULL is no limit.
    reservations.device: The UUID of a GPU, or the name of a slot of the CPU.
    reservations.seconds: How long it lasts from its beginning; NULL: until `until`, or until it is released.
    reservations.until: When it ends; NULL until it has begun, or until it is released.
    reservations.began_at: When the device was free; NULL while lorad still works there.
    reservations.urgent: 1 asks the runs there to stop at their next step.
    forecasts.at: When it was said, the first time that it was known after the run was queued.
    forecasts.starts_at, after: When the run was to start, and which run was to end before.
    forecasts.started_at: When the run did start; NULL while it waits.
    forecasts.void: 1 when the run left the queue otherwise.
    nodes.cluster: `static`, or the address of a Ray cluster.
    nodes.uid: The user whose processes its agents are.
    nodes.devices: JSON, the names of those that it had when it was granted last.
    nodes.bases: JSON, the directories of base models that were loaded there, the newest last.
    nodes.state: `granted`, `free`, or `lost`.
    grants: What a cluster granted a life of a pool: an index of the `grant.json` of each.
    grants.state: `asked`, `granted`, `refused`, `lost`, or `over`.
    grants.nodes: JSON, the names of the nodes.
    grants.external: What the cluster calls it: the name of a Ray placement group.
"""

from sqlite_utils import Database

# an empty line stands between two tables
_TABLES = """
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
  nll_first REAL,
  nll_last REAL,
  accuracy_last REAL,
  token_accuracy_last REAL,
  tags TEXT NOT NULL DEFAULT '[]',
  note TEXT NOT NULL DEFAULT '',
  queue_group TEXT,
  yielded TEXT,
  CHECK ((state = 'ended') = (reason IS NOT NULL))
) STRICT

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
  nll REAL,
  accuracy REAL,
  sets TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(sets)),
  samples TEXT NOT NULL DEFAULT '',
  samples_sha256 TEXT NOT NULL DEFAULT '',
  token_accuracy REAL,
  PRIMARY KEY (run, attempt, step)
) STRICT

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

CREATE TABLE journal_offsets (
  run TEXT PRIMARY KEY REFERENCES runs (name) ON DELETE CASCADE,
  start INTEGER NOT NULL,
  "offset" INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  crc INTEGER NOT NULL,
  told_seq INTEGER NOT NULL DEFAULT 0,
  told_crc INTEGER NOT NULL DEFAULT 0
) STRICT

CREATE TABLE aliases (
  alias TEXT PRIMARY KEY,
  run TEXT NOT NULL,
  version INTEGER NOT NULL,
  updated_at REAL NOT NULL,
  owner_uid INTEGER NOT NULL,
  FOREIGN KEY (run, version) REFERENCES versions (run, version) ON DELETE RESTRICT
) STRICT

CREATE TABLE alias_moves (
  id INTEGER PRIMARY KEY,
  alias TEXT NOT NULL,
  run TEXT NOT NULL,
  version INTEGER NOT NULL,
  at REAL NOT NULL,
  "by" TEXT NOT NULL
) STRICT

CREATE TABLE sweeps (
  sweep TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  owner_uid INTEGER NOT NULL,
  created_at REAL NOT NULL,
  grid TEXT NOT NULL CHECK (json_valid(grid)),
  halving TEXT CHECK (halving IS NULL OR json_valid(halving)),
  rungs TEXT NOT NULL DEFAULT '[]' CHECK (json_valid(rungs))
) STRICT

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

CREATE TABLE leases (
  device TEXT NOT NULL,
  pool TEXT NOT NULL REFERENCES pools (pool) ON DELETE CASCADE,
  why TEXT NOT NULL,
  taken_at REAL NOT NULL,
  node TEXT NOT NULL DEFAULT '',
  PRIMARY KEY (device, pool)
) STRICT, WITHOUT ROWID

CREATE TABLE events (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  at REAL NOT NULL,
  run TEXT,
  kind TEXT NOT NULL,
  data TEXT NOT NULL CHECK (json_valid(data))
) STRICT

CREATE TABLE results (
  id INTEGER PRIMARY KEY,
  sha256 TEXT NOT NULL,
  run TEXT NOT NULL,
  version INTEGER NOT NULL,
  at REAL NOT NULL,
  "by" TEXT NOT NULL,
  suite TEXT NOT NULL,
  data TEXT NOT NULL,
  settings TEXT NOT NULL CHECK (json_valid(settings)),
  metrics TEXT NOT NULL CHECK (json_valid(metrics)),
  problems INTEGER NOT NULL,
  failed INTEGER NOT NULL
) STRICT

CREATE TABLE lives (
  life TEXT PRIMARY KEY,
  pool TEXT NOT NULL,
  owner TEXT NOT NULL,
  owner_uid INTEGER NOT NULL,
  device TEXT NOT NULL,
  devices INTEGER NOT NULL,
  started_at REAL NOT NULL,
  ended_at REAL
) STRICT

CREATE TABLE uses (
  life TEXT NOT NULL,
  entry INTEGER NOT NULL,
  hour INTEGER NOT NULL,
  run TEXT NOT NULL,
  attempt INTEGER NOT NULL,
  step INTEGER NOT NULL,
  alias TEXT NOT NULL,
  owner TEXT NOT NULL,
  owner_uid INTEGER NOT NULL,
  sweep TEXT NOT NULL DEFAULT '',
  held REAL NOT NULL DEFAULT 0,
  busy REAL NOT NULL DEFAULT 0,
  generated INTEGER NOT NULL DEFAULT 0,
  trained INTEGER NOT NULL DEFAULT 0,
  served INTEGER NOT NULL DEFAULT 0,
  prompts INTEGER NOT NULL DEFAULT 0,
  cached INTEGER NOT NULL DEFAULT 0,
  sampled INTEGER NOT NULL DEFAULT 0,
  joules REAL,
  memory INTEGER NOT NULL DEFAULT 0,
  gone INTEGER NOT NULL DEFAULT 0,
  wasted INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (life, entry)
) STRICT

CREATE TABLE step_tokens (
  run TEXT NOT NULL REFERENCES runs (name) ON DELETE CASCADE,
  attempt INTEGER NOT NULL,
  hour INTEGER NOT NULL,
  lineage INTEGER NOT NULL,
  sampled INTEGER NOT NULL,
  trained INTEGER NOT NULL,
  PRIMARY KEY (run, attempt, hour, lineage)
) STRICT, WITHOUT ROWID

CREATE TABLE queue_groups (
  owner_uid INTEGER NOT NULL,
  name TEXT NOT NULL,
  runs INTEGER,
  PRIMARY KEY (owner_uid, name)
) STRICT

CREATE TABLE reservations (
  device TEXT PRIMARY KEY,
  owner TEXT NOT NULL,
  owner_uid INTEGER NOT NULL,
  why TEXT NOT NULL,
  made_at REAL NOT NULL,
  seconds REAL,
  until REAL,
  began_at REAL,
  urgent INTEGER NOT NULL
) STRICT

CREATE TABLE forecasts (
  id INTEGER PRIMARY KEY,
  run TEXT NOT NULL,
  at REAL NOT NULL,
  starts_at REAL NOT NULL,
  after TEXT NOT NULL DEFAULT '',
  started_at REAL,
  void INTEGER NOT NULL DEFAULT 0
) STRICT

CREATE TABLE nodes (
  node TEXT PRIMARY KEY,
  cluster TEXT NOT NULL,
  address TEXT NOT NULL,
  boot_id TEXT NOT NULL,
  uid INTEGER NOT NULL,
  devices TEXT NOT NULL,
  bases TEXT NOT NULL,
  seen_at REAL NOT NULL,
  state TEXT NOT NULL
) STRICT

CREATE TABLE grants (
  pool TEXT NOT NULL,
  life INTEGER NOT NULL,
  kind TEXT NOT NULL,
  external TEXT NOT NULL,
  state TEXT NOT NULL,
  since REAL NOT NULL,
  nodes TEXT NOT NULL,
  detail TEXT NOT NULL,
  PRIMARY KEY (pool, life)
) STRICT
"""

_INDEXES = (
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
    "CREATE INDEX renames ON events (run) WHERE kind = 'renamed'",
    "CREATE INDEX results_by_sha256 ON results (sha256)",
    "CREATE INDEX results_by_run ON results (run, version)",
    "CREATE INDEX uses_by_hour ON uses (hour)",
    "CREATE INDEX uses_by_run ON uses (run, attempt)",
    "CREATE INDEX uses_by_owner ON uses (owner_uid, hour)",
    "CREATE INDEX forecasts_that_are_open ON forecasts (run) WHERE started_at IS NULL AND void = 0",
    "CREATE INDEX forecasts_by_start ON forecasts (started_at)",
)

_HOUR = "cast({0}.at AS INTEGER) / 3600 * 3600"
_SAMPLED = (
    "CASE WHEN json_type({0}.metrics, '$.seconds_sampling') IS NULL THEN 0 "
    "ELSE cast(coalesce(json_extract({0}.metrics, '$.tokens'), 0) AS INTEGER) END"
)
_TRAINED = "cast(coalesce(json_extract({0}.metrics, '$.trained_tokens'), 0) AS INTEGER)"
_ADD = (
    f"INSERT INTO step_tokens SELECT NEW.run, NEW.attempt, {_HOUR.format('NEW')}, NEW.lineage, "
    f"{_SAMPLED.format('NEW')}, {_TRAINED.format('NEW')} WHERE 1 "
    "ON CONFLICT DO UPDATE SET sampled = sampled + excluded.sampled, trained = trained + excluded.trained;"
)
_TAKE = (
    f"UPDATE step_tokens SET sampled = sampled - ({_SAMPLED.format('OLD')}), "
    f"trained = trained - ({_TRAINED.format('OLD')}) WHERE run = OLD.run AND attempt = OLD.attempt "
    f"AND hour = {_HOUR.format('OLD')} AND lineage = OLD.lineage;"
)
_TRIGGERS = (
    "CREATE TRIGGER events_never_change BEFORE UPDATE OF id, at, kind, data ON events BEGIN "
    "SELECT RAISE(ABORT, 'events never change'); END",
    "CREATE TRIGGER events_never_go BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events never go'); "
    "END",
    f"CREATE TRIGGER steps_come AFTER INSERT ON steps BEGIN {_ADD} END",
    f"CREATE TRIGGER steps_change AFTER UPDATE ON steps BEGIN {_TAKE} {_ADD} END",
    f"CREATE TRIGGER steps_go AFTER DELETE ON steps BEGIN {_TAKE} END",
)


def apply(db: Database) -> None:
    """Make the tables, indices and triggers in an empty database."""
    for statement in (*_TABLES.strip().split("\n\n"), *_INDEXES, *_TRIGGERS):
        db.conn.execute(statement)
