"""The runs in a pool: each has a slot, a current version and the one before it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lorad.errors import Conflict
from lorad.pool.canaries import Canaries
from lorad.pool.loaded import Entry
from lorad.protocol.calls import Open
from lorad.trainers.base import SlotInfo

KEPT = 2  # versions of a run: the current one and the one before


@dataclass(eq=False)
class Tenant:
    """One run with an open slot. versions: attested and loaded, oldest first. change: see `Attester.attest`."""

    run: str
    attempt: int
    spec: Open
    slot: SlotInfo
    canaries: Canaries
    number: int = -1
    versions: list[Entry] = field(default_factory=list)
    change: np.ndarray | None = None

    def attested(self, version: str) -> Entry:
        """Raises Conflict for a version that was not attested in this attempt or is not loaded any more."""
        for entry in self.versions:
            if entry.version == version:
                return entry
        raise Conflict(
            f"{version} is not an attested version of {self.run} attempt {self.attempt} that is loaded",
            hint=f"Loaded and attested: {', '.join(e.version for e in self.versions) or 'none'}; or `base`.",
        )

    def advance(self, number: int, entry: Entry, change: np.ndarray) -> list[Entry]:
        """The entry is current now; returns those that the run lets go."""
        self.number, self.change = number, change
        self.versions.append(entry)
        gone, self.versions = self.versions[:-KEPT], self.versions[-KEPT:]
        return gone
