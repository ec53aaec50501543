"""Show everything about a run, why it does not learn, where it is, and how it differs from another."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from lorad.alarms import alarms
from lorad.box.config import config_of
from lorad.cli import candidates, output, table
from lorad.cli.options import AsJson, Run
from lorad.client.client import Client
from lorad.client.words import (
    adapter_in_words,
    differing_settings,
    evals_in_words,
    failures,
    kept_in_words,
    likelihood_in_words,
    phase,
    place_in_words,
    present_in_words,
    rate_in_words,
    sets_in_words,
    starts_in_words,
    steps_in_words,
    targets_in_words,
)
from lorad.records.measured import Result
from lorad.records.runs import Attempt, Beginning, KlReference, RunDetails, Trainable

_RESULTS = 10  # that are shown


def show(run: Run, as_json: AsJson = False) -> None:
    """Show state, figures, processes, attempts, and where the spec differs from the defaults (--json: all of
    it).
    """
    client = Client()
    data = client.show(run)
    if as_json:
        output.print_json(data)
        return
    troubles = [("trouble", line) for line in client.status().troubles if f"run {run}: " in line]
    raised = [("alarm", alarm.says) for alarm in alarms([data], config_of(client.home).alarms)]
    spec = [("spec", line) for line in _spec_lines(data.spec)]
    table.print_fields([*described(data), *troubles, *raised, *spec])


def described(data: RunDetails) -> list[tuple[str, str]]:
    """Return what is known of a run, but its spec, each with its name: facts, sets, expectations, results,
    attempts, warnings.
    """
    rates = data.rates
    lora = data.spec.get("lora")
    lines = {
        "run": data.name,
        "state": phase(data) + (f" ({data.reason})" if data.reason else ""),
        "why": data.waiting or data.detail,
        "starts": starts_in_words(data),
        "queue": place_in_words(data),
        "step": steps_in_words(data, " of "),
        "doing": data.doing,
        "reward": output.number(data.reward),
        "loss": _loss(data),
        "eval": evals_in_words(data),
        "held out": likelihood_in_words(data),
        "best": _best(data),
        "version": None if data.version is None else f"{data.name}@{data.version}",
        "speed": f"{output.number(rates.tokens_per_second, 0)} tok/s, "
        f"{output.number(rates.step_seconds, 2)} s a step"
        if rates.tokens_per_second is not None
        else None,
        "failures": failures(data),
        "trainable": _trainable(data.trainable),
        "adapter": lora and adapter_in_words(lora),
        "targets": lora and targets_in_words(lora),
        "algorithm": _algorithm(data.spec),
        "routes": _routes(data.begun),
        "data": data.data_format and f"read as {data.data_format}",
        "rate": rate_in_words(data),
        "origin": data.origin,
        "reference": _reference(data.reference),
        "sweep": data.sweep,
        "group": data.group,
        "tags": " ".join(data.tags),
        "note": data.note,
        "pool": data.pool,
        "owner": data.owner,
        "created": f"{output.age(data.created_at)} ago",
        "directory": data.directory,
        "files": data.files and f"{present_in_words(data.files)}; {kept_in_words(data.files)}",
        "processes": ", ".join(f"{p.role} {p.pid}" for p in data.processes) or "none",
    }
    attempts = [("attempt", f"{attempt.attempt}: {_attempt_in_words(attempt)}") for attempt in data.attempts]
    warnings = [("warning", str(warning)) for warning in data.warnings]
    fields = [(key, str(value)) for key, value in lines.items() if value]
    sets = [("set", f"{name}: {words}") for name, words in sets_in_words(data.sets).items()]
    expected = [("expect", expectation.in_words) for expectation in data.expected]
    results = [("result", _result(result, data.results)) for result in data.results[-_RESULTS:]]
    return [*fields, *sets, *expected, *results, *attempts, *warnings]


def why(run: Run, as_json: AsJson = False) -> None:
    """Say why a run does not learn: what its journal and samples show, the most likely cause first, each with
    its figures and what to try next.

    `cause` explains by itself that nothing is learnt, `look` may be meant. docs/why.md says what each finding
    means. A run of which nothing is found gets one sentence.
    """
    from lorad.why.table import explain

    answer = explain(Client(), run)
    if as_json:
        output.print_json(answer)
        return
    for finding in answer.findings:
        figures = "  ".join(f"{name} {_figure(value)}" for name, value in finding.figures.items())
        fields = {finding.severity: f"{finding.name}: {finding.says}", "": figures, "try": finding.next}
        table.print_fields([(name, value) for name, value in fields.items() if value])
    if answer.findings:
        output.note(f"{answer.says} {answer.looked}")
    else:
        output.report(f"Nothing was found that keeps {run} from learning. {answer.says} {answer.looked}")


def _figure(value: float | int | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def open_(run: Run, as_json: AsJson = False) -> None:
    """Print the directory of a run, and nothing else: `cd $(lorad open RUN)`."""
    data = Client().show(run)
    output.print_json({"run": data.name, "directory": data.directory}) if as_json else print(data.directory)


def diff(
    runs: Annotated[
        tuple[str, str],
        typer.Argument(metavar="RUN RUN", show_default=False, autocompletion=candidates.runs),
    ],
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="Curves of this metric; give it several times. Default: reward, loss and eval.",
            show_default=False,
            autocompletion=candidates.metrics,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Every step that both made.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two runs: keys of the spec, digests of data, rewards and model, versions of packages, curves at
    equal steps.
    """
    from lorad.cli.compared import compare

    compare(runs, metric, every=every, as_json=as_json)


