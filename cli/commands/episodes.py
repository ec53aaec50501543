"""lorad replay RUN and try SPEC: recorded episodes against fresh environments, and first ones of a spec."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from lorad.cli import candidates, output, table
from lorad.cli.commands.run import read_spec
from lorad.cli.commands.samples import whole
from lorad.cli.options import AsJson, Run
from lorad.cli.overrides import from_here
from lorad.client import trial
from lorad.client.client import Client
from lorad.client.shapes import Sample
from lorad.envs.host import Host
from lorad.envs.programs import is_program
from lorad.envs.replay import Difference, differences
from lorad.errors import Conflict
from lorad.spec.env import EnvSpec
from lorad.spec.text import load_task

_EPISODES = 10_000  # of a step, at most
_COLUMNS = ("prompt_id", "index", "turn", table.Column("differs", kind="fold"))


def replay(
    run: Run,
    step: Annotated[int | None, typer.Option(help="Default: the last step.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play the recorded turns of a step's episodes to fresh environments; say where they answer otherwise.

    The environment is the one of the run's spec, as its file is now. The exit code is 1 where an episode
    differs.
    """
    client = Client()
    details = client.show(run)
    env = msgspec.convert(details.spec.get("env") or {}, EnvSpec)
    if env.name is None:
        raise Conflict(f"{run} plays no episodes", hint="Only runs with `env` in their spec have any.")
    if is_program(env, Path(details.cwd or ".")):
        raise Conflict(f"{env.name} is an agent program: its episodes cannot be played again")
    samples = [sample for sample in client.samples(run, step=step, limit=_EPISODES) if sample.turns]
    host = Host(env, Path(details.cwd or "."))
    try:
        host.start()
        found = [*differences(host, samples)]
    finally:
        host.close()
    number = samples[0].step if samples else step
    if as_json:
        output.print_json({"step": number, "episodes": len(samples), "differences": found})
    else:
        _print(found)
        output.note(f"{len(samples)} episodes of step {number} played again, {len(found)} differ")
    raise typer.Exit(1 if found else 0)


def try_(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC",
            help="A YAML file, or - for stdin.",
            show_default=False,
            autocompletion=candidates.specs,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]…",
            help="Any key of the spec: env.turns=4",
            autocompletion=candidates.overrides,
        ),
    ] = None,
    count: Annotated[
        int, typer.Option("--count", "-n", help="How many rows, each with one sample.", min=1, max=256)
    ] = 4,
    as_json: AsJson = False,
) -> None:
    """Sample a spec's first rows before it is queued: prints them in full, with ends, rewards and seconds.

    They are made with the base, or with lora.adapter_path, by the spec's own rollout backend in a pool that
    ends with this command. Episodes are played a second time, to fresh environments: what answers otherwise
    cannot be rebuilt after a kill. The exit code is 1 where an episode differs or a sample has no reward.
    """
    text, source, cwd = read_spec(spec)
    wanted = load_task(text, source=source, overrides=from_here(overrides or []))
    samples: list[Sample] = []
    last = trial.Line()
    for line in trial.attempt(wanted, cwd=cwd, count=count):
        last = line
        if line.progress:
            output.note(line.progress)
        if line.sample is not None:
            samples.append(line.sample)
            if not as_json:
                output.note(f"-- {line.sample.prompt_id}")
                table.print_fields(whole(line.sample))
    found = last.differences
    if as_json:
        output.print_json({"samples": samples, "differences": found})
    else:
        _print(found or [])
        output.note(_summary(samples, found))
    raise typer.Exit(1 if found or any(sample.reward is None for sample in samples) else 0)


def _print(found: Sequence[Difference]) -> None:
    rows = [(one.prompt_id, str(one.index), str(one.turn), one.differs) for one in found]
    output.print_table(_COLUMNS, rows, empty="")


def _summary(samples: Sequence[Sample], found: Sequence[Difference] | None) -> str:
    """found: None where nothing was played again."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    ends = Counter(str(sample.end or sample.finish) for sample in samples)
    seconds = [turn.seconds for sample in samples for turn in sample.turns]
    parts = [f"{len(samples)} {'episodes' if seconds else 'samples'}"]
    if rewards:
        parts.append(f"mean reward {output.number(sum(rewards) / len(rewards))}")
    if len(rewards) < len(samples):
        parts.append(f"{len(samples) - len(rewards)} without a reward")
    parts.append("ends: " + ", ".join(f"{count} {end}" for end, count in ends.most_common()))
    if seconds:
        mean = sum(seconds) / len(seconds)
        parts.append(
            f"{len(seconds)} turns, of {mean:.3g} s in the environment, at most {max(seconds):.3g} s"
        )
    if found is not None:
        parts.append(f"played again: {len(found)} differ")
    return "; ".join(parts)
