"""Sets of held-out problems, completions of evaluations, and results of versions that were evaluated by hand.

Attributes:
    evals.sets: JSON of the figures of the further sets, by name.
    results.sha256: Digest of the version's tensors; its run and number are those that were asked for.
    results.suite: What it was evaluated on: `data` for rows, `lm_eval` or `inspect` for a suite.
    results.settings: JSON of reward, sampling and the like.
    results.metrics: JSON of figures by name.
"""

from sqlite_utils import Database

RESULTS = """
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
"""

COLUMNS = (
    "sets TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(sets))",
    "samples TEXT NOT NULL DEFAULT ''",
    "samples_sha256 TEXT NOT NULL DEFAULT ''",
)


def apply(db: Database) -> None:
    for column in COLUMNS:
        db.conn.execute(f"ALTER TABLE evals ADD COLUMN {column}")
    db.conn.execute(RESULTS)
    db.conn.execute("CREATE INDEX results_by_sha256 ON results (sha256)")
    db.conn.execute("CREATE INDEX results_by_run ON results (run, version)")
