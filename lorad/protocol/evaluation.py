"""What `lorad eval` asks the process that evaluates, and what it answers: one JSON line each way."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from lorad.protocol.preflight import ErrorSaid


class Suite(Struct, frozen=True):
    """A suite that evaluates.

    task: of lm-eval a name or a YAML file; of inspect-ai a file. python: the interpreter that has the suite.
    """

    kind: Literal["lm_eval", "inspect"]
    task: Annotated[str, Meta(min_length=1)]
    python: str


class Wanted(Struct, frozen=True, kw_only=True):
    """A version to evaluate.

    version: an alias, run@number, run@best, or a run's name.
    settings: those of a set of `eval.sets` as plain data; what is left out is the run's.
    cwd: the directory where relative paths of the settings begin.
    out: a file for the completions, of a suite a directory for what it writes; "" for none.
    suite: it evaluates instead of a reward on rows.
    env: an environment that is played instead of that of the run; "" for that.
    """

    version: str
    settings: dict[str, Any]
    cwd: str
    out: str = ""
    suite: Suite | None = None
    env: str = ""


class Evaluated(Struct, frozen=True, kw_only=True):
    """What it came to.

    version: run@number.
    settings: those that were used, resolved.
    error: why there is nothing.
    """

    version: str = ""
    settings: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    problems: int = 0
    failed: int = 0
    error: ErrorSaid | None = None
