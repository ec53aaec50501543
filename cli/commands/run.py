"""The commands run, attach, resume and fork: start a run from a spec, checkpoint or version; follow it."""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from msgspec import structs

from lorad.cli import candidates, many, output
from lorad.cli.commands.specs.check import print_check
from lorad.cli.follow import WORKING, follow, watched
from lorad.cli.options import AsJson, Detach, Overrides, Quiet, Run, Spec, WaitOver, Yes
from lorad.cli.selecting import chooses_runs
from lorad.client import launch
from lorad.client.client import Client
from lorad.client.overrides import from_here, read_spec
from lorad.client.words import kept_in_words, phase, rate_in_words, steps_in_words, why
from lorad.errors import DaemonUnreachable, SpecError
from lorad.records import runs
from lorad.records.requests import RunRequest
from lorad.records.runs import Resumed
from lorad.selection import Selection

_SEVERAL = "; give it several times, or names with commas"


def _option(flag: str, key: str, more: str = "") -> typer.models.OptionInfo:
    return typer.Option(flag, help=f"Same as {key}=…{more}")  # type: ignore[no-any-return]


def run(
    spec: Spec,
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="The run's name.")] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", help="A word of yours on the run, beside those of the spec; repeatable."),
    ] = None,
    detach: Detach = False,
    wait: WaitOver = False,
    quiet: Quiet = False,
    trainer: Annotated[str | None, _option("--trainer", "trainer.backend")] = None,
    rollout: Annotated[str | None, _option("--rollout", "rollout.backend")] = None,
    rank: Annotated[int | None, _option("--lora-rank", "lora.rank")] = None,
    alpha: Annotated[float | None, _option("--lora-alpha", "lora.alpha")] = None,
    dropout: Annotated[float | None, _option("--lora-dropout", "lora.dropout")] = None,
    lora_type: Annotated[str | None, _option("--lora-type", "lora.type")] = None,
    targets: Annotated[list[str] | None, _option("--target-modules", "lora.target_modules", _SEVERAL)] = None,
    excludes: Annotated[
        list[str] | None, _option("--exclude-modules", "lora.exclude_modules", _SEVERAL)
    ] = None,
    adapter_path: Annotated[str | None, _option("--lora-adapter-path", "lora.adapter_path")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check, as `lorad check` does.")] = False,
    suffix: Annotated[bool, typer.Option("--suffix", help="Where NAME is in use, take NAME-2.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Remove the run of that name first, if it is over.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before a run is replaced.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start a run and follow it. Ctrl-C detaches; the run continues."""
    if suffix and replace:
        raise SpecError("--suffix keeps the run of that name, --replace removes it", hint="Give one of them.")
    flags = {
        "trainer.backend": trainer,
        "rollout.backend": rollout,
        "lora.rank": rank,
        "lora.alpha": alpha,
        "lora.dropout": dropout,
        "lora.type": lora_type,
        "lora.target_modules": _together(targets),
        "lora.exclude_modules": _together(excludes),
        "lora.adapter_path": adapter_path,
    }
    from_flags = []
    for key, value in flags.items():
        # text stays text: `*_proj` would be an alias, a path may have a colon; a list in brackets is one
        is_text = isinstance(value, str) and not value.startswith("[")
        if value is not None:
            from_flags.append(f"{key}={json.dumps(value, ensure_ascii=False) if is_text else value}")
    text, source, cwd = read_spec(spec)
    changed = from_here([*(overrides or []), *from_flags])
    if tag:  # beside those that the spec has
        from lorad.spec.text import load_spec  # slow, and rarely needed

        own = load_spec(text, source=source, overrides=changed).tags
        changed.append(f"tags={json.dumps([*dict.fromkeys([*own, *tag])])}")
    request = RunRequest(text, source, str(cwd), changed, name, suffix, replace)
    client = output.telling(launch.connected(), quiet=quiet or as_json)
    if dry_run:
        print_check(client.check(request), as_json=as_json)
        return
    if replace and not yes:
        _ask_to_replace(client, request)
    started = client.run(**structs.asdict(request))
    _tell(client, started)
    if (detach or as_json) and not wait:
        if as_json:
            output.print_json(started)
        else:
            _note_state(client, started)
        return
    follow(client, started.name, as_json=as_json, quiet=quiet, until=_until(detach))


def _ask_to_replace(client: Client, request: RunRequest) -> None:
    """Ask before a run with all its files goes. Raises SpecError where nobody can be asked."""
    from lorad.spec.text import load_spec  # slow, and rarely needed

    name = load_spec(request.spec, source=request.source, overrides=request.overrides).name
    name = request.name or name
    if name is None:
        raise SpecError("--replace needs a name", hint="Give --name, or `name:` in the spec.")
    existing = client.named([name])
    if not existing:
        return
    if not sys.stdin.isatty():
        raise SpecError(f"--replace removes {name} with all its files", hint="Say so with --yes.")
    run = existing[0]
    output.note(f"{name} ({run.reason or phase(run)}, {steps_in_words(run, ' of ')} steps) would be removed.")
    typer.confirm("Remove it, with its versions and checkpoints?", abort=True, err=True)


def _tell(client: Client, started: runs.Run) -> None:
    """Say on stderr what the check of a run found worth saying."""
    with contextlib.suppress(DaemonUnreachable):  # the run exists all the same, and `lorad show` has them too
        run = client.show(started.name)
        if run.data_format:
            output.note(f"data.train is read as {run.data_format}")
        for warning in run.warnings:
            output.note(f"warning: {warning}")
        if run.rate is not None and run.spec["trainer"]["lr"] == run.rate.lr:
            output.note(rate_in_words(run))
        if run.files is not None:
            output.note(kept_in_words(run.files))


def _note_state(client: Client, run: runs.Run) -> None:
    """Say whether a new run is queued, for what it waits and when it starts; ask for a second at most."""
    with contextlib.suppress(DaemonUnreachable):
        for _ in range(10):
            if run.state != "queued" or run.queue is not None:
                break
            time.sleep(0.1)
            run = client.show(run.name)
    state = f"{run.state}: {why(run)}" if why(run) else run.state
    output.note(f"{run.name} is {state}. `lorad show {run.name}` shows its progress.")


def attach(run: Run, quiet: Quiet = False, as_json: AsJson = False) -> None:
    """Follow a run until it is over, as `lorad run` does. Ctrl-C detaches; the run continues.

    It exits 1 where the run did not end as it should; --json prints nothing before the end.
    """
    follow(Client(), run, as_json=as_json, quiet=quiet)


@chooses_runs
def resume(
    meant: Selection,
    step: Annotated[
        int | None,
        typer.Option(
            "--from", help="A checkpoint's step; default: the newest.", autocompletion=candidates.steps
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="The new total of steps.", min=1)] = None,
    detach: Detach = False,
    wait: WaitOver = False,
    quiet: Quiet = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Continue exactly where a checkpoint left off. Facts after it are rewound; version numbers are not.

    Behind the run's name, keys of the spec that change from now on. The checkpoint fits every trainer and
    topology: `lorad resume RUN trainer.backend=megatron trainer.tp=2`. Of several runs, named or found by
    globs and filters, it shows a list and asks first, and follows none.
    """
    overrides = [name for name in meant.names if "=" in name]  # no run has it in its name
    meant = structs.replace(meant, names=[name for name in meant.names if "=" not in name])
    name = many.only_run(meant)
    client = output.telling(launch.connected(), quiet=quiet or as_json)

    def continued(run: str) -> Resumed:
        resumed = client.resume(run, step=step, steps=steps, overrides=from_here(overrides))
        for warning in (*resumed.warnings, *resumed.changed_inputs):
            output.note(f"warning: {'' if name else f'{run}: '}{warning}")
        return resumed

    if name is None:
        until = _until(detach) if wait else ()
        verb = many.BulkVerb(
            "resume", continued, many.state_in_words, "Resume {}?", lambda run: run.state in many.OVER
        )
        outcomes = many.on_runs(client, verb, meant, yes=yes, quiet=bool(until) or as_json)
        if until:
            outcomes = many.await_runs(client, verb, outcomes, until=until, quiet=as_json)
        many.conclude(verb, outcomes, as_json=as_json)
        return
    if wait or not (detach or as_json):
        run = client.show(name)
        if run.state == "stopping":
            output.note(f"{name} is still {phase(run)}: it is resumed after that.")
            if watched(client, name, as_json=as_json, does="stops, and is not resumed") is None:
                raise typer.Exit(130)  # the user interrupted that
    resumed = continued(name)
    if (detach or as_json) and not wait:
        output.note_or_json(resumed, f"{name} is {phase(resumed)}.", as_json=as_json)
        return
    follow(client, name, as_json=as_json, quiet=quiet, until=_until(detach))


def _until(detach: bool) -> Sequence[str]:
    return WORKING if detach else many.OVER


def fork(
    version: Annotated[
        str,
        typer.Argument(
            metavar="RUN@N",
            help="A run's name alone means its current version.",
            autocompletion=candidates.versions,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]…",
            help="Any key of the spec but the model and the adapter's shape.",
            autocompletion=candidates.overrides,
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The new run's name; default: RUN-fork.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Number of steps of its own; default: RUN's trainer.steps.", min=1)
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Take only the weights; Adam starts from zero.")
    ] = False,
    detach: Detach = False,
    wait: WaitOver = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Start a new run with the weights and the optimizer's state of a checkpointed version. RUN may continue
    meanwhile.

    Steps, data and learning rate start over:
    `lorad fork sorter@40 trainer.lr=1e-5 data.train=hard.jsonl --steps 100`.
    """
    client = output.telling(launch.connected(), quiet=quiet or as_json)
    forked = client.fork(version, overrides=from_here(overrides or []), name=name, steps=steps, fresh=fresh)
    for warning in forked.warnings:
        output.note(f"warning: {warning}")
    if (detach or as_json) and not wait:
        output.note_or_json(forked, f"{forked.name} is {forked.state}.", as_json=as_json)
        return
    follow(client, forked.name, as_json=as_json, quiet=quiet, until=_until(detach))


def _together(values: list[str] | None) -> str | None:
    """Join the values of an option that was given several times, of which each may be a list in brackets."""
    if not values or len(values) == 1:
        return values[0] if values else None
    return ",".join(v[1:-1] if v.startswith("[") and v.endswith("]") else v for v in values)
