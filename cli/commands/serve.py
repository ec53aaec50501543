"""lorad serve, generate and eval: serve adapters on a base that stays warm, and try a version."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from lorad.cli import candidates, launch, output
from lorad.cli.options import AsJson, Version
from lorad.client.client import Client
from lorad.client.requests import AdapterRequest, ResultRequest, Sampling
from lorad.client.shapes import Result, StoppedServing
from lorad.errors import LoradError, NotAllowed, NotFound, SpecError, from_wire
from lorad.protocol.evaluation import Evaluated, Suite, Wanted
from lorad.rl.tasks import TASKS
from lorad.spec.numbers import COUNT_LIMIT


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A directory, a hub id, or builtin:tiny.",
            show_default=False,
            autocompletion=candidates.bases,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]…",
            help="How it is served: rollout.backend=sglang pool.memory_fraction=0.5",
            autocompletion=candidates.overrides,
        ),
    ] = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            "-a",
            metavar="NAME=DIR",
            help="A PEFT directory; again for more.",
            show_default=False,
            autocompletion=candidates.adapters,
        ),
    ] = None,
    stop: Annotated[
        bool,
        typer.Option(
            "--stop", help="Let the pool of MODEL, or of the adapter of that name, end when it is idle."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Serve adapters under names of their own, on a base that stays warm until `--stop`.

    `lorad serve Qwen/Qwen3-4B --adapter
    support=./support-lora --adapter sql=./sql-lora
    rollout.backend=sglang`. Each is
    checked, loaded and attested first. Other bytes under the same name take over without a failed request.
    Without --adapter, the aliases of MODEL are kept warm.
    """
    if stop:
        stopped = _stopped_serving(Client(), model)
        output.print_json(stopped) if as_json else output.note(
            f"{', '.join(stopped.runs)}: not kept warm any more."
        )
        return
    client = launch.connected()
    named = [_split(adapter) for adapter in adapters or []]
    served = client.serve(model, named, cwd=str(Path.cwd()), overrides=overrides or [])
    if as_json:
        output.print_json(served)
        return
    rows = [(alias.alias, f"{alias.run}@{alias.version}", alias.attested) for alias in served.aliases]
    output.print_table(("model", "version", "attested"), rows, empty="")
    output.note(f"Pool {served.pool} stays warm; `lorad serve --stop {shlex.quote(model)}` lets it end.")
    output.tell_address(served, str(served.aliases[0].alias))


def _stopped_serving(client: Client, model: str) -> StoppedServing:
    """A name, a model as it was given, or its directory: the daemon knows whole paths only."""
    try:
        return client.stop_serving(model)
    except NotFound:
        path = Path(model).expanduser()
        if not path.is_dir():
            raise
        return client.stop_serving(str(path.resolve()))


def _split(adapter: str) -> AdapterRequest:
    """Raises SpecError."""
    name, equals, directory = adapter.partition("=")
    if not name or not equals or not directory:
        raise SpecError(
            f"--adapter {adapter}: not of the form NAME=DIR", hint="For example --adapter bot=./bot-lora."
        )
    return AdapterRequest(name, directory)


def generate(
    version: Annotated[
        str,
        typer.Argument(
            metavar="ALIAS|RUN[@N]",
            help="A run's name means its current version.",
            show_default=False,
            autocompletion=candidates.versions,
        ),
    ],
    prompt: Annotated[str, typer.Argument(show_default=False)],
    n: Annotated[int, typer.Option("-n", help="How many completions.", min=1, max=1024)] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is all.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    as_json: AsJson = False,
) -> None:
    """Complete a prompt with a version; its pool is started if it is not warm."""
    sampling = Sampling(n, temperature, top_p, top_k, max_new_tokens, seed)
    answer = launch.connected().generate(version, prompt, sampling)
    if as_json:
        output.print_json(answer)
        return
    for completion in answer.completions:
        print(output.printable(completion.text))


