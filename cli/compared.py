"""Two runs compared: what they have otherwise, and their curves at equal steps."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from lorad.cli import output, table
from lorad.client.client import Client
from lorad.client.shapes import RunDetails
from lorad.client.words import evals_in_words, steps_in_words

_CURVES = ("reward", "loss")  # where one of the runs has them
_POINTS = 10  # steps that are shown
_DIGITS = {"loss": 4}
_SHA = 12  # characters of a digest that a table shows

_Pair = tuple[Any, Any]  # what the first and the second run have; None: nothing


class _Point(Struct, frozen=True):
    """Figures of both runs at one step, by their names."""

    step: int
    figures: dict[str, _Pair]


class _Difference(Struct, frozen=True):
    """What two runs have otherwise.

    spec: by dotted keys. inputs: digests of data, model, rewards and other files. software: versions.
    same: how many keys of the spec, and which inputs, are alike.
    """

    runs: _Pair
    spec: dict[str, _Pair]
    inputs: dict[str, _Pair]
    software: dict[str, _Pair]
    same: dict[str, list[str]]
    curves: list[_Point]


def compare(runs: tuple[str, str], metrics: Sequence[str] | None, *, every: bool, as_json: bool) -> None:
    """Print what two runs have otherwise. every: all steps that both made. Raises NotFound."""
    client = Client()
    first, second = (client.show(name) for name in runs)
    found = _compared(first, second, _points(client, first, second, metrics, every=every))
    if as_json:
        output.print_json(found)
    else:
        _show(found, first, second)


def _compared(first: RunDetails, second: RunDetails, curves: list[_Point]) -> _Difference:
    from lorad.tui.spec_lines import flat

    # a resume may have changed the steps that are to be made
    changed = [{"trainer.steps": run.steps} if run.steps else {} for run in (first, second)]
    specs = [
        flat(run.spec | {"name": None}) | more for run, more in zip((first, second), changed, strict=True)
    ]
    inputs = [_inputs(run) for run in (first, second)]
    software = [run.begun.software if run.begun else {} for run in (first, second)]
    return _Difference(
        (first.name, second.name),
        _different(*specs),
        _different(*inputs),
        _different(*software),
        {"spec": _alike(*specs), "inputs": _alike(*inputs), "software": _alike(*software)},
        curves,
    )


def _inputs(run: RunDetails) -> dict[str, str]:
    """Return digests of what the newest attempt read: rows, weights, files; not of what is unknown."""
    if run.begun is None:
        return {}
    read = {"data": run.begun.data_sha256, "model": run.begun.model_sha256, **run.begun.inputs}
    if run.reference is not None:
        read["reference"] = run.reference.sha256
    return {key: sha256 for key, sha256 in read.items() if sha256}


def _different(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, _Pair]:
    keys = dict.fromkeys([*first, *second])
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}


def _alike(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return [key for key in first if key in second and first[key] == second[key]]


def _points(
    client: Client, first: RunDetails, second: RunDetails, metrics: Sequence[str] | None, *, every: bool
) -> list[_Point]:
    """Read the figures of steps that both made: some of them, the last one and, without `metrics`, where both
    were evaluated.
    """
    last = min(first.step, second.step)
    stride = 1 if every else max(1, -(-last // _POINTS))
    curves = [_figures(client, run.name, stride, last) for run in (first, second)]
    both = sorted(curves[0].keys() & curves[1].keys())
    wanted = metrics or [
        *(name for name in _CURVES if any(name in one for curve in curves for one in curve.values())),
        "eval",
    ]
    points = [
        _Point(step, {name: (curves[0][step].get(name), curves[1][step].get(name)) for name in wanted})
        for step in both
    ]
    return [point for point in points if any(pair != (None, None) for pair in point.figures.values())]


def _figures(client: Client, run: str, stride: int, last: int) -> dict[int, dict[str, Any]]:
    """Read metrics and evaluations of every so many steps, up to the last one that both made, by step."""
    steps = client.steps(run, every=stride)
    steps += client.steps(run, after=last - 1, limit=1) if last else []
    found: dict[int, dict[str, Any]] = {step.step: {**step.metrics} for step in steps if step.step <= last}
    for evaluation in client.evals(run):
        if evaluation.step <= last:
            found.setdefault(evaluation.step, {}).update(evaluation.figures)
    return found


def _show(found: _Difference, first: RunDetails, second: RunDetails) -> None:
    head = ("", *found.runs)
    states = [run.state + (f": {run.reason}" if run.reason else "") for run in (first, second)]
    evals = [evals_in_words(run) for run in (first, second)]
    rows = [
        ("state", *states),
        ("step", *map(steps_in_words, (first, second))),
        *([("eval", *evals)] if any(evals) else []),
        *((key, *map(_value, pair)) for key, pair in found.spec.items()),
        *((f"sha256 of {key}", *map(_digest, pair)) for key, pair in found.inputs.items()),
        *((f"version of {key}", *map(_value, pair)) for key, pair in found.software.items()),
    ]
    texts = [table.Column(name, kind="fold") for name in found.runs]
    output.print_table((table.Column(head[0]), *texts), rows, empty="")
    if found.curves:
        print()
        names = [*found.curves[0].figures]
        columns = ["step", *(f"{name} {run}" for name in names for run in found.runs)]
        lines = [
            (str(point.step), *(_figure(name, value) for name in names for value in point.figures[name]))
            for point in found.curves
        ]
        output.print_table(columns, lines, empty="")
    else:
        output.note("There is no step that both have made.")
    output.note(_alike_in_words(found, first, second))


def _alike_in_words(found: _Difference, first: RunDetails, second: RunDetails) -> str:
    """Say what is the same in both, and what nobody kept."""
    same = found.same["inputs"]
    parts = [f"{len(found.same['spec'])} keys of the spec"]
    parts += [f"the sha256 of {', '.join(same)}"] if same else []
    parts += [f"the versions of {', '.join(found.same['software'])}"] if found.same["software"] else []
    waits = [f"{run.name} has not begun to work." for run in (first, second) if run.begun is None]
    old = [run.name for run in (first, second) if run.begun is not None and not run.begun.software]
    unknown = [f"What {' and '.join(old)} ran on was not kept."] if old else []
    return " ".join([f"The same: {'; '.join(parts)}.", *waits, *unknown])


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _digest(sha256: str | None) -> str:
    return "-" if sha256 is None else sha256[:_SHA]


def _figure(name: str, value: float | None) -> str:
    return output.number(value, _DIGITS.get(name, 3)) or "-"
