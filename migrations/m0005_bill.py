"""Who used which pool how much, and the tokens of steps by the hour.

Attributes:
    lives: A life of a pool: its devices, and how many there are.
    lives.ended_at: When its process ended, and all that it wrote is taken in; NULL until then.
    uses: See `Use` in `lorad/protocol/status.py`; owner and sweep are those of the run. They stay when the
        run is removed.
    uses.life: Of a removed run's tokens `removed:` and the number of its first event; no pool has such a
        life.
    uses.sampled: Tokens of its steps, of a removed run alone; those of others are in `step_tokens`.
    uses.gone: 1 when the run was removed; then `wasted` says whether a later attempt threw it away, which is
        otherwise seen from the other rows.
    step_tokens: Sums over the steps of an attempt, which triggers keep up to date; lineage as in `steps`.
    step_tokens.trained: Tokens with a loss, once for each pass; 0 where an older lorad did not count them.
"""

from sqlite_utils import Database

LIVES = """
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
"""

USES = """
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
"""

STEP_TOKENS = """
CREATE TABLE step_tokens (
  run TEXT NOT NULL REFERENCES runs (name) ON DELETE CASCADE,
  attempt INTEGER NOT NULL,
  hour INTEGER NOT NULL,
  lineage INTEGER NOT NULL,
  sampled INTEGER NOT NULL,
  trained INTEGER NOT NULL,
  PRIMARY KEY (run, attempt, hour, lineage)
) STRICT, WITHOUT ROWID
"""

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
TRIGGERS = (
    f"CREATE TRIGGER steps_come AFTER INSERT ON steps BEGIN {_ADD} END",
    f"CREATE TRIGGER steps_change AFTER UPDATE ON steps BEGIN {_TAKE} {_ADD} END",
    f"CREATE TRIGGER steps_go AFTER DELETE ON steps BEGIN {_TAKE} END",
)
OF_BEFORE = (
    f"INSERT INTO step_tokens SELECT s.run, s.attempt, {_HOUR.format('s')}, s.lineage, "
    f"sum({_SAMPLED.format('s')}), sum({_TRAINED.format('s')}) FROM steps s GROUP BY 1, 2, 3, 4"
)
INDEXES = (
    "CREATE INDEX uses_by_hour ON uses (hour)",
    "CREATE INDEX uses_by_run ON uses (run, attempt)",
    "CREATE INDEX uses_by_owner ON uses (owner_uid, hour)",
)


def apply(db: Database) -> None:
    for statement in (LIVES, USES, STEP_TOKENS, *INDEXES, *TRIGGERS, OF_BEFORE):
        db.conn.execute(statement)
