"""The prompts of a step as rows of a table."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.text import Text

from lorad.text import number, one_line
from lorad.tui.dashboard.run_rows import bar
from lorad.tui.samples.groups import Group
from lorad.tui.samples.text import Scale
from lorad.tui.widgets.columns import Column, Values


class Step(NamedTuple):
    """words: why there are no samples."""

    number: int
    newest: int
    attempt: int
    groups: list[Group]
    words: str = ""


COLUMNS = (
    Column("prompt", 10, 80, 0, rest=True),
    Column("mean", 6, 7, 0, right=True, orders=True),
    Column("reward", 6, 6, 4),
    Column("worst", 6, 7, 5, right=True, orders=True),
    Column("best", 6, 7, 6, right=True, orders=True),
    Column("spread", 7, 8, 3, right=True, orders=True),
    Column("n", 2, 4, 7, right=True),
)
_START = 400  # characters of a prompt that a row may need
_COMMON = 12  # characters from which on what all prompts begin with is left out
_FLAT = "= "  # before a spread of nothing: such a group teaches nothing


def rows(groups: Sequence[Group], measure: Scale, found: Mapping[str, int]) -> dict[str, dict[str, Text]]:
    """found: by group, how often a search found something in it."""
    same = _common([group.prompt for group in groups])
    return {group.id: _cells(group, same, measure, found.get(group.id, 0)) for group in groups}


def _cells(group: Group, same: int, measure: Scale, found: int) -> dict[str, Text]:
    """same: characters that the prompts of all groups begin with."""
    start = one_line(("…" if same else "") + group.prompt[same : same + _START])
    mean, spread, rewards = group.mean, group.spread, group.rewards
    plain = {
        "mean": number(mean),
        "reward": "" if mean is None else bar(measure.share(mean), 6),
        "worst": number(min(rewards, default=None)),
        "best": number(max(rewards, default=None)),
        "spread": f"{'' if spread else _FLAT}{number(spread)}",
        "n": str(len(group.samples)),
    }
    row = {key: Text(value, no_wrap=True, overflow="ellipsis") for key, value in plain.items()}
    row["reward"].stylize("cyan")
    sign = (f"{found}× ", "bold yellow") if found else ""
    return {**row, "prompt": Text.assemble(sign, start, no_wrap=True, overflow="ellipsis")}


def values(group: Group) -> Values:
    """Return the values that the table is ordered by."""
    rewards = group.rewards
    return {
        "mean": group.mean,
        "worst": min(rewards, default=None),
        "best": max(rewards, default=None),
        "spread": group.spread,
    }


def _common(prompts: Sequence[str]) -> int:
    """Return how much all prompts have in common at the start, up to a word; 0 if that is little."""
    first, last = (edge((prompt[: _START * 10] for prompt in prompts), default="") for edge in (min, max))
    most = min(len(first), len(last)) if len(prompts) > 1 else 0
    same = first[: next((i for i in range(most) if first[i] != last[i]), most)]
    same = same[: max(same.rfind(" "), same.rfind("\n")) + 1]
    return len(same) if len(same) >= _COMMON else 0


def head(step: Step, wanted: int | None, measure: Scale, more: Sequence[str]) -> Text:
    """Return the line that says which step is shown and how. wanted: the step that was asked for; None: the
    latest.
    """
    samples = [sample for group in step.groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    failed = sum(bool(sample.error) for sample in samples)
    versions = sorted({sample.version for sample in samples if sample.version})
    parts = [f"@{','.join(versions[:3])}{'…' if len(versions) > 3 else ''}"] if versions else []
    parts += [f"{len(step.groups)} prompts, {len(samples)} samples"] if samples else []
    parts += (
        [f"reward {sum(rewards) / len(rewards):.3f} ({measure.low:g} to {measure.high:g})"] if rewards else []
    )
    parts += [f"✖ {failed} without a reward"] if failed else []
    reads = f"reading step {wanted} … " if wanted not in (None, step.number) else ""
    follows = "● latest" if wanted is None else f"of {step.newest}"
    text = one_line(" · ".join([follows, *parts, *more]))
    return Text.assemble((reads, "bold yellow"), (f"step {step.number} ", "bold"), text)
