"""The report of a day, as Markdown for people and as JSON: written anew after every stage."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.sizes import Size
from benchmarks.gpu_day.stages import Outcome
from benchmarks.gpu_day.targets import judge
from lorad.files import write_whole


@dataclass(frozen=True)
class Day:
    """What is reported. device: as torch names it; label: for people."""

    size: Size
    device: str
    label: str
    outcomes: Sequence[Outcome]

    @property
    def has_passed(self) -> bool:
        return all(outcome.state == "passed" for outcome in self.outcomes)

    @property
    def counts(self) -> bool:
        """Return whether the targets are about a day like this one."""
        return self.device != "cpu" and self.size.name == "8b"


def write(day: Day, folder: Path) -> None:
    """Write `report.md` and `report.json`."""
    write_whole(folder / "report.json", (json.dumps(_data(day), indent=2) + "\n").encode())
    write_whole(folder / "report.md", ("\n".join(_lines(day)) + "\n").encode())


def _data(day: Day) -> dict[str, Any]:
    judged = judge({outcome.stage.name: outcome.figures for outcome in day.outcomes})
    return {
        "size": day.size.name,
        "device": day.device,
        "label": day.label,
        "passed": day.has_passed,
        "seconds": sum(outcome.seconds for outcome in day.outcomes),
        "stages": [
            {
                "name": outcome.stage.name,
                "state": outcome.state,
                "seconds": outcome.seconds,
                "limit": outcome.stage.seconds,
                "error": outcome.error,
                "figures": dict(outcome.figures),
            }
            for outcome in day.outcomes
        ],
        "targets": [
            {
                "figure": found.target.figure,
                "about": found.target.about,
                "wanted": found.target.wanted,
                "found": found.value,
                "reached": found.is_reached if day.counts else None,
            }
            for found in judged
        ],
    }


def _lines(day: Day) -> Iterator[str]:
    seconds = sum(outcome.seconds for outcome in day.outcomes)
    failed = [outcome for outcome in day.outcomes if outcome.has_failed]
    yield f"# A GPU day: size {day.size.name} on {day.label} ({day.device})"
    yield ""
    yield _verdict(day, failed) + f" It took {seconds:.0f} s."
    if day.device == "cpu":
        yield "This was a CPU: the figures say that the stages work, and nothing about a GPU."
    yield from _table(
        ("stage", "what it does", "state", "seconds", "limit"),
        [
            (o.stage.name, o.stage.about, o.state, f"{o.seconds:.1f}", f"{o.stage.seconds:g}")
            for o in day.outcomes
        ],
    )
    for outcome in failed:
        yield from ("", f"## What went wrong: {outcome.stage.name}", "", "```text", outcome.error, "```")
    yield from ("", "## Targets", "", "They are wanted of a Qwen3-8B on one H200.")
    yield from _targets(day)
    for outcome in day.outcomes:
        if outcome.figures:
            yield from ("", f"## {outcome.stage.name}")
            yield from _table(
                ("figure", "value"), [(name, _shown(value)) for name, value in outcome.figures.items()]
            )


def _verdict(day: Day, failed: Sequence[Outcome]) -> str:
    if failed:
        return f"**Failed: {', '.join(outcome.stage.name for outcome in failed)}.**"
    left = [outcome.stage.name for outcome in day.outcomes if outcome.state != "passed"]
    return f"Not over yet: {', '.join(left)}." if left else "Every stage passed."


def _targets(day: Day) -> Iterator[str]:
    words = {True: "yes", False: "**no**", None: "not measured"}
    rows = []
    for found in judge({outcome.stage.name: outcome.figures for outcome in day.outcomes}):
        reached = words[found.is_reached] if day.counts or found.is_reached is None else "another size"
        value = "" if found.value is None else _shown(found.value)
        rows.append((found.target.about, found.target.wanted, value, reached))
    return _table(("what", "wanted", "found", "reached"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield ""
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        f"{value:.4g}"
        if isinstance(value, float) and abs(value) < 1000
        else (f"{value:,.0f}" if isinstance(value, float) else str(value))
    )
