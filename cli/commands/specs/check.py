"""The command `lorad check`: what a spec comes to, and whether it would start now. Nothing is queued."""

from collections.abc import Iterator
from typing import Annotated

import typer

from lorad.cli import output, table
from lorad.cli.options import AsJson, Overrides, Silent, Spec
from lorad.client import launch
from lorad.client.overrides import from_here, read_spec
from lorad.client.words import adapter_in_words, kept_in_words, targets_in_words, when_in_words
from lorad.protocol.preflight import Lengths
from lorad.records.checks import Check, Start
from lorad.records.requests import RunRequest

_LINES = 12  # of a prompt
_FIELDS_WIDTH = 400  # characters of a line of it


def check(
    spec: Spec,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="The run's name.")] = None,
    quiet: Silent = False,
    as_json: AsJson = False,
) -> None:
    """Check a spec as `lorad run` does, and start nothing: model, data, reward, memory and disk, a prompt as
    the model gets it, and whether the run would start at once or what it would wait for.

    `lorad run --dry-run` does the same.
    """
    text, source, cwd = read_spec(spec)
    request = RunRequest(text, source, str(cwd), from_here(overrides or []), name)
    client = output.telling(launch.connected(), quiet=quiet or as_json)
    print_check(client.check(request), as_json=as_json)


def print_check(check: Check, *, as_json: bool) -> None:
    """Print what a sound spec comes to, as fields or as JSON."""
    if as_json:
        output.print_json(check)
        return
    for warning in check.warnings:
        output.note(f"warning: {warning}")
    fields = [*_fields(check)]
    if look := check.look:  # the first row of training as the model gets it
        fields.append(("row", f"the first of training, whose prompt has {look.prompt_tokens} tokens"))
        kind = f" ({look.answer_type}, and no text, for reward functions of yours)" * bool(look.answer_type)
        texts = [("prompt", look.prompt), ("answer", look.answer + kind), *(("said", t) for t in look.said)]
        for name, text in texts:
            lines = text.split("\n")
            more = [f"… {len(lines) - _LINES} more lines (--json has all)"] if len(lines) > _LINES else []
            shown = [line[:_FIELDS_WIDTH] for line in lines[:_LINES]] + more if text else []
            fields += [("" if place else name, line) for place, line in enumerate(shown)]
    table.print_fields(fields)


def _fields(check: Check) -> Iterator[tuple[str, str]]:
    spec = check.spec
    trainer = spec.get("trainer", {})
    yield "run", f"{check.name} (not made: this is a check)"
    model = spec.get("model", {})
    dtype = model.get("dtype", "auto")
    form = model.get("quantize")
    in_file = "" if dtype in ("auto", check.model_dtype) else f"{dtype} (its file has {check.model_dtype})"
    types = (in_file or check.model_dtype) + (f", linears rounded to {form}" if form else "")
    yield "model", f"{check.model_path}, {check.parameters:,} parameters, {types}"
    share = f"{check.adapter_parameters / check.parameters:.2%}" if check.parameters else "unknown share"
    size = f"{check.adapter_parameters:,} parameters ({share})"
    yield "adapter", f"{adapter_in_words(spec['lora'])}, on {check.modules} linears: {size}"
    yield "targets", targets_in_words(spec["lora"])
    yield "algorithm", check.algorithm
    lr = trainer.get("lr")
    rate = check.rate
    if rate is None or lr is None:
        yield "rate", f"trainer.lr is {lr}"
    else:
        fits = ": it" if lr == rate.lr else f"; {rate.lr:g}"
        yield "rate", f"{lr:g}{fits} fits {rate.why}"
    parts = ", ".join(f"{name} {output.size(size)}" for name, size in check.memory_parts.items())
    needs = f"needs {output.size(check.memory_needed)}{f' ({parts})' if parts else ''}"
    if check.memory_available is None:
        yield "memory", f"{needs}; what the device has is known once a pool is there"
    else:
        may = f"of which a pool may take {check.memory_share:.0%}"
        yield "memory", f"{needs}, {output.size(check.memory_available)} are free, {may}"
    yield "data", ", ".join(_data(check))
    yield "held out", held_out_in_words(check)
    steps = int(trainer.get("steps", 0))
    yield "steps", f"{steps} of {check.samples_per_step} samples: {steps * check.samples_per_step:,} in all"
    sizes = map(output.size, (check.files.version_bytes, check.files.checkpoint_bytes))
    yield "files", f"{kept_in_words(check.files)}; {' and '.join(sizes)} each"
    yield "start", start_in_words(check.start)


def held_out_in_words(check: Check) -> str:
    """Say what is evaluated, and by what."""
    if not check.held_out:
        return "none" if check.spec["eval"]["every"] else "none, as eval.every is 0"
    figures = {"the reward of greedy completions": check.eval_scored, "likelihood": check.eval_likely}
    measured = " and ".join(name for name, holds in figures.items() if holds) or "nothing is measured of them"
    return f"{check.held_out} problems, every {check.spec['eval']['every']} steps: {measured}"


def _data(check: Check) -> Iterator[str]:
    yield "rows never end" if check.rows is None else f"{check.rows:,} rows"
    if check.data_format:
        yield f"read as {check.data_format}"
    if (look := check.look) is None:
        return
    of = f" (of the first {look.looked_at})" if check.rows is None else ""
    yield f"prompts of {_lengths(look.prompts)}{of}"
    if look.completions is not None:
        yield f"completions of {_lengths(look.completions)}"
    yield f"{look.cut} cut"
    yield f"{check.left_out} left out as too long"


def _lengths(lengths: Lengths) -> str:
    if lengths.least == lengths.most:
        return f"{lengths.most} tokens"
    return f"{lengths.least} to {lengths.most} tokens, median {lengths.median}"


def start_in_words(start: Start) -> str:
    """Say when the run would start."""
    if start.state == "now":
        where = f"in pool {start.pool}, which is warm" if start.pool else "in a new pool"
        when = f"when {start.why}" if start.why else "at once"
        return f"{when}, {where}, on {', '.join(start.devices)}"
    if start.state == "never":
        return start.why
    queued = "1 run is" if start.ahead == 1 else f"{start.ahead} runs are"
    behind = f"; {queued} before it in the queue" if start.ahead else ""
    stops = f"; {', '.join(start.stops)} would make room for it" if start.stops else ""
    starts = when_in_words(start.starts_at, start.after)
    when = f"{starts}; it waits: " if starts else "not yet: "
    return f"{when}{start.why}{stops}{behind}"
