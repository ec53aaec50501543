"""Compare runs: what they have otherwise, and of two their curves at equal steps."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from lorad.cli import output, table
from lorad.client.client import Client
from lorad.client.words import evals_in_words, phase, steps_in_words
from lorad.records.runs import Beginning, RunDetails

_CURVES = ("reward", "loss")  # where one of the runs has them
_POINTS = 10  # steps that are shown
_DIGITS = {"loss": 4}
_SHA = 12  # characters of a digest that a table shows

_DATA = "data.train"

_Each = tuple[Any, ...]  # what each run has, in their order; None: nothing
_Trail = list[tuple[int, Any]]  # values of a key, each with the step after which it holds


class _StepFigures(Struct, frozen=True):
    """Figures of both runs at one step, by their names."""

    step: int
    figures: dict[str, _Each]


class Difference(Struct, frozen=True):
    """Holds what runs have otherwise.

    spec: the differing values by dotted key, as the spec is now.
    changed: by key that a resume changed, the values of each run as [step after which it holds, value].
    inputs: the digests of data, model, rewards and other files.
    software: the versions of packages.
    same: which keys of the spec, inputs and packages are alike.
    """

    runs: _Each
    spec: dict[str, _Each]
    changed: dict[str, _Each]
    inputs: dict[str, _Each]
    software: dict[str, _Each]
    same: dict[str, list[str]]
    curves: list[_StepFigures]

    @property
    def values(self) -> dict[str, _Each]:
        """Return the values that each key of the spec had, where they are not the same in all."""
        return {key: tuple([(0, value)] for value in each) for key, each in self.spec.items()} | self.changed


def compare(runs: tuple[str, str], metrics: Sequence[str] | None, *, every: bool, as_json: bool) -> None:
    """Print what two runs have otherwise. Raises NotFound.

    metrics: which are shown at the steps that both made; None for the usual ones, and the evaluations.
    every: whether all these steps are shown, and not every so many and the last one.
    """
    client = Client()
    first, second = (client.show(name) for name in runs)
    last = min(first.step, second.step)
    stride = 1 if every else max(1, -(-last // _POINTS))
    curves = []
    for run in (first, second):
        steps = client.steps(run.name, every=stride)
        steps += client.steps(run.name, after=last - 1, limit=1) if last else []
        curve: dict[int, dict[str, Any]] = {s.step: {**s.metrics} for s in steps if s.step <= last}
        for evaluation in client.evals(run.name):
            if evaluation.step <= last:
                curve.setdefault(evaluation.step, {}).update(evaluation.figures)
        curves.append(curve)
    measured = {name for curve in curves for figures in curve.values() for name in figures}
    shown = metrics or [*(name for name in _CURVES if name in measured), "eval"]
    points = [
        _StepFigures(step, {name: (curves[0][step].get(name), curves[1][step].get(name)) for name in shown})
        for step in sorted(curves[0].keys() & curves[1].keys())
    ]
    points = [point for point in points if any(pair != (None, None) for pair in point.figures.values())]
    difference = compared((first, second), points)
    if as_json:
        output.print_json(difference)
    else:
        _show(difference, first, second)


def compared(runs: Sequence[RunDetails], curves: list[_StepFigures]) -> Difference:
    """Find what the runs have otherwise. curves: their figures at equal steps."""
    from lorad.tui.spec_lines import flat

    # a resume may have changed the steps that are to be made
    specs = [
        flat(run.spec | {"name": None}) | ({"trainer.steps": run.steps} if run.steps else {}) for run in runs
    ]
    ways = []  # the keys of the spec that resumes of each run changed; what was rewound is left out
    for run in runs:
        trails: dict[str, _Trail] = {}
        for attempt in run.attempts:
            begun = attempt.resumed_from or 0
            before = trails
            trails = {}
            for key in dict.fromkeys([*before, *attempt.changed]):
                trail = before.get(key, [(0, attempt.before.get(key))])
                value = attempt.changed.get(key, trail[-1][1])
                common = [part for part in trail if part[0] < begun]
                trails[key] = common if common and common[-1][1] == value else [*common, (begun, value)]
        ways.append(trails)
    values = [
        {key: [(0, value)] for key, value in spec.items()} | own
        for spec, own in zip(specs, ways, strict=True)
    ]
    on_the_way = {key for trails in ways for key in trails}
    changed = {key: each for key, each in _different(*values).items() if key in on_the_way}
    same = [key for key in _alike(*specs) if key not in changed]
    beginnings = [run.begun or Beginning() for run in runs]
    # where the files of data were not hashed for all runs, the digest of its rows stands for them
    are_hashed = all(any(key.startswith(_DATA) for key in at.inputs) for at in beginnings if at.attempt)
    inputs = []
    for run, at in zip(runs, beginnings, strict=True):
        files = {key: sha256 for key, sha256 in at.inputs.items() if are_hashed or not key.startswith(_DATA)}
        rows = "" if are_hashed else at.data_sha256
        reference = run.reference.sha256 if run.reference is not None else ""
        read = {"data": rows, "model": at.model_sha256, **files, "reference": reference}
        inputs.append({key: sha256 for key, sha256 in read.items() if sha256})
    software = [run.begun.software if run.begun else {} for run in runs]
    return Difference(
        tuple(run.name for run in runs),
        _different(*specs),
        changed,
        _different(*inputs),
        _different(*software),
        {"spec": same, "inputs": _alike(*inputs), "software": _alike(*software)},
        curves,
    )


def _different(*parts: Mapping[str, Any]) -> dict[str, _Each]:
    keys = dict.fromkeys(key for part in parts for key in part)
    each = {key: tuple(part.get(key) for part in parts) for key in keys}
    return {key: values for key, values in each.items() if any(value != values[0] for value in values)}


def _alike(first: Mapping[str, Any], *others: Mapping[str, Any]) -> list[str]:
    return [key for key in first if all(key in other and other[key] == first[key] for other in others)]


def differences(difference: Difference, runs: Sequence[RunDetails]) -> list[tuple[str, ...]]:
    """Return how the runs stand, and what they have otherwise, a row each: its name, and what each has."""
    evals = [evals_in_words(run) for run in runs]
    equal = dict.fromkeys(difference.same["inputs"], " (equal bytes)")  # in files that have other names
    return [
        ("state", *(phase(run) + (f": {run.reason}" if run.reason else "") for run in runs)),
        ("step", *map(steps_in_words, runs)),
        *([("eval", *evals)] if any(evals) else []),
        *((f"{key}{equal.get(key, '')}", *map(_trail, each)) for key, each in difference.values.items()),
        *(
            (f"sha256 of {key}", *("-" if sha256 is None else sha256[:_SHA] for sha256 in each))
            for key, each in difference.inputs.items()
        ),
        *((f"version of {key}", *map(_value, each)) for key, each in difference.software.items()),
    ]


def _show(difference: Difference, first: RunDetails, second: RunDetails) -> None:
    """Print what differs, the figures at equal steps, what is the same in both, and what nobody kept."""
    texts = [table.Column(name, kind="fold") for name in difference.runs]
    output.print_table((table.Column(""), *texts), differences(difference, (first, second)), empty="")
    if difference.curves:
        print()
        names = [*difference.curves[0].figures]
        columns = ["step", *(f"{name} {run}" for name in names for run in difference.runs)]
        lines = []
        for point in difference.curves:
            values = [(name, value) for name in names for value in point.figures[name]]
            figures = [output.number(value, _DIGITS.get(name, 3)) or "-" for name, value in values]
            lines.append((str(point.step), *figures))
        output.print_table(columns, lines, empty="")
    else:
        output.note("There is no step that both have made.")
    same = difference.same["inputs"]
    parts = [f"{len(difference.same['spec'])} keys of the spec"]
    parts += [f"the sha256 of {', '.join(same)}"] if same else []
    if software := difference.same["software"]:
        parts.append(f"the versions of {', '.join(software)}")
    waits = [f"{run.name} has not begun to work." for run in (first, second) if run.begun is None]
    old = [run.name for run in (first, second) if run.begun is not None and not run.begun.software]
    unknown = [f"What {' and '.join(old)} ran on was not kept."] if old else []
    output.note(" ".join([f"The same: {'; '.join(parts)}.", *waits, *unknown]))


def _value(value: Any) -> str:
    from lorad.tui.spec_lines import brief

    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(brief(value), ensure_ascii=False)


def _trail(values: Sequence[tuple[int, Any]]) -> str:
    """Write the values that a key had: 0.001, 0.0003 after step 5."""
    return ", ".join(f"{_value(value)}{f' after step {step}' * bool(step)}" for step, value in values)
