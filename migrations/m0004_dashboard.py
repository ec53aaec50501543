"""What a dashboard shows of every run at once, without reading its steps.

runs.signals: JSON of {at (Unix time of the last step), kl, entropy, truncated, logprob_difference,
failed_rewards (of it), zero_variance (share of its groups), not_finite (names of its metrics that were no
numbers), attested (of the current version), begun (when the newest attempt began to work)}, without what is
not known. runs.recent: JSON of the mean rewards of the last steps, newest last.
"""

from __future__ import annotations

from sqlite_utils import Database

TOLD = ", ".join(
    f"'{name}', json_extract(metrics, '$.{name}')"
    for name in ("kl", "entropy", "truncated", "logprob_difference", "failed_rewards")
)
SHARE = (
    "1.0 * json_extract(metrics, '$.zero_variance_groups') / json_extract(runs.spec, "
    "'$.data.prompts_per_step')"
)
STEP = f"""
SELECT json_object('at', at, {TOLD}, 'zero_variance', {SHARE}) FROM steps
WHERE run = runs.name AND lineage = 1 ORDER BY step DESC LIMIT 1
"""
VERSION = "SELECT attested FROM versions WHERE run = runs.name AND lineage = 1 ORDER BY version DESC LIMIT 1"
BEGUN = "SELECT max(started_at) FROM attempts WHERE run = runs.name"
REST = f"json_object('attested', ({VERSION}), 'begun', ({BEGUN}))"
SIGNALS = f"json_patch(json_patch('{{}}', coalesce(({STEP}), '{{}}')), {REST})"  # a patch leaves nulls out
RECENT = """
SELECT json_group_array(reward) FROM (
  SELECT reward FROM (
    SELECT round(json_extract(metrics, '$.reward'), 6) AS reward, step FROM steps
    WHERE run = runs.name AND lineage = 1 ORDER BY step DESC LIMIT 24
  ) ORDER BY step
)
"""
STATEMENTS = (
    "ALTER TABLE runs ADD COLUMN signals TEXT NOT NULL DEFAULT '{}' CHECK (json_valid(signals))",
    "ALTER TABLE runs ADD COLUMN recent TEXT NOT NULL DEFAULT '[]' CHECK (json_valid(recent))",
    f"UPDATE runs SET signals = {SIGNALS}, recent = ({RECENT})",
)


def apply(db: Database) -> None:
    for statement in STATEMENTS:
        db.conn.execute(statement)
