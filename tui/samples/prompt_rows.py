"""The prompts of a step, or its samples, as rows of a table."""

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.text import Text

from lorad.text import number, one_line, question
from lorad.tui.dashboard.run_rows import Lazy, bar
from lorad.tui.samples.groups import Group
from lorad.tui.samples.reading import Step
from lorad.tui.samples.text import Scale
from lorad.tui.widgets.columns import Cells, Columns, TableColumn, TableRow, Values, row_of

_TURNS = TableColumn("turns", 5, 6, 2, right=True, orders=True)
_FIRST = (
    TableColumn("prompt", 12, 80, 0, rest=True),
    TableColumn("mean", 6, 7, 0, right=True, orders=True),
    TableColumn("reward", 6, 6, 4),
    TableColumn("worst", 6, 7, 6, right=True, orders=True),
    TableColumn("best", 6, 7, 7, right=True, orders=True),
    TableColumn("spread", 7, 8, 3, right=True, orders=True),
)
_LAST = (
    TableColumn("end", 6, 22, 1, orders=True, shrinks=6),
    TableColumn("tokens", 6, 7, 8, right=True, orders=True),
    TableColumn("failed", 6, 6, 9, right=True, orders=True),
    TableColumn("n", 2, 4, 10, right=True),
)
_SAMPLES = (
    TableColumn("completion", 10, 200, 0, rest=True),
    TableColumn("reward", 6, 7, 0, right=True, orders=True),
    TableColumn("advantage", 9, 9, 6, right=True, orders=True),
)
_SAMPLES_LAST = (
    TableColumn("end", 6, 8, 1, orders=True),
    TableColumn("length", 6, 7, 4, right=True, orders=True),
    TableColumn("logprob", 7, 8, 7, right=True, orders=True),
    TableColumn("prompt", 6, 6, 5, right=True, orders=True),
    TableColumn("n", 2, 4, 8, right=True),
)
_START = 400  # characters of a prompt that a row may need
_COMMON = 12  # characters from which on what all prompts begin with is left out
_FLAT = "= "  # before a spread of nothing: such a group teaches nothing


def columns(groups: Iterable[Group], *, of_samples: bool) -> Columns:
    """Return the columns of the table of prompts, or of that of samples; `turns` where there are episodes."""
    turns = (_TURNS,) if any(sample.turn_count > 1 for group in groups for sample in group.samples) else ()
    return (*_SAMPLES, *turns, *_SAMPLES_LAST) if of_samples else (*_FIRST, *turns, *_LAST)


def rows(groups: Sequence[Group], measure: Scale, matches: Mapping[str, int]) -> dict[str, TableRow]:
    """Make the rows of prompts. matches: how often a search found something in each group."""
    questions = [question(group.prompt) for group in groups]
    starts = [text[: _START * 10] for text in questions]
    first = min(starts, default="")
    last = max(starts, default="")
    most = min(len(first), len(last)) if len(starts) > 1 else 0
    common = first[: next((i for i in range(most) if first[i] != last[i]), most)]
    same = max(common.rfind(" "), common.rfind("\n")) + 1  # up to a word
    if same < _COMMON:
        same = 0
    table = {}
    for group, text in zip(groups, questions, strict=True):
        mean = group.mean
        worst = min(group.rewards, default=None)
        best = max(group.rewards, default=None)
        samples = group.samples
        count = max(len(samples), 1)
        turns = sum(sample.turn_count for sample in samples) / count
        tokens = sum(sample.size for sample in samples) / count
        failed = sum(bool(sample.error) for sample in samples)
        ends = Counter(sample.ending or "?" for sample in samples).most_common()
        table[group.id] = row = row_of(
            {
                "mean": (number(mean), mean),
                "reward": "" if mean is None else bar(measure.share(mean), 6),
                "worst": (number(worst), worst),
                "best": (number(best), best),
                "spread": (number(group.spread), group.spread),
                "turns": (number(turns, 1), turns),
                "end": ends[0][0] if len(ends) == 1 else " ".join(f"{n}×{end}" for end, n in ends),
                "tokens": (number(tokens, 0), tokens),
                "failed": (f"✖ {failed}" if failed else "", failed),
                "n": len(samples),
            }
        )
        row.cells["spread"] = Text(f"{'' if group.spread else _FLAT}{number(group.spread)}")
        row.cells["reward"].stylize("cyan")
        row.cells["failed"].stylize("red")
        start = one_line((("…" if same else "") + text[same:])[:_START])  # what tells it from the others
        row.cells["prompt"] = _with_sign(matches.get(group.id, 0), start)
    return table


