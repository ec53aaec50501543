"""Nodes of a cluster and what pools were granted there: an index of `grant.json` of the lives of pools.

nodes.cluster: static, or the address of a Ray cluster.
nodes.uid: whose processes its agents are.
nodes.devices: JSON, the names of those that it had when it was granted last.
nodes.bases: JSON, the directories of base models that were loaded there, the newest last.
nodes.state: granted, free, or lost.
grants.state: asked, granted, refused, lost, or over.
grants.nodes: JSON, names.
grants.external: what the cluster calls it: the name of a Ray placement group.
leases.node: the node that has the device; empty for this machine.
"""

from sqlite_utils import Database

_SCHEMA = (
    """CREATE TABLE nodes (
      node TEXT PRIMARY KEY,
      cluster TEXT NOT NULL,
      address TEXT NOT NULL,
      boot_id TEXT NOT NULL,
      uid INTEGER NOT NULL,
      devices TEXT NOT NULL,
      bases TEXT NOT NULL,
      seen_at REAL NOT NULL,
      state TEXT NOT NULL
    ) STRICT""",
    """CREATE TABLE grants (
      pool TEXT NOT NULL,
      life INTEGER NOT NULL,
      kind TEXT NOT NULL,
      external TEXT NOT NULL,
      state TEXT NOT NULL,
      since REAL NOT NULL,
      nodes TEXT NOT NULL,
      detail TEXT NOT NULL,
      PRIMARY KEY (pool, life)
    ) STRICT""",
    "ALTER TABLE leases ADD COLUMN node TEXT NOT NULL DEFAULT ''",
)


def apply(db: Database) -> None:
    for statement in _SCHEMA:
        db.conn.execute(statement)
