"""Alarms about runs, pools, devices and the daemon, made from the client's answers.

The dashboard, `lorad top` and `lorad show` show them.
"""

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict

from lorad.box.config import AlarmLimits
from lorad.client.words import idleness, trained_nothing
from lorad.records.daemon import Status
from lorad.records.devices import Device
from lorad.records.pools import Pool
from lorad.records.runs import Run

_Level = Literal["bad", "look"]

_SLOW = 10.0  # times its last step's seconds without another step
_FIRST = 5.0  # times as patient with the first step of an attempt
_HOUR = 3600.0
_FULL = 0.95  # of a device's memory
_GIB = 2.0**30
_TOLD_APART = 0.6  # share of pairs: a policy that is its reference has half of them, by chance
_WORSE = 0.9  # times the first evaluation


class Alarm(Struct, frozen=True):
    """Something that a user should look at.

    Attributes:
        level: `bad` is broken, `look` may be well.
        kind: a word to filter by.
        on: what `subject` names; `daemon` has none.
        says: one line.
    """

    level: _Level
    kind: str
    on: Literal["run", "pool", "device", "daemon"]
    subject: str
    says: str


# Worst first; of one kind those that are bad come before those that may be well.
_KINDS = (
    *("daemon", "disk", "attestation", "ended", "engine", "trainer", "not-finite"),
    *("stall", "kl", "logprobs", "chosen", "rewards", "entropy", "critic", "zero-variance"),
    *("truncation", "idle", "memory"),
)
_EXPLAINED = frozenset(
    {"not-finite", "kl", "logprobs", "rewards", "entropy", "zero-variance", "truncation", "idle"}
)
_Found = Iterator[tuple[_Level, str, str]]  # level, kind, says
# Signals that have a limit, and what is said of them.
MEASURED: tuple[tuple[str, _Level, str, str], ...] = (
    ("kl", "bad", "kl", "KL {:.3g} nats per token to the reference policy"),
    ("logprob_difference", "bad", "logprobs", "engine and trainer differ by {:.3g} nats per token"),
    (
        "chosen_fall",
        "bad",
        "chosen",
        "chosen completions are {:.2g} nats per token below the reference: algorithm.preference.nll holds "
        "them up, or a lower trainer.lr",
    ),
    ("entropy", "look", "entropy", "entropy {:.2g} nats per token: hardly anything is tried any more"),
    ("explained_variance", "look", "critic", "the critic explains {:.0%} of the variance of the returns"),
    ("zero_variance", "look", "zero-variance", "{:.0%} of the groups have one reward: nothing to learn from"),
    ("truncated", "look", "truncation", "{:.0%} of the completions are cut at rollout.max_new_tokens"),
)
_LOW = frozenset({"entropy", "explained_variance"})  # where less is worse


def alarms(
    runs: Iterable[Run],
    limits: AlarmLimits,
    now: float | None = None,
    *,
    pools: Iterable[Pool] = (),
    devices: Iterable[Device] = (),
    status: Status | None = None,
) -> list[Alarm]:
    """Worst first. All arguments as `lorad.client` has them."""
    at = time.time() if now is None else now
    raised: list[Alarm] = []
    if status is not None:
        raised += [Alarm("bad", "daemon", "daemon", "", " ".join(says.split())) for says in status.troubles]
        free = status.disk.free if status.disk else None
        if free is not None and limits.disk is not None and free < limits.disk:
            says = f"{free / _GIB:.1f} GiB free where runs are: versions and checkpoints need room"
            raised.append(Alarm("bad", "disk", "daemon", "", says))
    for run in runs:
        more = f"; `lorad why {run.name}` says more"
        raised += [
            Alarm(level, kind, "run", run.name, says + more * (kind in _EXPLAINED))
            for level, kind, says in _of_run(run, limits, at)
        ]
    for pool in pools:
        for part, about in (("engine", pool.engine), ("trainer", pool.trainer)):
            if about.alive is False:
                detail = " ".join(str(about.detail or "").split())
                says = f"its {part} {about.name} is gone" + (f": {detail}" if detail else "")
                raised.append(Alarm("bad", part, "pool", pool.pool, says))
    for device in devices:  # memory that others fill
        total = _number(device.memory_total)
        used = _number(device.memory_used)
        others = [process for process in device.processes if not process.ours]
        if total and used is not None and used >= _FULL * total and others:
            users = ", ".join(sorted({str(process.user or "unknown user") for process in others}))
            size = sum(_number(process.memory) or 0.0 for process in others) / _GIB
            says = f"{used / total:.0%} is used, {size:.1f} GiB by others ({users})"
            raised.append(Alarm("look", "memory", "device", device.device, says))
    return sorted(raised, key=order)