def _with_sign(matches: int, text: str) -> Text:
    return Text.assemble((f"{matches}× ", "bold yellow") if matches else "", text)


# -- samples, each in a row of its own -----------------------------------------------------------------------
def sample_key(group: Group, place: int) -> str:
    return f"{place} {group.id}"


class SampleRows:
    """Makes the row of a sample when the table shows it, since a step may have thousands.

    matches: by group and place, how often a search found something.
    places: by row the group, and the place of the sample in it.
    """

    def __init__(self, groups: Sequence[Group], matches: Mapping[tuple[str, int], int]) -> None:
        self.places = {
            sample_key(group, n): (group, n) for group in groups for n in range(len(group.samples))
        }
        self._matches = matches
        self.cells = Lazy(self.places, functools.cache(self._cells))
        self.values = Lazy(self.places, self._values)

    def _cells(self, key: str) -> Cells:
        group, place = self.places[key]
        sample = group.samples[place]
        plain = {
            "reward": "✖" if sample.reward is None else number(sample.reward),
            "advantage": "" if sample.advantage is None else f"{sample.advantage:+.3f}",
            "turns": str(sample.turn_count),
            "end": sample.ending,
            "length": str(sample.size or ""),
            "logprob": number(sample.logprob),
            "prompt": str(group.rank + 1),
            "n": f"#{sample.index}",
        }
        row = {name: Text(value) for name, value in plain.items()}
        row["reward"].stylize("red" if sample.reward is None else "cyan")
        last = next((part for part in reversed(sample.parts) if part.kind in ("said", "call")), None)
        text = "" if last is None else last.note or sample.completion[last.start : last.end]
        begin = one_line(("… " if sample.turn_count > 1 else "") + text[: _START * 4])[:_START]
        return {**row, "completion": _with_sign(self._matches.get((group.id, place), 0), begin)}

    def _values(self, key: str) -> Values:
        group, place = self.places[key]
        sample = group.samples[place]
        return {
            "reward": sample.reward,
            "advantage": sample.advantage,
            "turns": sample.turn_count,
            "end": sample.ending,
            "length": sample.size,
            "logprob": sample.logprob,
            "prompt": group.rank,
        }


def head(
    step: Step, shown: Sequence[Group], asked_for: int | None, measure: Scale, more: Sequence[str]
) -> Text:
    """Return the line that says which step is shown and how.

    shown: what a filter left.
    asked_for: the number of the step that was asked for; None: the latest.
    """
    samples = [sample for group in shown for sample in group.samples]
    whole = sum(len(group.samples) for group in step.groups)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    failed = sum(bool(sample.error) for sample in samples)
    versions = sorted({sample.version for sample in samples if sample.version})
    parts = [f"@{','.join(versions[:3])}{'…' if len(versions) > 3 else ''}"] if versions else []
    of = "" if len(samples) == whole else f" of {whole}"
    parts += [f"{len(shown)} prompts, {len(samples)}{of} samples"] if whole else []
    parts += (
        [f"reward {sum(rewards) / len(rewards):.3f} ({measure.low:g} to {measure.high:g})"] if rewards else []
    )
    parts += [f"✖ {failed} without a reward"] if failed else []
    is_there = asked_for is None or step.number in (asked_for, -1)
    reads = "" if is_there or step.set else f"reading step {asked_for} … "
    follows = "● latest" if asked_for is None else f"of {step.newest}"
    text = one_line(" · ".join([follows, *parts, *more]))
    name = (f"eval {one_line(step.set)} ", "bold cyan") if step.set else ""
    return Text.assemble((reads, "bold yellow"), name, (f"step {max(step.number, 0)} ", "bold"), text)
