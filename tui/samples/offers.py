"""What the pickers of the samples tab offer, as lines by key."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.text import Text

from lorad.client.choice import CUT, TRUNCATED
from lorad.records.runs import Run, RunDetails
from lorad.spec.kept import MAIN
from lorad.text import one_line
from lorad.tui.dashboard.run_rows import state_text
from lorad.tui.samples.groups import Sample

TRAINING = "training"


def sources(run: RunDetails) -> dict[str, Text]:
    """Offer training, and the sets of held-out problems of a run."""
    sets = run.spec.get("eval", {}).get("sets", {})
    says = {TRAINING: "samples that it trains on", MAIN: "evaluation of data.eval"}
    says |= {name: one_line(str(one.get("data", ""))) for name, one in sets.items()}
    return {name: Text.assemble((f"{one_line(name):<16}", "bold"), line) for name, line in says.items()}


def filters(samples: Sequence[Sample]) -> dict[str, Text]:
    """Offer filters by end, failure and reward, each with how many samples it leaves."""
    ends = Counter(one.ending for one in samples if one.ending)
    options = {"": ("all", len(samples))}
    options |= {f'end:"{end}"': (f"ended: {end}", count) for end, count in ends.most_common()}
    options |= {TRUNCATED: ("cut off, by a limit of tokens", sum(ends[end] for end in CUT))}
    options |= {"failed": ("without a reward: it failed", sum(bool(one.error) for one in samples))}
    rewards = [one.reward for one in samples if one.reward is not None]
    if rewards and min(rewards) < max(rewards):
        for sign, bound, says in (("<=", min(rewards), "lowest"), (">=", max(rewards), "highest")):
            options[f"reward{sign}{bound!r}"] = (f"the {says} reward", rewards.count(bound))
    return {key: Text(f"{count:>6}  {one_line(says)}") for key, (says, count) in options.items()}


def runs(rows: Iterable[Run], but: str) -> dict[str, Text]:
    """Offer other runs than `but`."""
    return {
        run.name: Text.assemble((one_line(run.name), "bold"), "  ", state_text(run), f"  step {run.step}")
        for run in rows
        if run.name != but
    }
