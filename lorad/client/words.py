"""Describe a run, a result or the reservation of a device in one line."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lorad.protocol.evals import SetScore
from lorad.records.devices import Device
from lorad.records.measured import Result
from lorad.records.runs import KeptFiles, Run, RunDetails
from lorad.text import clauses, counted, duration, moment, number, size

_LARGEST = 99.0  # nats per token; a perplexity of more would be no number
_NAMES = 12  # how many modules are listed
# Steps without an update are worth a word from this number, or this share of all, on.
_FEW_IDLE = 3
_MOSTLY_IDLE = 0.5


def why(run: Run) -> str:
    """Say why a run waits, what it is doing, or what went wrong, in one line."""
    bad = run.reason not in (None, "completed", "stopped")
    words = " ".join((run.waiting or (run.detail if bad else "")).split())
    starts = starts_in_words(run)
    return clauses(starts and f"starts {starts}", run.doing, words, failures(run), idleness(run))


def phase(run: Run) -> str:
    """Return the state of a run, where a run that stops to be paused is `pausing`."""
    return "pausing" if run.state == "stopping" and run.wanted == "pause" else run.state


def steps_in_words(run: Run, of: str = "/") -> str:
    """Say how many steps a run has made, and of how many, where an end is planned: `3/10` or `3`."""
    return f"{run.step}{of}{run.steps}" if run.steps else str(run.step)


def share(run: Run) -> float:
    """Return how much of its steps a run has made, 0 to 1; 0 where no end is planned."""
    return min(run.step / run.steps, 1.0) if run.steps else 0.0


def starts_in_words(run: Run) -> str:
    """Say how far off the start of a queued run is, and after which run; "" where that is not known."""
    return "" if run.queue is None else when_in_words(run.queue.starts_at, run.queue.after)


def when_in_words(at: float | None, after: str) -> str:
    """Say roughly how far off a start is, in minutes, hours or days.

    at: Unix time.
    after: the run whose end it waits for; "" for none.
    """
    if at is None:
        return ""
    minutes = max(0.0, at - time.time()) / 60
    if minutes < 1:
        when = "within a minute"
    elif minutes < 90:
        when = f"in about {minutes:.0f} min"
    elif minutes < 36 * 60:
        when = f"in about {minutes / 60:.0f} h"
    else:
        when = f"in about {minutes / 1440:.0f} days"
    return f"{when}, after {after}" if after else when


def place_in_words(run: Run) -> str:
    """Say where a run stands in the queue, and why others come first; "" where nobody else waits."""
    if run.queue is None or run.queue.of < 2:
        return ""
    nth = run.queue.place
    ending = "th" if nth // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(nth % 10, "th")
    place = f"{nth}{ending} of {run.queue.of} in the queue"
    return f"{place}: {run.queue.behind}" if run.queue.behind else place


def failures(run: Run) -> str:
    """Say how many rewards of a run failed and how many of its updates were skipped; "" for none."""
    signals = run.signals
    counts = {
        "rewards failed": signals.failed_rewards_total,
        "updates skipped": signals.skipped_updates_total,
    }
    return ", ".join(f"{count:,.0f} {words}" for words, count in counts.items() if count)


def trained_nothing(run: Run) -> bool:
    """Check whether a run has made steps, and none of them changed a weight."""
    return 0 < run.step <= (run.signals.idle_steps_total or 0)


def idleness(run: Run) -> str:
    """Say that steps of a run changed no weight, and why its last one did not; "" where most steps did.

    Even a run that learns has such steps now and then, for a batch whose groups all have one reward.
    """
    signals = run.signals
    idle = signals.idle_steps_total or 0
    are_many = idle >= max(_FEW_IDLE, run.step * _MOSTLY_IDLE)
    if not (are_many or (run.state == "ended" and trained_nothing(run))):
        return ""
    causes = []
    if (flat := signals.zero_variance or 0.0) >= _MOSTLY_IDLE:
        groups = "all groups" if flat == 1 else f"{flat:.0%} of the groups"
        causes.append(f"{groups} had one reward")
    if (cut := signals.truncated or 0.0) >= _MOSTLY_IDLE and (flat or not signals.failed_rewards):
        causes.append(f"{cut:.0%} of the completions were cut at rollout.max_new_tokens")
    words = f"{idle:,.0f} of {run.step:,} steps changed nothing"
    return f"{words}: in the last one {' and '.join(causes)}" if causes else words


def figure_in_words(run: Run) -> str:
    """Write the reward of the last step, or else its loss and the share of pairs that are right."""
    if not judged_by_loss(run):
        return "" if run.reward is None else f"reward {number(run.reward)}"
    pairs = run.signals.pair_accuracy
    return f"loss {number(run.signals.loss)}" + ("" if pairs is None else f", pairs {pairs:.0%}")


def judged_by_loss(run: Run) -> bool:
    """Check whether a run has a loss and no rewards, because it samples nothing."""
    return run.reward is None and run.signals.loss is not None


def evals_in_words(run: Run, arrow: str = " -> ") -> str:
    """Write the held-out reward, or else the nll, of the first and the last evaluation; "" before any."""
    if run.eval_first is None and run.nll_first is None:
        return ""
    if run.eval_first is not None:
        return _from_to(run.eval_first, run.eval_last, arrow)
    return f"nll {_from_to(run.nll_first, run.nll_last, arrow)}"


def _from_to(first: float | None, last: float | None, arrow: str = " -> ") -> str:
    """Write the first and the last value of a figure, once where both are written alike."""
    return arrow.join(dict.fromkeys(number(value) or "-" for value in (first, last)))


def sets_in_words(sets: Mapping[str, Sequence[SetScore]]) -> dict[str, str]:
    """Describe the first and the last evaluation of each set, by its name."""
    described = {}
    for name, (first, *_, last) in sets.items():
        passed = "".join(f", {key} {number(value)}" for key, value in last.passed.items())
        failed = f", {last.failed} rewards failed" if last.failed else ""
        avg = f" (avg@{last.n})" if last.n > 1 else ""
        described[name] = f"{_from_to(first.score, last.score)}{avg}{passed}{failed}"
    return described


def likelihood_in_words(run: Run) -> str:
    """Say how likely held-out completions are, and how many held-out pairs are right; "" without any."""
    parts = []
    if run.nll_first is not None and run.nll_last is not None:
        parts.append(f"nll {_from_to(run.nll_first, run.nll_last)}")
        parts.append(f"perplexity {number(perplexity(run.nll_last))}")
    if run.token_accuracy_last is not None:
        parts.append(f"{run.token_accuracy_last:.1%} of tokens right")
    if run.accuracy_last is not None:
        parts.append(f"{run.accuracy_last:.0%} of pairs right")
    return ", ".join(parts)


def perplexity(nll: float) -> float:
    """Return the perplexity of nats per token."""
    return math.exp(min(nll, _LARGEST))


def rate_in_words(data: RunDetails) -> str:
    """Say which learning rate fits, and whether the run has it; "" where nothing was looked up."""
    lr = (data.spec.get("trainer") or {}).get("lr")
    if data.rate is None or lr is None:
        return ""
    fits = ": it" if lr == data.rate.lr else f"; {data.rate.lr:g}"
    return f"trainer.lr is {lr:g}{fits} fits {data.rate.why}"


def adapter_in_words(lora: Mapping[str, Any]) -> str:
    """Describe the section `lora` of a spec: `rank 8, alpha 32`, and what is unusual."""
    rank = lora.get("rank")
    expert_rank = lora.get("experts", {}).get("rank", "auto")
    parts = [f"rank {rank}" if expert_rank in ("auto", rank) else f"rank {rank} ({expert_rank} on experts)"]
    parts += [f"alpha {lora.get('alpha', 0):g}", *(key for key in ("rslora", "dora") if lora.get(key))]
    parts += [f"dropout {dropout:g}"] if (dropout := lora.get("dropout")) else []
    return ", ".join(parts)


def targets_in_words(lora: Mapping[str, Any]) -> str:
    """Say on which modules the section `lora` of a spec puts the adapter, and which adapter it begins as."""
    names = lora.get("target_modules", "all-linear")
    more = f", … {len(names) - _NAMES} more" if not isinstance(names, str) and len(names) > _NAMES else ""
    targets = names if isinstance(names, str) else ", ".join(names[:_NAMES]) + more
    return f"{targets}; begins as {lora['adapter_path']}" if lora.get("adapter_path") else targets


def kept_in_words(files: KeptFiles) -> str:
    """Say how many versions and checkpoints are kept, which bytes they need at most, and what is free."""
    free = "" if files.free is None else f"; {size(files.free)} free"
    counts = f"{counted(files.versions, 'version')} and {counted(files.checkpoints, 'checkpoint')}"
    return f"keeps {counts}, at most {size(files.total)}{free}"


def present_in_words(files: KeptFiles) -> str:
    """Say how many versions and checkpoints are on disk now."""
    versions = counted(files.present_versions, "version")
    checkpoints = counted(files.present_checkpoints, "checkpoint")
    return f"{versions} and {checkpoints} now, {size(files.present)}"


def set_aside(device: Device) -> str:
    """Say who reserved a device, or that it is quiet, and until when; "" where runs may have it."""
    quiet = "" if device.quiet_until is None else f"quiet until {moment(device.quiet_until)}"
    return "; ".join(part for part in (reserved(device), quiet) if part)


def reserved(device: Device) -> str:
    """Say who reserved a device, and until when; "" where nobody did."""
    row = device.reservation
    if row is None:
        return ""
    lasts = f" for {duration(row.seconds)}" if row.seconds is not None else ""
    if row.until is not None:
        lasts = f" until {moment(row.until)}"
    when = "" if row.since is not None else " once it is free"
    return f"reserved by {row.user}{lasts}{when}" + (f": {row.why}" if row.why else "")


def differing_settings(result: Result, results: Sequence[Result]) -> str:
    """Write the settings in which a result differs from others on the same data, without those in columns."""
    same_data = [other for other in results if other.data == result.data and other.suite == result.suite]
    others = [other.settings for other in same_data]
    keys = sorted({key for settings in others for key in settings} - {"n", "problems"})
    parts = []
    for key in keys:
        value = result.settings.get(key)
        if all(settings.get(key) == value for settings in others):
            continue
        if isinstance(value, list):  # of rewards
            value = " + ".join(str(r.get("name") if isinstance(r, dict) else r) for r in value)
        parts.append(f"{key} {'null' if value is None else value}")
    return ", ".join(parts)
