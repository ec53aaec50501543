"""Evaluate a version: a process of its own samples and scores, and the daemon keeps what came out. Or try
rewards: the same process scores completions that are there.
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
from lorad.protocol.preflight import ErrorSaid
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


class Grading(Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the rewards of completions that exist.

    spec: whose rewards they are, as plain data.
    cwd: the directory where its relative paths begin.
    run: whose saved samples are scored; "" where `lines` are.
    step: of the run; None is the last.
    lines: rows with completions, as JSON lines.
    n: the completions of the first so many prompts; None is all.
    """

    spec: dict[str, Any]
    cwd: str
    run: str = ""
    step: int | None = None
    lines: str = ""
    n: int | None = None


class Graded(Struct, frozen=True, kw_only=True):
    """The completions with their rewards. error: why there are none."""

    samples: list[Sample] = []
    error: ErrorSaid | None = None


_Answer = TypeVar("_Answer", Evaluated, Graded)


def evaluated(
    client: Client,
    version: str,
    given: Mapping[str, Any],
    *,
    suite: str | None,
    python: str,
    out: str,
    note: Callable[[str], None],
) -> Result:
    """Evaluate a version and keep the figures with it, where it is the caller's.

    given: data, reward, problems, n, temperature, top_p, top_k, max_new_tokens, pass_at, prompt_key,
        answer_key and env; None is the default. Relative paths begin at the working directory.
    suite: `lm_eval:TASK` or `inspect:FILE`, which `python` runs, instead of a reward on `data`.
    out: a file for the completions, of a suite a directory; "" for none.
    note: is called with a sentence when the result is not kept.
    Raises what ended the evaluation, and SpecError for settings that do not fit each other.
    """
    wanted = Wanted(version=version, settings={}, cwd=str(Path.cwd()), out=out, env=given["env"] or "")
    if suite is None:
        problems = given["problems"] or (_TASK_PROBLEMS if given["data"] in TASKS else COUNT_LIMIT)
        settings = {key: value for key, value in given.items() if key != "env"}
        wanted = replace(wanted, settings=settings | {"problems": problems})
    else:
        wanted = replace(wanted, suite=_suite(suite, python), settings=_of_suite(given))
    return _kept(client, _ask(client, wanted, Evaluated), given["data"] or "", wanted.suite, note)


def graded(wanted: Grading) -> list[Sample]:
    """Score completions with rewards. Raises SpecError for lines and rewards that cannot be scored."""
    return _ask(Client(), wanted, Graded).samples


def _suite(text: str, python: str) -> Suite:
    """Raises SpecError."""
    kind, _, task = text.partition(":")
    plain = {"kind": kind, "task": task, "python": str(expanded(python))}
    try:
        return msgspec.convert(plain, Suite)
    except msgspec.ValidationError:
        hint = "Write lm_eval:TASK or inspect:FILE."
        raise SpecError(f"{text!r} is no suite", key="--suite", hint=hint) from None


def _of_suite(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a suite takes. Raises SpecError for others that were given."""
    for key, usual in _OTHERS.items():
        if given[key] != usual:
            raise SpecError(
                "a suite has its own", key=f"--{key.replace('_', '-')}", hint="Leave it out, or --suite."
            )
    return {key: given[key] for key in ("problems", "temperature", "max_new_tokens")}


def _kept(
    client: Client, answer: Evaluated, data: str, suite: Suite | None, note: Callable[[str], None]
) -> Result:
    """Keep what a version came to with it, if it is the caller's."""
    settings = {key: value for key, value in answer.settings.items() if key != "data" and value is not None}
    about = ResultRequest(data, "data", settings, answer.metrics, answer.problems, answer.failed)
    if suite is not None:
        about = replace(about, data=suite.task, suite=suite.kind)
    try:
        return client.keep_result(answer.version, about)
    except NotAllowed as error:  # a version of somebody else
        note(f"The result is not kept: {error.message}")
        name, _, number = answer.version.rpartition("@")
        return Result(name, int(number), metrics=answer.metrics, data=about.data, problems=answer.problems)


def _ask(client: Client, wanted: Wanted | Grading, kind: type[_Answer]) -> _Answer:
    """Ask a process of its own, which shows on stderr how far it is. Raises what it raised."""
    process = subprocess.run(
        [sys.executable, "-P", "-m", "lorad.evaluation"],
        input=msgspec.json.encode(wanted) + b"\n",
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
