"""Alarms about runs, pools, devices and the daemon, made from the client's answers.

The dashboard, `lorad top` and `lorad show` show them.
"""

import math
import time
from collections.abc import Iterable, Iterator
from typing import Literal

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

    level: `bad` where something is broken, `look` where it may be well.
    kind: a word to filter by.
    on: what `subject` names; `daemon` has none.
    says: the alarm in one line.
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
_EXPLAINED = {"not-finite", "kl", "logprobs", "rewards", "entropy", "zero-variance", "truncation", "idle"}
_RunAlarms = Iterator[tuple[_Level, str, str]]  # level, kind, says
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
    """Raise the alarms, the worst first. The arguments are answers of `lorad.client`."""
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
        total = device.memory_total
        others = [process for process in device.processes if not process.ours]
        if total and device.memory_used >= _FULL * total and others:
            users = ", ".join(sorted({process.user or "unknown user" for process in others}))
            size = sum(process.memory or 0 for process in others) / _GIB
            says = f"{device.memory_used / total:.0%} is used, {size:.1f} GiB by others ({users})"
            raised.append(Alarm("look", "memory", "device", device.device, says))
    return sorted(raised, key=order)


def order(alarm: Alarm) -> tuple[str, int]:
    """Return the key by which alarms are sorted, the worst first."""
    return alarm.level, _KINDS.index(alarm.kind)


def _of_run(run: Run, limits: AlarmLimits, now: float) -> _RunAlarms:
    """Yield what is wrong with a run at work, or for some hours with how it ended."""
    age = now - (run.ended_at or 0.0)
    if run.state == "running":
        yield from _of_signals(run, limits)
        step = run.signals.at or 0.0
        began = run.signals.begun or run.started_at or 0.0
        since = max(step, began)
        if limits.stall is not None and since and not run.signals.on_request:
            is_first = step < began
            took = run.rates.step_seconds or 0.0
            quiet = now - since
            if quiet > max(limits.stall * (_FIRST if is_first else 1.0), _SLOW * took):
                lasting = f"{quiet / 60:.0f} min" if quiet < 2 * _HOUR else f"{quiet / _HOUR:.1f} h"
                yield "bad", "stall", f"no step for {lasting}{' since it began' if is_first else ''}"
        pairs = run.signals.pair_accuracy or 0.0
        first = run.eval_first
        last = run.eval_last
        if pairs > _TOLD_APART and first is not None and last is not None and last < _WORSE * first:
            fall = f"the eval fell from {first:.3g} to {last:.3g}"
            hint = "algorithm.preference.nll or a lower trainer.lr keeps what is sampled"
            yield "bad", "chosen", f"{fall} though {pairs:.0%} of the pairs are the right way round: {hint}"
    elif run.state == "ended":
        detail = " ".join(run.detail.split())
        if run.reason == "attestation_failed" and age < 24 * _HOUR:
            yield "bad", "attestation", f"ended: {detail or 'its attestation failed'}"
        elif run.reason in ("failed", "lost") and age < _HOUR:
            yield "bad", "ended", f"{run.reason}" + (f": {detail}" if detail else "")
    is_shown = run.state == "running" or (run.state == "ended" and age < 24 * _HOUR)
    if is_shown and (words := idleness(run)):  # a run that has no other steps learned nothing
        yield ("bad" if trained_nothing(run) else "look"), "idle", words


def _of_signals(run: Run, limits: AlarmLimits) -> _RunAlarms:
    """Yield the figures beyond their limits, and those that are no number, whatever the limit."""
    signals = asdict(run.signals)
    measured = {**signals, "reward": run.reward}
    infinite = {key for key, n in measured.items() if isinstance(n, float) and not math.isfinite(n)}
    if broken := infinite.union(run.signals.not_finite):
        yield "bad", "not-finite", f"{', '.join(sorted(broken))}: NaN or infinite at step {run.step}"
    value = {
        key: signal
        for key, signal in signals.items()
        if isinstance(signal, int | float) and math.isfinite(signal)
    }
    for key, level, kind, says in MEASURED:
        limit = getattr(limits, key)
        if key not in value or limit is None:
            continue
        if value[key] <= limit if key in _LOW else value[key] >= limit:
            yield level, kind, says.format(value[key])
    if value.get("failed_rewards", 0.0) > 0:
        yield "look", "rewards", f"{value['failed_rewards']:.0f} rewards of the last step failed"
    if value.get("skipped_updates", 0.0) > 0:
        count = f"{value['skipped_updates']:.0f} updates of the last step"
        yield "bad", "not-finite", f"{count} were skipped: loss or gradient was NaN or infinite"
    if run.signals.attested == "inconclusive":
        yield "look", "attestation", "the attestation of the current version is inconclusive"
