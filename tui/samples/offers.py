"""What the pickers of the samples tab offer, as lines by key."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.text import Text

from lorad.client.choice import CUT, TRUNCATED
from lorad.client.histogram import Bin, spread
from lorad.records.runs import Run, RunDetails
from lorad.spec.kept import MAIN
from lorad.text import one_line
from lorad.tui.dashboard.run_rows import state_text
from lorad.tui.samples.groups import Sample

TRAINING = "training"
_BAR = 30  # cells of the longest bar


def sources(run: RunDetails) -> dict[str, Text]:
    """Offer training, and the sets of held-out problems of a run."""
    sets = run.spec.get("eval", {}).get("sets", {})
    says = {TRAINING: "samples that it trains on", MAIN: "evaluation of data.eval"}
    says |= {name: one_line(str(section.get("data", ""))) for name, section in sets.items()}
    return {name: Text.assemble((f"{one_line(name):<16}", "bold"), line) for name, line in says.items()}


def filters(samples: Sequence[Sample]) -> dict[str, Text]:
    """Offer filters by end and failure, and by ranges of rewards and lengths; each says what it leaves."""
    ends = Counter(sample.ending for sample in samples if sample.ending)
    options = {"": ("all", len(samples))}
    options |= {f'end:"{end}"': (f"ended: {end}", count) for end, count in ends.most_common()}
    options |= {TRUNCATED: ("cut off, by a limit of tokens", sum(ends[end] for end in CUT))}
    options |= {"failed": ("without a reward: it failed", sum(bool(sample.error) for sample in samples))}
    lines = {key: Text(f"{count:>6}  {one_line(says)}") for key, (says, count) in options.items()}
    counted = spread(samples)
    return lines | _bars("reward", counted.rewards) | _bars("length", counted.lengths)


def _bars(name: str, bins: Sequence[Bin]) -> dict[str, Text]:
    """Draw a bar for each range of a figure, with a filter as its key; nothing where all are the same."""
    lines = {}
    most = max((part.count for part in bins), default=0)
    for place, part in enumerate(bins if len(bins) > 1 else ()):
        end = "<=" if place == len(bins) - 1 else "<"
        is_value = part.low == part.high
        key = f"{name}={part.low!r}" if is_value else f"{name}>={part.low!r} {name}{end}{part.high!r}"
        says = f"{name} {part.low:.6g}" if is_value else f"{name} {part.low:.6g} to {part.high:.6g}"
        bar = "█" * math.ceil(_BAR * part.count / most)
        lines[key] = Text.assemble(f"{part.count:>6}  {says:<26}  ", (bar, "cyan"))
    return lines


def runs(rows: Iterable[Run], but: str) -> dict[str, Text]:
    """Offer other runs than `but`."""
    return {
        run.name: Text.assemble((one_line(run.name), "bold"), "  ", state_text(run), f"  step {run.step}")
        for run in rows
        if run.name != but
    }
