"""lorad replay RUN: recorded episodes against fresh environments."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from lorad.cli import output, table
from lorad.cli.options import AsJson, Run
from lorad.client.client import Client
from lorad.client.shapes import Sample
from lorad.envs.host import Host
from lorad.envs.programs import is_program
from lorad.envs.protocol import Turn, shown
from lorad.errors import Conflict
from lorad.spec.env import EnvSpec

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
        found = [*_differences(host, samples)]
    finally:
        host.close()
    number = samples[0].step if samples else step
    if as_json:
        output.print_json({"step": number, "episodes": len(samples), "differences": found})
    else:
        rows = [tuple(str(value) for value in one.values()) for one in found]
        output.print_table(_COLUMNS, rows, empty="")
        episodes = len({(one["prompt_id"], one["index"]) for one in found})
        output.note(f"{len(samples)} episodes of step {number} played again, {episodes} differ")
    raise typer.Exit(1 if found else 0)


def _differences(host: Host, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """Yield the first difference of each episode that has one."""
    played = [
        (s, heard, answer)
        for s, (heard, answer) in zip(samples, host.begin([s.task for s in samples if s.task]), strict=True)
    ]
    live = [(sample, heard) for sample, heard, _ in played]
    number = 0
    while live:
        for sample, heard in live:
            heard.turns.append(Turn(sample.turns[number].text, sample.turns[number].finish))
        answers = host.answers([heard for _, heard in live])
        left = []
        for (sample, heard), answer in zip(live, answers, strict=True):
            turn, last = sample.turns[number], number == len(sample.turns) - 1
            now = "" if answer.messages is None else shown(answer.messages)
            why = answer.error if sample.end != "failed" or not last else ""
            if not why and not answer.error and answer.reward != turn.reward:
                why = f"reward {answer.reward:g}, recorded {turn.reward:g}"
            elif not why and not last and now != turn.observation:
                why = f"{now!r}, recorded {turn.observation!r}"
            elif not why and not last and sample.turns[number + 1].row > turn.row and not answer.replaces:
                why = "it adds to the history, recorded: it replaces it"
            if why:
                yield {
                    "prompt_id": sample.prompt_id,
                    "index": sample.index,
                    "turn": number + 1,
                    "differs": why,
                }
            elif not last:
                left.append((sample, heard))
        live, number = left, number + 1
