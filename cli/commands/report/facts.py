"""Read what a report says of runs, as their user: a bounded choice of whatever they left."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lorad.alarms import Alarm, alarms
from lorad.client.boxes.hosts import limits_of
from lorad.client.choice import Choice
from lorad.client.client import Client
from lorad.errors import IntegrityError, LoradError, NotFound
from lorad.records.bill import BillLine
from lorad.records.devices import Device
from lorad.records.measured import Evaluation
from lorad.records.runs import RunDetails
from lorad.records.samples import Sample
from lorad.records.versions import Version
from lorad.spec.kept import MAIN
from lorad.tui.curves.series import Track
from lorad.tui.curves.step_reader import read_whole, scores
from lorad.why.finding import Why
from lorad.why.table import explain

_Row = TypeVar("_Row")
_POINTS = 400  # of a curve
_SETS = 6  # sets of held-out problems, of which completions are read
_EACH = 2  # samples of a step that are shown for each of these
_CHOICES = {"best": Choice(sort="reward"), "worst": Choice(sort="reward", reverse=True)}


@dataclass(frozen=True)
class RunFacts:
    """Holds what a report says of one run.

    samples: the samples that are shown, each with what it was chosen for.
    rewards: by the name of a held-out set, the lowest and the highest reward of its first and last
        evaluation.
    notes: why some samples are missing.
    bill: None where nothing was used.
    currency: what the cost is in.
    devices: the devices that the run's pool has now.
    """

    run: RunDetails
    track: Track
    evals: Sequence[Evaluation] = ()
    samples: Sequence[tuple[str, Sample]] = ()
    rewards: dict[str, tuple[float, float]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    versions: Sequence[Version] = ()
    bill: BillLine | None = None
    currency: str = ""
    devices: Sequence[Device] = ()
    alarms: Sequence[Alarm] = ()
    why: Why | None = None  # what `lorad why` says of it; None where it cannot be asked


def read(client: Client, names: Sequence[str]) -> list[RunFacts]:
    """Read what a report says of runs. Raises NotFound for a run that there is not."""
    runs = [client.show(name) for name in names]
    bill = client.bill()
    devices = client.devices()
    limits = limits_of(client.where)
    lines = {line.key: line for line in bill.rows}
    facts = []
    for run in runs:
        reader = _Samples(client, run.name)
        evals = spread(client.evals(run.name), _POINTS)
        track = read_whole(client, run, _POINTS)
        track.sets = scores(evals)
        for step in dict.fromkeys([*(row.step for row in client.steps(run.name, limit=1)), run.step]):
            reader.read(step)
        sets = dict.fromkeys([MAIN, *(name for evaluation in evals for name in evaluation.sets)])
        for name in [*sets][:_SETS]:
            measured = [row.step for row in evals if (row.problems if name == MAIN else name in row.sets)]
            for step in dict.fromkeys([*measured[:1], *measured[-1:]]):
                reader.read(step, name)
        why = None
        with contextlib.suppress(LoradError):
            why = explain(client, run.name)
        facts.append(
            RunFacts(
                run,
                track,
                evals,
                reader.chosen,
                reader.rewards,
                reader.notes,
                client.adapters(run.name),
                lines.get(run.name),
                bill.currency,
                [device for device in devices if run.pool is not None and device.pool == run.pool],
                alarms([run], limits),
                why,
            )
        )
    return facts


def spread(rows: Sequence[_Row], most: int) -> list[_Row]:
    """Return at most so many rows, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[place * (len(rows) - 1) // (most - 1)] for place in range(most)]


@dataclass(eq=False)
class _Samples:
    """Chooses samples of a run, and remembers how far apart the rewards of held-out problems were."""

    _client: Client
    _run: str
    _seen: set[tuple[str, int, str, int]] = field(default_factory=set)
    chosen: list[tuple[str, Sample]] = field(default_factory=list)
    rewards: dict[str, tuple[float, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def read(self, step: int, held_out: str = "") -> None:
        """Take the best and the worst samples of a step, or of the evaluation of a held-out set there."""
        place = f"held-out {held_out}, step {step}" if held_out else f"step {step}"
        for says, choice in _CHOICES.items():
            try:
                samples = self._client.samples(
                    self._run, step=step, limit=_EACH, eval=held_out or None, choice=choice, brief=True
                )
            except NotFound:
                self.notes.append(f"The samples of {place} are not kept.")
                return
            except IntegrityError:
                self.notes.append(f"The samples of {place} are not those that were written: other bytes.")
                return
            for sample in samples:
                if held_out and sample.reward is not None:
                    low, high = self.rewards.get(held_out, (0.0, 1.0))
                    self.rewards[held_out] = min(low, sample.reward), max(high, sample.reward)
                key = held_out, step, sample.prompt_id, sample.index
                if key not in self._seen:
                    self._seen.add(key)
                    self.chosen.append((f"{place}, {says}", sample))
