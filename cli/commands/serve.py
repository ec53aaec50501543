"""The commands serve, generate and eval: serve adapters on a base that stays warm, and try a version."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lorad.box.models import downloaded, models_of
from lorad.cli import candidates, output
from lorad.cli.options import AsJson, Silent, Version
from lorad.client import launch
from lorad.client.client import Client
from lorad.client.evaluate import evaluated
from lorad.client.words import differing_settings
from lorad.errors import NotFound, SpecError
from lorad.files import expanded
from lorad.records.measured import Result
from lorad.records.requests import AdapterRequest, Sampling


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A directory, a hub id, or builtin:tiny.", autocompletion=candidates.bases
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
            autocompletion=candidates.adapters,
        ),
    ] = None,
    stop: Annotated[
        bool,
        typer.Option(
            "--stop", help="Let the pool of MODEL, or of the adapter of that name, end when it is idle."
        ),
    ] = False,
    quiet: Silent = False,
    as_json: AsJson = False,
) -> None:
    """Serve adapters under names of their own, on a base that stays warm until `--stop`.

    `lorad serve Qwen/Qwen3-4B --adapter
    support=./support-lora --adapter sql=./sql-lora
    rollout.backend=sglang`. Each is
    checked, loaded and attested first. Other bytes under the same name take over without a failed request.
    Without --adapter, the aliases of MODEL are kept warm.

    Each adapter is a run in `lorad list`, imported, whose versions are what was given under its name.
    """
    if stop:
        client = Client()
        try:
            stopped = client.stop_serving(model)
        except NotFound:  # by its directory: the daemon knows whole paths only
            path = expanded(model)
            base = path if path.is_dir() else downloaded(model, models_of(client.home))
            if base is None:
                raise
            stopped = client.stop_serving(str(base.resolve()))
        output.note_or_json(stopped, f"{', '.join(stopped.runs)}: not kept warm any more.", as_json=as_json)
        return
    client = output.telling(launch.connected(), quiet=quiet or as_json)
    named = []
    for adapter in adapters or []:
        name, equals, directory = adapter.partition("=")
        if not name or not equals or not directory:
            hint = "For example --adapter bot=./bot-lora."
            raise SpecError(f"--adapter {adapter}: not of the form NAME=DIR", hint=hint)
        named.append(AdapterRequest(name, directory))
    served = client.serve(model, named, cwd=str(Path.cwd()), overrides=overrides or [])
    if as_json:
        output.print_json(served)
        return
    rows = [(alias.alias, f"{alias.run}@{alias.version}", alias.attested) for alias in served.aliases]
    output.print_table(("model", "version", "attested"), rows, empty="")
    output.note(f"Pool {served.pool} stays warm; `lorad serve --stop {shlex.quote(model)}` lets it end.")
    if named:
        output.note("`lorad list` shows each adapter as a run of its name that was imported, without steps.")
    output.tell_address(served, str(served.aliases[0].alias))


def generate(
    version: Annotated[
        str,
        typer.Argument(
            metavar="ALIAS|RUN[@N]",
            help="A run's name means its current version.",
            autocompletion=candidates.versions,
        ),
    ],
    prompt: str,
    n: Annotated[int, typer.Option("-n", help="How many completions.", min=1, max=1024)] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is all.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    quiet: Silent = False,
    as_json: AsJson = False,
) -> None:
    """Complete a prompt with a version; its pool is started if it is not warm."""
    sampling = Sampling(n, temperature, top_p, top_k, max_new_tokens, seed)
    client = output.telling(launch.connected(), quiet=quiet or as_json)
    answer = client.generate(version, prompt, sampling)
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
        ),
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="A builtin reward, or FILE.py:FUNCTION; default: the run's.")
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
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Default: the run's.")] = None,
    pass_at: Annotated[float, typer.Option(help="Reward from which a completion has passed.")] = 1.0,
    prompt_key: Annotated[str | None, typer.Option(help="Column of the prompts.")] = None,
    answer_key: Annotated[str | None, typer.Option(help="Column of the answers.")] = None,
    env: Annotated[
        str | None,
        typer.Option(help="Play its episodes: a builtin environment, or FILE.py:CLASS; default: the run's."),
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
        results = client.results(version.partition("@")[0])
        if as_json:
            output.print_json(results)
        else:
            print_results(results)
        return
    options = {
        "data": data, "reward": reward, "problems": problems, "n": n, "temperature": temperature,
        "top_p": top_p, "top_k": top_k, "max_new_tokens": max_new_tokens, "pass_at": pass_at,
        "prompt_key": prompt_key, "answer_key": answer_key, "env": env,
    }  # fmt: skip
    result = evaluated(client, version, options, suite=suite, python=python, out=out or "", note=output.note)
    if as_json:
        output.print_json(result)
    else:
        print_results([result])


def print_results(results: Sequence[Result]) -> None:
    """Print results of versions; those on the same data with the settings in which they differ."""
    named = sorted({name for result in results for name in result.metrics if name != "score"}, key=_by_k)
    differing = [differing_settings(result, results) for result in results]
    settings = ("settings",) if any(differing) else ()
    columns = ("version", "data", *settings, "n", "problems", "failed", "score", *named, "age")
    rows = [
        (
            f"{result.run}@{result.version}",
            result.data,
            *((otherwise,) if settings else ()),
            result.settings.get("n", ""),
            result.problems,
            result.failed or "",
            output.number(result.metrics.get("score")),
            *(output.number(result.metrics.get(name)) for name in named),
            output.age(result.at) if result.at else "",
        )
        for result, otherwise in zip(results, differing, strict=True)
    ]
    output.print_table(columns, rows, empty="Nothing was evaluated yet.")


def _by_k(name: str) -> tuple[str, int]:
    head, _, k = name.partition("@")
    return head, int(k) if k.isdigit() else 0
