"""Gather the figures of a run that rules read, once, from the daemon's answers; all else here is pure."""

import math
import re
from collections import defaultdict
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from statistics import fmean

import msgspec
from msgspec import Struct

from lorad.client.client import Client
from lorad.errors import LoradError, NotFound
from lorad.records.measured import Evaluation, Step
from lorad.records.runs import RunDetails
from lorad.records.samples import Sample
from lorad.records.versions import Version
from lorad.spec.model import Spec

_MOST_STEPS = 300  # that are read of a run, spread over all of it
_MOST_SAMPLES = 256  # of a step
_EARLY = 3  # steps that say what the base does, and as many that say what a run has come to
_LEAST = 6  # steps that have a trend


class Facts(Struct, frozen=True, dict=True):
    """Holds what is known of a run.

    steps: in order, the first and the last ones and some between.
    early: samples of the first steps.
    late: samples of the last steps.
    """

    run: RunDetails
    spec: Spec
    steps: list[Step]
    evals: list[Evaluation]
    versions: list[Version]
    early: list[Sample]
    late: list[Sample]

    # -- curves ----------------------------------------------------------------------------------------------
    def curve(self, metric: str) -> list[float]:
        """Return the finite values of a metric, in order of steps."""
        values = (step.metrics.get(metric) for step in self.steps)
        return [float(value) for value in values if value is not None and math.isfinite(value)]

    def start(self, metric: str) -> float | None:
        """Return the mean of a metric over the first steps; None where it was not measured."""
        return self.mean(metric, slice(_EARLY))

    def from_start(self, metric: str) -> float:
        """Return how much of a metric the base shows: the least of its first step and of its first ones."""
        values = self.curve(metric)[:_EARLY]
        return min(values[0], fmean(values)) if values else 0.0

    def end(self, metric: str) -> float | None:
        """Return the mean of a metric over the last steps; None where it was not measured."""
        return self.mean(metric, slice(-_EARLY, None))

    def mean(self, metric: str, steps: slice = slice(None)) -> float | None:
        """Return the mean of a metric over all steps or some; None where it was not measured."""
        values = self.curve(metric)[steps]
        return fmean(values) if values else None

    def trend(self, metric: str) -> float:
        """Return how many standard errors the last third of a curve is above its first; 0 for a short one."""
        values = self.curve(metric)
        if len(values) < _LEAST:
            return 0.0
        part = len(values) // 3
        rise = fmean(values[-part:]) - fmean(values[:part])
        # the noise of a step is that of the difference to the next one, which a slow rise hardly adds to
        noise = fmean((after - before) ** 2 for before, after in pairwise(values)) / 2
        return rise / math.sqrt(2 * noise / part) if noise else 0.0

    @property
    def learns(self) -> bool:
        """Return whether the reward, or what is minimised, gets better beyond its noise."""
        return self.trend("reward") > 2 or (not self.curve("reward") and self.trend("loss") < -2)

    # -- steps and groups ------------------------------------------------------------------------------------
    @property
    def flat_from_start(self) -> float:
        """Return the share of the base's groups that have one reward, see `from_start`."""
        return min(self.from_start("zero_variance_groups") / self.spec.data.prompts_per_step, 1.0)

    @cached_property
    def reward_span(self) -> tuple[float, float] | None:
        """Return the least and the greatest reward of any sample; None without rewards."""
        lows = self.curve("reward_min") or [s.reward for s in self.samples if s.reward is not None]
        highs = self.curve("reward_max") or lows
        return (min(lows), max(highs)) if lows else None

    # -- samples ---------------------------------------------------------------------------------------------
    @cached_property
    def samples(self) -> list[Sample]:
        """Return all samples that were read, each once."""
        by_place = {(s.step, s.prompt_id, s.index): s for s in (*self.early, *self.late)}
        return list(by_place.values())

    @cached_property
    def answered(self) -> list[Sample]:
        """Return the samples with a reward whose rows have an answer."""
        return [sample for sample in self.samples if sample.reward is not None and answer_of(sample)]


def answer_of(sample: Sample) -> str:
    """Return the final answer of a row; in GSM8K it stands behind ####."""
    return (sample.answer or "").rpartition("####")[2].strip()


def gives_answer(sample: Sample) -> bool:
    """Return whether the answer stands in a completion, as a word of its own."""
    return re.search(rf"(?<!\w){re.escape(answer_of(sample))}(?!\w)", sample.completion) is not None


def gather(client: Client, run: str) -> Facts:
    """Read a run. Raises NotFound, and LoradError for one whose spec is of another lorad."""
    details = client.show(run)
    try:
        spec = msgspec.convert(details.spec, Spec)
    except msgspec.ValidationError as error:
        hint = "`lorad show` has its figures."
        raise LoradError(f"the spec of {run} is of another lorad: {error}", hint=hint) from None
    every = -(-details.step // _MOST_STEPS)
    steps = {step.step: step for step in client.steps(run, limit=_EARLY)}
    steps |= {step.step: step for step in client.steps(run, every=max(every, 1))}
    numbers = sorted(steps)
    samples = defaultdict[int, list[Sample]](list)
    for number in {*numbers[:_EARLY], *numbers[-_EARLY:]}:
        with suppress(NotFound):  # they were deleted
            samples[number] += client.samples(run, step=number, limit=_MOST_SAMPLES, brief=True)
    return Facts(
        details,
        spec,
        [steps[number] for number in numbers],
        client.evals(run),
        client.adapters(run),
        [sample for number in numbers[:_EARLY] for sample in samples[number]],
        [sample for number in numbers[-_EARLY:] for sample in samples[number]],
    )
