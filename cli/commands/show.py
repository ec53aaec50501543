"""Show everything about a run, why it does not learn, where it is, and how it differs from another."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from lorad.alarms import alarms
from lorad.box.paths import Home
from lorad.cli import candidates, output, table
from lorad.cli.options import AsJson, Run
from lorad.client import words
from lorad.client.boxes.hosts import limits_of
from lorad.client.client import Client
from lorad.records.runs import Attempt, RunDetails

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
    raised = [("alarm", alarm.says) for alarm in alarms([data], limits_of(client.where))]
    spec = [("spec", line) for line in _spec_lines(data.spec)]
    table.print_fields([*described(data), *troubles, *raised, *spec])


def described(data: RunDetails) -> list[tuple[str, str]]:
    """Return by name what is known of a run, but its spec: facts, sets, results, attempts, warnings …"""
    rates = data.rates
    signals = data.signals
    best = data.best
    pairs = "" if signals.pair_accuracy is None else f", {signals.pair_accuracy:.0%} of pairs right"
    margin = signals.reward_margin
    pairs += "" if margin is None else f", reward margin {output.number(margin)}"
    best_words = trainable = speed = ""
    if rates.tokens_per_second is not None:
        per_step = output.number(rates.step_seconds, 2)
        speed = f"{output.number(rates.tokens_per_second, 0)} tok/s, {per_step} s a step"
    if best is not None and best.version != data.version:
        value = output.number(best.value)
        best_words = f"{data.name}@{best.version}, {best.metric} {value} at step {best.step}"
    if data.trainable:
        share = data.trainable.share
        trainable = f"{data.trainable.parameters:,}"
        trainable += "" if share is None else f" ({share:.2%} of all parameters)"
    kl_is_to = data.reference and f"{data.reference.name}, sha256 {data.reference.sha256[:12]}"
    lines = {
        "run": data.name,
        "state": words.phase(data) + (f" ({data.reason})" if data.reason else ""),
        "why": data.waiting or data.detail,
        "starts": words.starts_in_words(data),
        "queue": words.place_in_words(data),
        "step": words.steps_in_words(data, " of "),
        "doing": data.doing,
        "reward": output.number(data.reward),
        "loss": output.number(signals.loss) + pairs,  # of a run that samples nothing
        "eval": words.evals_in_words(data),
        "held out": words.likelihood_in_words(data),
        "best": best_words,
        "version": None if data.version is None else f"{data.name}@{data.version}",
        "speed": speed,
        "failures": words.failures(data),
        "trainable": trainable,
        "adapter": words.adapter_in_words(data.spec["lora"]) if data.spec.get("lora") else "",
        "targets": words.targets_in_words(data.spec["lora"]) if data.spec.get("lora") else "",
        "algorithm": _algorithm(data.spec),
        "routes": "recorded and replayed" if data.begun and data.begun.routes == "record" else None,
        "data": data.data_format and f"read as {data.data_format}",
        "rate": words.rate_in_words(data),
        "origin": data.origin,
        "reference": kl_is_to and f"KL is to {kl_is_to}",
        "sweep": data.sweep,
        "group": data.group,
        "tags": " ".join(data.tags),
        "note": data.note,
        "pool": data.pool,
        "owner": data.owner,
        "created": f"{output.age(data.created_at)} ago",
        "directory": data.directory,
        "files": data.files and f"{words.present_in_words(data.files)}; {words.kept_in_words(data.files)}",
        "processes": ", ".join(f"{p.role} {p.pid}" for p in data.processes) or "none",
    }
    attempts = [("attempt", f"{attempt.attempt}: {_attempt_in_words(attempt)}") for attempt in data.attempts]
    fields = [(key, str(value)) for key, value in lines.items() if value]
    sets = [("set", f"{name}: {text}") for name, text in words.sets_in_words(data.sets).items()]
    sets += [("expect", expectation.in_words) for expectation in data.expected]
    warnings = (("warning", str(warning)) for warning in data.warnings)
    return [*fields, *sets, *_results_in_words(data), *attempts, *warnings]


def _results_in_words(data: RunDetails) -> list[tuple[str, str]]:
    """Return the newest evaluations of a run, each with the settings in which it differs from the others."""
    results = []
    for result in data.results[-_RESULTS:]:
        otherwise = words.differing_settings(result, data.results)
        figures = "  ".join(f"{name} {output.number(value)}" for name, value in result.metrics.items())
        about = f"{result.run}@{result.version} on {result.data}{otherwise and f' with {otherwise}'}"
        results.append(("result", f"{about}: {figures} ({result.problems} problems)"))
    return results


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
        figures = "  ".join(
            f"{name} {f'{value:.3g}' if isinstance(value, float) else value}"
            for name, value in finding.figures.items()
        )
        fields = {finding.severity: f"{finding.name}: {finding.says}", "": figures, "try": finding.next}
        table.print_fields([(name, value) for name, value in fields.items() if value])
    if answer.findings:
        output.note(f"{answer.says} {answer.looked}")
    else:
        output.report(f"Nothing was found that keeps {run} from learning. {answer.says} {answer.looked}")


def open_(run: Run, as_json: AsJson = False) -> None:
    """Print the directory of a run, and nothing else: `cd $(lorad open RUN)`."""
    client = Client()
    data = client.show(run)
    if as_json:
        output.print_json({"run": data.name, "directory": data.directory})
    elif isinstance(client.where, Home):
        print(data.directory)
    else:  # as scp and rsync take it
        print(f"{client.where.entry.ssh}:{data.directory}")


def diff(
    runs: Annotated[tuple[str, str], typer.Argument(metavar="RUN RUN", autocompletion=candidates.runs)],
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="Curves of this metric; give it several times. Default: reward, loss and eval.",
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
    cause = ""
    if attempt.reason not in (None, "completed") and attempt.detail:
        cause = f": {output.printable(attempt.detail.partition(chr(10))[0])}"
    return f"{start}{changed}, {attempt.reason or 'running'}{cause}"
