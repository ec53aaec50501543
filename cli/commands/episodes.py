"""lorad replay RUN: recorded episodes against fresh environments."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from lorad.cli import output, table
from lorad.cli.options import AsJson, Run
from lorad.client.client import Client
from lorad.client.shapes import Sample
from lorad.envs.child import Answer
from lorad.envs.episode import LIMITS
from lorad.envs.host import Heard, Host
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
    scored = {heard.number for _, heard, answer in played if answer.scores_at_limit}
    number = 0
    while live:
        answers = _again(host, live, number, scored)
        left = []
        for (sample, heard), answer in zip(live, answers, strict=True):
            if why := _difference(sample, number, answer):
                yield {
                    "prompt_id": sample.prompt_id,
                    "index": sample.index,
                    "turn": number + 1,
                    "differs": why,
                }
            elif number < len(sample.turns) - 1:
                left.append((sample, heard))
        live, number = left, number + 1


def _again(
    host: Host, live: Sequence[tuple[Sample, Heard]], number: int, scored: Collection[int]
) -> list[Answer]:
    """Play a turn of each again. scored: episodes that are asked what they earn where a limit ends them."""
    for sample, heard in live:
        said = sample.turns[number]
        heard.turns.append(Turn(said.text, said.finish, said.calls))
    answers = host.answers([heard for _, heard in live])
    limited = [
        place
        for place, (sample, heard) in enumerate(live)
        if heard.number in scored and sample.end in LIMITS and number == len(sample.turns) - 1
    ]
    for place in limited:
        live[place][1].at_limit = True
    for place, earned in zip(limited, host.answers([live[place][1] for place in limited]), strict=True):
        answer = answers[place]
        reward, error = answer.reward + earned.reward, answer.error or earned.error
        answers[place] = replace(answer, reward=reward, error=error)
    return answers


def _difference(sample: Sample, number: int, answer: Answer) -> str:
    """Return in what a turn was answered otherwise; "" where it was not."""
    turn, last = sample.turns[number], number == len(sample.turns) - 1
    now = "" if answer.messages is None else shown(answer.messages)
    why = answer.error if sample.end != "failed" or not last else ""
    if not why and not answer.error and answer.reward != turn.reward:
        return f"reward {answer.reward:g}, recorded {turn.reward:g}"
    if not why and not last and now != turn.observation:
        return f"{now!r}, recorded {turn.observation!r}"
    if not why and not last and sample.turns[number + 1].row > turn.row and not answer.replaces:
        return "it adds to the history, recorded: it replaces it"
    return why
