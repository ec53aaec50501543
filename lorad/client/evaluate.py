"""Evaluate a version in a process of its own, and have the daemon keep the result.

The same process can also score completions that exist, to try rewards.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lorad.client.client import Client
from lorad.errors import LoradError, NotAllowed, SpecError, from_wire
from lorad.files import expanded
from lorad.protocol.evals import Evaluated, Suite, Wanted
from lorad.protocol.preflight import ErrorFacts
from lorad.records.measured import Result
from lorad.records.requests import ResultRequest
from lorad.records.samples import Sample
from lorad.rl.tasks import TASKS
from lorad.spec.numbers import COUNT_LIMIT

_OTHERS = {
    "data": None, "reward": None, "n": 1, "top_p": 1.0, "top_k": 0, "pass_at": 1.0,
    "prompt_key": None, "answer_key": None, "env": None,
}  # fmt: skip
_TASK_PROBLEMS = 256  # of a builtin task, which has rows without end
_COMMAND = [sys.executable, "-P", "-m", "lorad.evaluation"]


class Grading(Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the rewards of completions that exist.

    spec: the spec that names the rewards, as plain data.
    cwd: the directory where its relative paths begin.
    run: the run whose saved samples are scored; "" where `lines` has the completions.
    step: the step of the run whose samples are scored; None for the last.
    lines: rows with completions, as JSON lines.
    n: how many prompts are taken, from the first; None for all.
    """

    spec: dict[str, Any]
    cwd: str
    run: str = ""
    step: int | None = None
    lines: str = ""
    n: int | None = None


class Graded(Struct, frozen=True, kw_only=True):
    """The completions with their rewards.

    error: why there are none.
    """

    samples: list[Sample] = []
    error: ErrorFacts | None = None


_Answer = TypeVar("_Answer", Evaluated, Graded)


def evaluated(
    client: Client,
    version: str,
    settings: Mapping[str, Any],
    *,
    suite: str | None,
    python: str,
    out: str,
    note: Callable[[str], None],
) -> Result:
    """Evaluate a version, and keep the figures with it where it is the caller's.

    settings: data, reward, problems, n, temperature, top_p, top_k, max_new_tokens, pass_at, prompt_key,
        answer_key and env; None is the default. Relative paths begin at the working directory.
    suite: `lm_eval:TASK` or `inspect:FILE`, which `python` runs, instead of a reward on `data`.
    python: the interpreter that has the suite.
    out: a file for the completions, for a suite a directory; "" for none.
    note: a function that is called with a sentence when the result is not kept.

    Raises what ended the evaluation, and SpecError for settings that do not fit each other.
    """
    request = Wanted(version=version, settings={}, cwd=str(Path.cwd()), out=out, env=settings["env"] or "")
    if suite is None:
        problems = settings["problems"] or (_TASK_PROBLEMS if settings["data"] in TASKS else COUNT_LIMIT)
        plain = {key: value for key, value in settings.items() if key != "env"}
        request = replace(request, settings=plain | {"problems": problems})
    else:
        kind, _, task = suite.partition(":")
        try:
            parts = {"kind": kind, "task": task, "python": str(expanded(python))}
            request = replace(request, suite=msgspec.convert(parts, Suite))
        except msgspec.ValidationError:
            hint = "Write lm_eval:TASK or inspect:FILE."
            raise SpecError(f"{suite!r} is no suite", key="--suite", hint=hint) from None
        for key, usual in _OTHERS.items():
            if settings[key] != usual:
                hint = "Leave it out, or --suite."
                raise SpecError("a suite has its own", key=f"--{key.replace('_', '-')}", hint=hint)
        plain = {key: settings[key] for key in ("problems", "temperature", "max_new_tokens")}
        request = replace(request, settings=plain)
    answer = ask_evaluation(client, request, Evaluated)
    used = {key: value for key, value in answer.settings.items() if key != "data" and value is not None}
    data = settings["data"] or ""
    about = ResultRequest(data, "data", used, answer.metrics, answer.problems, answer.failed)
    if request.suite is not None:
        about = replace(about, data=request.suite.task, suite=request.suite.kind)
    try:
        return client.keep_result(answer.version, about)
    except NotAllowed as error:  # a version of somebody else
        note(f"The result is not kept: {error.message}")
        name, _, number = answer.version.rpartition("@")
        return Result(name, int(number), metrics=answer.metrics, data=about.data, problems=answer.problems)


def ask_evaluation(client: Client, request: Wanted | Grading, kind: type[_Answer]) -> _Answer:
    """Evaluate or grade in a process of its own, which shows on stderr how far it is.

    Raises what that raised, as SpecError for lines and rewards that cannot be scored.
    """
    process = subprocess.run(
        _COMMAND,
        input=msgspec.json.encode(request) + b"\n",
        stdout=subprocess.PIPE,
        env=os.environ | {"LORAD_HOME": str(client.home.root)},
        check=False,
    )
    lines = process.stdout.splitlines()
    if not lines:
        raise LoradError(f"the evaluation ended with code {process.returncode} and said nothing")
    answer = msgspec.json.decode(lines[-1], type=kind)
    if answer.error is not None:
        raise from_wire(msgspec.to_builtins(answer.error))
    return answer