def _loss(data: RunDetails) -> str:
    """Say what the last step of a run that samples nothing came to, of dpo also its pairs; "" otherwise."""
    signals = data.signals
    pairs = "" if signals.pair_accuracy is None else f", {signals.pair_accuracy:.0%} of pairs right"
    apart = signals.reward_margin
    margin = "" if apart is None else f", reward margin {output.number(apart)}"
    return output.number(signals.loss) + pairs + margin


def _result(one: Result, among: Sequence[Result]) -> str:
    settings = f" with {otherwise}" if (otherwise := differing_settings(one, among)) else ""
    figures = "  ".join(f"{name} {output.number(value)}" for name, value in one.metrics.items())
    return f"{one.run}@{one.version} on {one.data}{settings}: {figures} ({one.problems} problems)"


def _best(data: RunDetails) -> str:
    """Say which version is the best, where it is another one than the current; "" otherwise."""
    best = data.best
    if best is None or best.version == data.version:
        return ""
    return f"{data.name}@{best.version}, {best.metric} {output.number(best.value)} at step {best.step}"


def _algorithm(spec: Mapping[str, Any]) -> str:  # a spec as plain data, with any keys
    """Say what the run's algorithm is made of; "" for a spec of another lorad."""
    from msgspec import ValidationError, convert

    from lorad.spec.algorithm import Algorithm

    try:
        algorithm = convert(spec.get("algorithm", {}), Algorithm)
    except ValidationError:
        return ""
    return f"{algorithm.name}: {algorithm.in_words}"


def _spec_lines(spec: Mapping[str, Any]) -> list[str]:  # a spec as plain data, with any keys
    """Return what differs from the defaults, in the form that `lorad run` takes."""
    from lorad.tui.spec_lines import differing, flat

    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in differing(flat(spec)).items()
    ]


def _attempt_in_words(attempt: Attempt) -> str:
    """Say where an attempt started, what was changed for it, and how it ended."""
    start = "fresh" if attempt.resumed_from is None else f"from step {attempt.resumed_from}"
    changed = "".join(
        f", {key}={output.printable(value if isinstance(value, str) else json.dumps(value))}"
        for key, value in attempt.changed.items()
    )
    return f"{start}{changed}, {attempt.reason or 'running'}{_why(attempt)}"


def _why(attempt: Attempt) -> str:
    """Return the first line of the cause when an attempt did not end as planned."""
    if attempt.reason in (None, "completed") or not attempt.detail:
        return ""
    return f": {output.printable(attempt.detail.partition(chr(10))[0])}"


def _reference(found: KlReference | None) -> str | None:
    """Say what KL is measured against, unless that is the base."""
    return f"KL is to {found.name}, sha256 {found.sha256[:12]}" if found else None


def _routes(begun: Beginning | None) -> str | None:
    """Say whether the trainer of a mixture sends tokens where the engine did."""
    return "recorded and replayed" if begun is not None and begun.routes == "record" else None


def _trainable(found: Trainable | None) -> str | None:
    """Say how much of the model learns."""
    if not found:
        return None
    share = "" if found.share is None else f" ({found.share:.2%} of all parameters)"
    return f"{found.parameters:,}{share}"