def order(alarm: Alarm) -> tuple[str, int]:
    """Worst first."""
    return alarm.level, _KINDS.index(alarm.kind)


def _of_run(run: Run, limits: AlarmLimits, now: float) -> _Found:
    """What is wrong with how it goes, while it does; for a while, that its end was none."""
    if run.state == "running":
        yield from _of_signals(run, limits)
        step = _number(run.signals.at) or 0.0
        begun = _number(run.signals.begun) or _number(run.started_at) or 0.0
        since = max(step, begun)
        if limits.stall is not None and since and not run.signals.on_request:
            is_first = step < begun
            took = _number(run.rates.step_seconds) or 0.0
            quiet = now - since
            if quiet > max(limits.stall * (_FIRST if is_first else 1.0), _SLOW * took):
                lasting = f"{quiet / 60:.0f} min" if quiet < 2 * _HOUR else f"{quiet / _HOUR:.1f} h"
                yield "bad", "stall", f"no step for {lasting}{' since it began' if is_first else ''}"
        pairs = _number(run.signals.pair_accuracy) or 0.0
        first = _number(run.eval_first)
        last = _number(run.eval_last)
        if pairs > _TOLD_APART and first is not None and last is not None and last < _WORSE * first:
            fall = f"the eval fell from {first:.3g} to {last:.3g}"
            hint = "algorithm.preference.nll or a lower trainer.lr keeps what is sampled"
            yield "bad", "chosen", f"{fall} though {pairs:.0%} of the pairs are the right way round: {hint}"
        yield from _of_idleness(run)
    elif run.state == "ended":
        age = now - (_number(run.ended_at) or 0.0)
        detail = " ".join(run.detail.split())
        if run.reason == "attestation_failed" and age < 24 * _HOUR:
            yield "bad", "attestation", f"ended: {detail or 'its attestation failed'}"
        elif run.reason in ("failed", "lost") and age < _HOUR:
            yield "bad", "ended", f"{run.reason}" + (f": {detail}" if detail else "")
        if age < 24 * _HOUR:
            yield from _of_idleness(run)


def _of_idleness(run: Run) -> _Found:
    """Steps that trained nothing: a run of nothing else has learned nothing, however well it ended."""
    if words := idleness(run):
        yield ("bad" if trained_nothing(run) else "look"), "idle", words


def _of_signals(run: Run, limits: AlarmLimits) -> _Found:
    """What was measured; what is no number is an alarm, whatever the limit."""
    signals = asdict(run.signals)
    measured = {**signals, "reward": run.reward}
    infinite = {
        key for key, amount in measured.items() if isinstance(amount, float) and not math.isfinite(amount)
    }
    if broken := infinite.union(run.signals.not_finite):
        yield "bad", "not-finite", f"{', '.join(sorted(broken))}: NaN or infinite at step {run.step}"
    value = {key: number for key, signal in signals.items() if (number := _number(signal)) is not None}
    for key, level, kind, says in MEASURED:
        limit = getattr(limits, key)
        if (
            key in value
            and limit is not None
            and (value[key] <= limit if key in _LOW else value[key] >= limit)
        ):
            yield level, kind, says.format(value[key])
    if value.get("failed_rewards", 0.0) > 0:
        yield "look", "rewards", f"{value['failed_rewards']:.0f} rewards of the last step failed"
    if value.get("skipped_updates", 0.0) > 0:
        count = f"{value['skipped_updates']:.0f} updates of the last step"
        yield "bad", "not-finite", f"{count} were skipped: loss or gradient was NaN or infinite"
    if run.signals.attested == "inconclusive":
        yield "look", "attestation", "the attestation of the current version is inconclusive"


def _number(value: Any) -> float | None:
    """None for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
