"""The commands try and replay: a few samples before anything is queued, rewards of completions that exist,
and recorded episodes again against fresh environments.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from msgspec.structs import replace

from lorad.bounds import TRIAL_SAMPLES
from lorad.box.paths import Home
from lorad.cli import candidates, output, table
from lorad.cli.commands.samples import whole
from lorad.cli.options import AsJson, Run, Silent, Spec
from lorad.client import launch
from lorad.client.client import Client
from lorad.client.evaluate import Graded, Grading, ask_evaluation
from lorad.client.overrides import from_here, read_spec
from lorad.envs.child import EpisodeAnswer
from lorad.envs.host import EnvironmentHost
from lorad.envs.programs import is_program
from lorad.envs.protocol import Turn, shown
from lorad.errors import Conflict, SpecError
from lorad.records.episodes import LIMITS
from lorad.records.samples import Sample, TrialEvent
from lorad.spec.env import EnvSpec
from lorad.spec.text import load_spec, load_task
from lorad.text import question

_EPISODES = 10_000  # of a step, at most
_ROWS = 4  # that are tried where none are counted
_MOST_BYTES = 64 << 20  # of lines that are graded
_GRADED = table.columns("sample, reward, rewards fold, prompt cut, answer cut, completion cut, error fold")
_TRIED = table.columns("sample, end, turns 3, reward, tokens 2, seconds_env 3, again, error fold")
_COLUMNS = table.columns("prompt_id, index, turn, differs fold")


def try_(
    spec: Spec,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]…",
            help="Any key of the spec: env.turns=4",
            autocompletion=candidates.overrides,
        ),
    ] = None,
    n: Annotated[
        int | None,
        typer.Option(
            "-n",
            help=f"How many rows of the data, default {_ROWS}; prompts of --rewards, default: all.",
            min=1,
            max=TRIAL_SAMPLES,
        ),
    ] = None,
    rewards: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|-",
            help="Try the rewards alone: on the saved samples of a run, or on JSON lines from stdin.",
            autocompletion=candidates.runs,
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Of the run of --rewards; default: the last step.")] = None,
    quiet: Silent = False,
    as_json: AsJson = False,
) -> None:
    """Play an episode of each of the first rows, or sample and score them, with what the run would begin
    with.

    Nothing is queued and nothing is kept but the pool, which stays warm; where runs of another base have
    every device, it is refused. Every reset and turn is then played again to fresh environments, to see
    whether they answer alike. The exit code is 1 where one does not, or an episode or reward failed.

    With --rewards no model is loaded, and no daemon is needed for stdin: completions that are there are
    scored at once, here, with the variables of this shell, and the reward of each is shown with its
    components.
    """
    text, source, cwd = read_spec(spec)
    changed = from_here(overrides or [])
    if step is not None and rewards in (None, "-"):
        raise SpecError("only samples of a run are of steps", key="--step", hint="Write --rewards RUN.")
    if rewards is not None:
        plain = msgspec.to_builtins(load_spec(text, source=source, overrides=changed))
        lines = _read_lines(spec, rewards)
        if Path(rewards).is_file():
            hint = f"A file's lines come from stdin: `--rewards - < {rewards}`."
            raise SpecError(f"{rewards} is a file, not a run", key="--rewards", hint=hint)
        run = "" if rewards == "-" else rewards
        _grade(Grading(spec=plain, cwd=str(cwd), run=run, step=step, lines=lines, n=n), as_json)
    env = load_task(text, source=source, overrides=changed).env
    client = launch.connected()
    events = client.trial(text, source=source, cwd=str(cwd), overrides=changed, n=n or _ROWS)
    samples, seconds = _follow(events, quiet=quiet)
    is_here = isinstance(client.where, Home)  # else environment and its files are on another box
    is_replayable = is_here and env.name is not None and not is_program(env, cwd)
    differing = _replay(env, cwd, samples) if is_replayable else []
    if as_json:
        output.print_json({"samples": samples, "seconds": seconds, "differences": differing})
    else:
        _print_tried(samples, seconds, differing, compared=is_replayable)
    failed = sum(sample.reward is None for sample in samples)
    if failed:
        output.note(f"{failed} of {len(samples)} have no reward")
    raise typer.Exit(1 if differing or failed else 0)


def _read_lines(spec: str, rewards: str) -> str:
    """Read the lines that are graded; "" where a run has samples instead. Raises SpecError."""
    if rewards != "-":
        return ""
    if spec == "-":
        hint = "Name the file of the spec."
        raise SpecError("the spec came from stdin already", key="--rewards", hint=hint)
    data = sys.stdin.buffer.read(_MOST_BYTES + 1)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        place = data.count(b"\n", 0, error.start) + 1
        raise SpecError(f"<stdin>:{place}: not UTF-8 text", hint="Each line is one JSON object.") from None
    if len(data) > _MOST_BYTES:
        hint = "Give fewer lines: `head -n 100 FILE | lorad try …`."
        raise SpecError(f"<stdin>: more than {_MOST_BYTES >> 20} MiB", hint=hint)
    return text


def _grade(grading: Grading, as_json: bool) -> NoReturn:
    """Print the completions with their rewards. The exit code is 1 where one has none."""
    samples = ask_evaluation(Client(), grading, Graded).samples
    if as_json:
        output.print_json({"samples": samples})
    else:
        rows = []
        for place, sample in enumerate(samples, 1):
            parts = ", ".join(f"{name} {output.number(value)}" for name, value in sample.rewards.items())
            prompt = sample.prompt if table.terminal_width() is None else question(sample.prompt)
            texts = (prompt, sample.answer or "", sample.completion, sample.error or "")
            rows.append((str(place), output.number(sample.reward), parts, *texts))
        output.print_table(_GRADED, rows, empty="")
    values = [sample.reward for sample in samples if sample.reward is not None]
    if values:
        output.note(f"mean reward {sum(values) / len(values):.3f}")
    if failed := len(samples) - len(values):
        output.note(f"{failed} of {len(samples)} have no reward")
    raise typer.Exit(1 if failed else 0)


def _follow(events: Iterator[TrialEvent], *, quiet: bool) -> tuple[list[Sample], float]:
    """Show how far a trial is, unless `quiet`; returns its samples, and the seconds that they took."""
    is_seen = sys.stderr.isatty() and not quiet
    samples = list[Sample]()
    try:
        for event in events:
            if is_seen:
                output.doing(event.text if event.kind == "idle" else "")
            if event.kind == "sample" and event.sample is not None:
                samples.append(event.sample)
            elif event.kind == "end":
                return samples, event.seconds
            elif event.kind == "phase" and not quiet:
                output.note(event.text)
    finally:
        if is_seen:
            output.doing("")
    return samples, 0.0


def _replay(env: EnvSpec, cwd: Path, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Play what was played to fresh environments; returns where they answer otherwise, or begin so."""
    played = [sample for sample in samples if sample.task is not None and sample.turns]
    output.note(f"{len(played)} episodes are played again")
    host = EnvironmentHost(env, cwd)
    try:
        host.start()
        tasks = [sample.task for sample in played if sample.task]
        resets = zip(played, host.begin(tasks), host.begin(tasks), strict=True)
        changed = [
            {"prompt_id": sample.prompt_id, "index": sample.index, "turn": 0, "differs": "reset"}
            for sample, (_, first), (_, second) in resets
            if (first.messages, first.reward, first.tools) != (second.messages, second.reward, second.tools)
        ]
        return [*changed, *_differences(host, played)]
    finally:
        host.close()


