"""Candidates for the shell's completion, from a daemon that answers at once, or else none.

Each function is an `autocompletion` of typer: (context, what is typed so far) to words. A word that ends in
`=` or `/` can be continued; FILE and DIR after a word leave it to the shell.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lorad.box.models import MODELS
from lorad.client.client import Client
from lorad.records.runs import Run
from lorad.spec.numbers import BUILTIN_MODELS

_SECONDS = 0.15  # for the daemon's answer: nobody waits for a completion
_MOST = 200  # runs that ended, versions of a run, or files that are offered
_FILE = "\0file"
_DIR = "\0dir"
_Complete = Callable[[Any, str], list[str]]


def _asked(names: Callable[[Client, Any], Iterable[object]]) -> _Complete:
    """Return a completion that offers the names that begin with what was typed. It never starts a daemon."""
    return lambda ctx, incomplete: [
        name for name in map(str, names(Client(timeout=_SECONDS), ctx)) if name.startswith(incomplete)
    ]


def words(*choices: str) -> _Complete:
    return lambda ctx, incomplete: [word for word in choices if word.startswith(incomplete)]


def _listed(client: Client) -> list[Run]:
    return client.list(all=True, limit=_MOST)


def _run_names(client: Client, ctx: Any = None) -> list[str]:
    return [run.name for run in _listed(client)]


def _alias_names(client: Client, ctx: Any = None) -> list[str]:
    return [alias.alias for alias in client.aliases()]


def _metrics_of(client: Client, ctx: Any) -> list[str]:
    """Return the metrics of the last step of the runs named so far, or else of the newest run."""
    names = ctx.params.get("runs") or _run_names(client)[:1]
    metrics = {"eval"}
    for run in client.named(list(names)):
        for evaluation in client.evals(run.name)[-1:]:
            metrics |= evaluation.figures.keys()
        for step in client.steps(run.name, after=max(run.step - 1, 0)):
            metrics |= step.metrics.keys()
    return sorted(metrics)


_names = _asked(_run_names)
aliases = _asked(_alias_names)
pools = _asked(lambda client, ctx: [pool.pool for pool in client.pools()])
devices = _asked(lambda client, ctx: [device.device for device in client.devices()])
_models = _asked(
    lambda client, ctx: dict.fromkeys([*BUILTIN_MODELS, *MODELS, *(pool.model for pool in client.pools())])
)
steps = _asked(lambda client, ctx: [c.step for c in client.checkpoints(ctx.params["runs"][0])])
metrics = _asked(_metrics_of)
sweeps = _asked(lambda client, ctx: [sweep.sweep for sweep in client.sweeps()])
owners = _asked(lambda client, ctx: dict.fromkeys(["me", *(run.owner for run in _listed(client))]))
tags = _asked(lambda client, ctx: dict.fromkeys(tag for run in _listed(client) for tag in run.tags))
run_bases = _asked(lambda client, ctx: dict.fromkeys(run.base for run in _listed(client)))


def states(ctx: Any, incomplete: str) -> list[str]:
    """Offer states of runs and why they ended, also behind a comma."""
    from lorad.selection import STATES

    return _last_of(incomplete, STATES)


def columns(ctx: Any, incomplete: str) -> list[str]:
    """Offer columns of a list and keys of the spec, also behind a comma or a minus."""
    from lorad.client.columns import COLUMNS
    from lorad.spec.errors import leaves
    from lorad.spec.model import Spec

    return _last_of(incomplete, [*COLUMNS, *(key for key in leaves(Spec) if "." in key)])


def _last_of(incomplete: str, candidates: Iterable[str]) -> list[str]:
    """Complete the last of several words with commas; the ones before it stay."""
    before, comma, last = incomplete.rpartition(",")
    minus = "-" if last.startswith("-") else ""
    return [f"{before}{comma}{minus}{word}" for word in candidates if word.startswith(last.removeprefix("-"))]


def runs(ctx: Any, incomplete: str) -> list[str]:
    """Offer names of runs, and behind that of a run to resume the keys that may change."""
    changes = overrides(ctx, incomplete) if ctx.info_name == "resume" and ctx.params.get("runs") else []
    return [*_names(ctx, incomplete), *changes]


def versions(ctx: Any, incomplete: str) -> list[str]:
    """Offer runs and aliases, and the versions of a run that is typed whole or is the only one left.

    RUN@N come newest first, with RUN@best and RUN@latest; behind RUN@st steps are offered.
    """
    client = Client(timeout=_SECONDS)
    name, at, _ = incomplete.partition("@")
    names = [name] if at else [run for run in _run_names(client) if run.startswith(name)]
    others = [] if at else [alias for alias in _alias_names(client) if alias.startswith(name)]
    of_one = client.adapters(names[0])[-_MOST:] if len(names) == 1 else []
    numbered = [f"{version.run}@{version.version}" for version in reversed(of_one)]
    numbered += [f"{names[0]}@{word}" for word in ("best", "latest")] if of_one else []
    if incomplete.startswith(f"{name}@st"):  # the steps are offered where they are asked for
        numbered += [f"{version.run}@step:{version.step}" for version in reversed(of_one)]
    return [name for name in ([] if at else [*names, *others]) + numbered if name.startswith(incomplete)]


def specs(ctx: Any, incomplete: str) -> list[str]:
    """Offer files; with `--list` the names of sweeps."""
    return sweeps(ctx, incomplete) if ctx.params.get("listed") else [incomplete + _FILE]


def bases(ctx: Any, incomplete: str) -> list[str]:
    return _models(ctx, incomplete) or [incomplete + _DIR]


def overrides(ctx: Any, incomplete: str) -> list[str]:
    """Offer keys of the spec, and values where they are few or files."""
    from lorad.client.overrides import KEYS
    from lorad.spec.errors import choices, leaves
    from lorad.spec.model import Spec

    key, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{name}=" for name in ("reward", *leaves(Spec)) if name.startswith(key)]
    few = [f"{key}={choice}" for choice in choices(Spec, key) if choice.startswith(value)]
    return few + (_files(f"{key}=", value) if key in KEYS else [])


def keys(ctx: Any, incomplete: str) -> list[str]:
    """Offer keys and sections of the spec."""
    from lorad.spec.errors import leaves
    from lorad.spec.model import Spec

    return [name for name in (*Spec.__struct_fields__, *leaves(Spec)) if name.startswith(incomplete)]


def adapters(ctx: Any, incomplete: str) -> list[str]:
    """Offer the directory of NAME=DIR."""
    name, equals, value = incomplete.partition("=")
    return _files(f"{name}=", value) if equals else []


def _files(before: str, value: str) -> list[str]:
    """Complete a path; shells complete only words that are paths as a whole."""
    directory, start = os.path.split(value)
    paths = sorted(Path(directory or ".").expanduser().iterdir())
    shown = [path for path in paths if path.name.startswith(start) and (start or path.name[0] != ".")][:_MOST]
    return [f"{before}{os.path.join(directory, path.name)}{'/' * path.is_dir()}" for path in shown]
