"""The runs in a pool: each has a slot, a current version, the ones before it, and turns by its priority."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from lorad.errors import Conflict
from lorad.models.turns import Caller, Party, Payer, caller
from lorad.pool.attest.canaries import Canaries
from lorad.pool.attest.prediction import VersionOnDisk
from lorad.pool.attest.verdict import Outcome
from lorad.pool.loaded import PoolVersion
from lorad.protocol.calls import Call, Open
from lorad.trainers.base import SlotInfo

_LEAST_KEPT = 2  # versions of a run: the current one and the one before
_MOST_PRIORITY = 4  # and as far below zero


def reference_slot(run: str) -> str:
    """Return the name of the slot of a run's reference, which no run can have."""
    return f"reference:{run}"


def critic_slot(run: str) -> str:
    """Return the name of the slot of a run's critic, which no run can have."""
    return f"{run}/critic"


@dataclass(eq=False)
class _Proof:
    """The amplified tests of one attempt.

    Attributes:
        returns: How often the engine had returned when the last test passed, see `Attester`; None before.
        since: How many versions there were since the last test.
        times: The K of the last test.
    """

    returns: int | None = None
    since: int = 0
    times: float = 1.0

    def is_due(self, every: int, returns: int) -> bool:
        """Return whether the next version is to be amplified, with `every` as in `Open`."""
        return self.returns != returns or 0 < every <= self.since + 1

    def count(self, outcome: Outcome, returns: int) -> None:
        """Count one more version, and what its test found."""
        self.since += 1
        if outcome.amplified is None:
            return
        self.since = 0
        self.times = outcome.amplified.verdict.facts.get("amplified", self.times)
        if outcome.amplified.verdict.verdict == "passed":
            self.returns = returns


@dataclass(eq=False)
class Tenant:
    """One run with an open slot.

    Attributes:
        slot: Its slot, whose bytes include critic and reference.
        versions: Its versions that are attested and loaded, oldest first.
        change: dt of the current version.
        files: The files of the current version, which follow in the background.
    """

    run: str
    attempt: int
    spec: Open
    slot: SlotInfo
    canaries: Canaries
    number: int = -1
    versions: list[PoolVersion] = field(default_factory=list)
    change: np.ndarray | None = None
    files: VersionOnDisk | None = None
    proof: _Proof = field(default_factory=_Proof)

    @property
    def reference(self) -> str:
        """Return the frozen slot of its reference. Raises Conflict where it was opened without one."""
        if self.spec.reference is None:
            raise Conflict(f"{self.run} was opened without a reference", hint="`open` names one.")
        return reference_slot(self.run)

    @property
    def critic(self) -> str:
        """Return the slot of its critic. Raises Conflict where it was opened without one."""
        if self.spec.critic is None:
            raise Conflict(f"{self.run} was opened without a critic", hint="`open` asks for one.")
        return critic_slot(self.run)

    @property
    def current(self) -> str:
        """Return the engine's name for the current version; "" while there is none."""
        return self.versions[-1].engine_name if self.versions else ""

    def attested(self, version: str) -> PoolVersion:
        """Find a version. Raises Conflict unless it was attested in this attempt and is still loaded."""
        for entry in self.versions:
            if entry.version == version:
                return entry
        raise Conflict(
            f"{version} is not an attested version of {self.run} attempt {self.attempt} that is loaded",
            hint=f"Loaded and attested: {', '.join(e.version for e in self.versions) or 'none'}; or `base`.",
        )

    def advance(
        self, number: int, entry: PoolVersion, change: np.ndarray, files: VersionOnDisk
    ) -> list[PoolVersion]:
        """Make the entry the current one; return the entries that the run lets go."""
        self.number = number
        self.change = change
        self.files = files
        self.versions.append(entry)
        count = max(_LEAST_KEPT, self.spec.kept)
        gone = self.versions[:-count]
        self.versions = self.versions[-count:]
        return gone


def weight_of(priority: int) -> float:
    """Return the weight of a priority, twice as much for each step, between 2^-4 and 2^4."""
    return 2.0 ** max(-_MOST_PRIORITY, min(priority, _MOST_PRIORITY))


class Parties:
    """Who takes turns in the pool. All methods belong to its asyncio loop."""

    def __init__(self) -> None:
        self._runs: dict[str, Party] = {}
        self._served = Party("serve", goes_first=True)
        self._on_slot: dict[str, float] = {}

    def caller(self, call: Call) -> Caller:
        """Return who makes this call."""
        if call.run:
            return Caller(self.of(call.run), Payer(call.run, call.attempt))
        return Caller(self._served)

    def of(self, run: str) -> Party:
        return self._runs.setdefault(run, Party(run))

    def joins(self, run: str, priority: int) -> None:
        """Reset the time that the run has waited, and set its weight."""
        party = self.of(run)
        party.weight = weight_of(priority)
        party.waited = 0.0
        self._on_slot.pop(run, None)

    def leaves(self, run: str) -> None:
        """Forget the run; its calls under way keep their weight."""
        self._runs.pop(run, None)
        self._on_slot.pop(run, None)

    @contextmanager
    def on_slot(self, run: str) -> Iterator[None]:
        """Count the time that a call's work on the slot of its run waits inside the block, until `take`."""
        before = caller().waited
        try:
            yield
        finally:
            self._on_slot[run] = self._on_slot.get(run, 0.0) + caller().waited - before

    def take(self, run: str) -> float:
        """Return the seconds that its work on its slot waited since this was asked last."""
        return self._on_slot.pop(run, 0.0)