def _print_tried(
    samples: Sequence[Sample], seconds: float, differing: Sequence[dict[str, Any]], *, compared: bool
) -> None:
    differ = {(difference["prompt_id"], difference["index"]): difference for difference in differing}
    rows = []
    for place, sample in enumerate(samples, 1):
        print(f"-- sample {place}")
        table.print_fields(whole(sample))
        difference = differ.get((sample.prompt_id, sample.index))
        again = "same" if compared and sample.turns else ""
        again = f"differs at turn {difference['turn']}" if difference else again
        figures = (str(len(sample.turns) or 1), output.number(sample.reward, 2), str(len(sample.logprobs)))
        seconds_env = f"{sum(turn.seconds for turn in sample.turns):.3f}" if sample.turns else ""
        end = str(sample.end or sample.finish)
        rows.append((str(place), end, *figures, seconds_env, again, str(sample.error or "")))
    print()
    output.print_table(_TRIED, rows, empty="")
    for difference in differing:
        output.note(f"{difference['prompt_id']}, turn {difference['turn']}: {difference['differs']}")
    output.note(f"{len(samples)} samples in {seconds:.1f} s of the pool; nothing was queued")


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
    host = EnvironmentHost(env, Path(details.cwd or "."))
    try:
        host.start()
        differences = [*_differences(host, samples)]
    finally:
        host.close()
    number = samples[0].step if samples else step
    if as_json:
        output.print_json({"step": number, "episodes": len(samples), "differences": differences})
    else:
        rows = [tuple(str(value) for value in difference.values()) for difference in differences]
        output.print_table(_COLUMNS, rows, empty="")
        episodes = len({(difference["prompt_id"], difference["index"]) for difference in differences})
        output.note(f"{len(samples)} episodes of step {number} played again, {episodes} differ")
    raise typer.Exit(1 if differences else 0)


def _differences(host: EnvironmentHost, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """Play each turn again, and yield the first difference of each episode that has one."""
    played = [
        (s, heard, answer)
        for s, (heard, answer) in zip(samples, host.begin([s.task for s in samples if s.task]), strict=True)
    ]
    live = [(sample, heard) for sample, heard, _ in played]
    scored = {heard.number for _, heard, answer in played if answer.scores_at_limit}
    number = 0
    while live:
        for sample, heard in live:
            turn = sample.turns[number]
            heard.turns.append(Turn(turn.text, turn.finish, turn.calls))
        answers = host.answers([heard for _, heard in live])
        limited = [  # asked what they earn where a limit ends them
            place
            for place, (sample, heard) in enumerate(live)
            if heard.number in scored and sample.end in LIMITS and number == len(sample.turns) - 1
        ]
        for place in limited:
            live[place][1].at_limit = True
        for place, earned in zip(limited, host.answers([live[place][1] for place in limited]), strict=True):
            answer = answers[place]
            reward = answer.reward + earned.reward
            answers[place] = replace(answer, reward=reward, error=answer.error or earned.error)
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
        live = left
        number += 1


def _difference(sample: Sample, number: int, answer: EpisodeAnswer) -> str:
    """Return in what a turn was answered otherwise; "" where it was not."""
    turn = sample.turns[number]
    last = number == len(sample.turns) - 1
    now = "" if answer.messages is None else shown(answer.messages)
    why = answer.error if sample.end != "failed" or not last else ""
    if not why and not answer.error and answer.reward != turn.reward:
        return f"reward {answer.reward:g}, recorded {turn.reward:g}"
    if not why and not last and now != turn.observation:
        return f"{now!r}, recorded {turn.observation!r}"
    if not why and not last and sample.turns[number + 1].row > turn.row and not answer.replaces:
        return "it adds to the history, recorded: it replaces it"
    return why