def evaluate(
    version: Version,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="[DATA]",
            help="A builtin task, a file of rows, or a hub dataset; none: print the results that are kept.",
            show_default=False,
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="A builtin reward, or FILE.py:FUNCTION; default: the run's.", show_default=False),
    ] = None,
    problems: Annotated[
        int | None, typer.Option(help="The first so many rows; default: all of a file, 256 of a task.", min=1)
    ] = None,
    n: Annotated[
        int, typer.Option("-n", "--n", help="Completions of each problem, for avg@n and pass@k.", min=1)
    ] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is all.")] = 0,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Default: the run's.", show_default=False)
    ] = None,
    pass_at: Annotated[float, typer.Option(help="Reward from which a completion has passed.")] = 1.0,
    prompt_key: Annotated[str | None, typer.Option(help="Column of the prompts.", show_default=False)] = None,
    answer_key: Annotated[str | None, typer.Option(help="Column of the answers.", show_default=False)] = None,
    env: Annotated[
        str | None,
        typer.Option(
            help="Play its episodes: a builtin environment, or FILE.py:CLASS; default: the run's.",
            show_default=False,
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="SUITE:TASK", help="lm_eval:TASK or inspect:FILE, instead of DATA and a reward."
        ),
    ] = None,
    python: Annotated[
        str, typer.Option(help="The interpreter that has the suite.", show_default=False)
    ] = sys.executable,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write completions there, as JSON lines; a suite: its directory."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a version on rows: sample completions, score them, and keep the figures with the version.

    With an environment, a row is an episode, which has its own reward. The pool is started if it is not warm.
    Seeds are those of eval.sets: with the same rows, reward and sampling the figures are those that the run
    has measured.
    """
    client = launch.connected()
    if data is None and suite is None:
        found = client.results(version.partition("@")[0])
        output.print_json(found) if as_json else _print_results(found)
        return
    settings: dict[str, Any] = {
        "data": data, "reward": reward, "problems": problems or (256 if data in TASKS else COUNT_LIMIT),
        "n": n, "temperature": temperature, "top_p": top_p, "top_k": top_k, "max_new_tokens": max_new_tokens,
        "pass_at": pass_at, "prompt_key": prompt_key, "answer_key": answer_key,
    }  # fmt: skip
    wanted = Wanted(version=version, settings=settings, cwd=str(Path.cwd()), out=out or "", env=env or "")
    if suite is not None:
        wanted = replace(
            wanted, suite=_suite(suite, python), settings=_of_suite(settings | {"env": env}, problems)
        )
    result = _kept(client, _evaluated(wanted), data or "", wanted.suite)
    output.print_json(result) if as_json else _print_results([result])


def _suite(text: str, python: str) -> Suite:
    """Raises SpecError."""
    kind, _, task = text.partition(":")
    plain = {"kind": kind, "task": task, "python": str(Path(python).expanduser())}
    try:
        return msgspec.convert(plain, Suite)
    except msgspec.ValidationError:
        hint = "Write lm_eval:TASK or inspect:FILE."
        raise SpecError(f"{text!r} is no suite", key="--suite", hint=hint) from None


def _of_suite(given: dict[str, Any], problems: int | None) -> dict[str, Any]:
    """Return the settings that a suite takes. Raises SpecError for others that were given."""
    others = {"data": None, "reward": None, "env": None, "n": 1, "top_p": 1.0, "top_k": 0, "pass_at": 1.0}
    for key, usual in (others | {"prompt_key": None, "answer_key": None}).items():
        if given[key] != usual:
            raise SpecError(
                "a suite has its own", key=f"--{key.replace('_', '-')}", hint="Leave it out, or --suite."
            )
    return {"problems": problems, **{key: given[key] for key in ("temperature", "max_new_tokens")}}


def _kept(client: Client, answer: Evaluated, data: str, suite: Suite | None) -> Result:
    """Keep what a version came to with it, if it is the caller's."""
    settings = {key: value for key, value in answer.settings.items() if key != "data" and value is not None}
    about = ResultRequest(data, "data", settings, answer.metrics, answer.problems, answer.failed)
    if suite is not None:
        about = replace(about, data=suite.task, suite=suite.kind)
    try:
        return client.keep_result(answer.version, about)
    except NotAllowed as error:  # a version of somebody else
        output.note(f"The result is not kept: {error.message}")
        name, _, number = answer.version.rpartition("@")
        return Result(name, int(number), metrics=answer.metrics, data=about.data, problems=answer.problems)


def _evaluated(wanted: Wanted) -> Evaluated:
    """Ask a process of its own, which shows how far it is. Raises what it raised."""
    process = subprocess.run(
        [sys.executable, "-P", "-m", "lorad.evaluation"],
        input=msgspec.json.encode(wanted) + b"\n",
        stdout=subprocess.PIPE,
        check=False,
    )
    lines = process.stdout.splitlines()
    if not lines:
        raise LoradError(f"the evaluation ended with code {process.returncode} and said nothing")
    answer = msgspec.json.decode(lines[-1], type=Evaluated)
    if answer.error is not None:
        raise from_wire(msgspec.to_builtins(answer.error))
    return answer


def _print_results(results: Sequence[Result]) -> None:
    named = sorted({name for one in results for name in one.metrics if name != "score"}, key=_by_k)
    columns = ("version", "data", "n", "problems", "failed", "score", *named, "age")
    rows = [
        (
            f"{one.run}@{one.version}",
            one.data,
            one.settings.get("n", ""),
            one.problems,
            one.failed or "",
            output.number(one.metrics.get("score")),
            *(output.number(one.metrics.get(name)) for name in named),
            output.age(one.at) if one.at else "",
        )
        for one in results
    ]
    output.print_table(columns, rows, empty="Nothing was evaluated yet.")


def _by_k(name: str) -> tuple[str, int]:
    head, _, k = name.partition("@")
    return head, int(k) if k.isdigit() else 0
