"""Describe a run in one line."""

from lorad.client.shapes import Run, RunDetails


def why(run: Run) -> str:
    """Say why a run waits, or what went wrong, in one line."""
    bad = run.reason not in (None, "completed", "stopped")
    words = " ".join((run.waiting or (run.detail if bad else "")).split())
    return "; ".join(filter(None, (words, failures(run))))


def failures(run: Run) -> str:
    """Say how many rewards of a run failed and how many of its updates were skipped; "" for none."""
    counts = {
        "rewards failed": run.signals.failed_rewards_total,
        "updates skipped": run.signals.skipped_updates_total,
    }
    return ", ".join(f"{count:,.0f} {words}" for words, count in counts.items() if count)


def rate_in_words(data: RunDetails) -> str:
    """Say whether the learning rate is the one that fits; "" where nothing was looked up."""
    lr = (data.spec.get("trainer") or {}).get("lr")
    if data.rate is None or lr is None:
        return ""
    if lr == data.rate.lr:
        return f"trainer.lr is {lr:g}: it fits {data.rate.why}"
    return f"trainer.lr is {lr:g}; {data.rate.lr:g} fits {data.rate.why}"
