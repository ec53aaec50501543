"""Everything that a daemon has, from Python: `lorad.connect()`."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lorad import __version__
from lorad.api.connection import DaemonConnection
from lorad.api.inputs import Spec, axes, overrides, spec_text, version_name
from lorad.api.run import Run, run_row
from lorad.api.sweep import Sweep
from lorad.api.table import Table
from lorad.box.paths import Home
from lorad.client import launch
from lorad.client.boxes.hosts import Place, far_home, read_hosts
from lorad.client.client import Client
from lorad.client.transport import Transport
from lorad.errors import DaemonUnreachable, SpecError
from lorad.files import expanded
from lorad.records.daemon import Status
from lorad.records.devices import Device
from lorad.records.measured import Result
from lorad.records.pools import NodeStatus, Pool
from lorad.records.requests import HalvingRequest, Sampling
from lorad.records.runs import Event
from lorad.records.versions import Completions, Exported, RemovedAlias, ServedAlias, Swapped, Version
from lorad.selection import Selection

_log = logging.getLogger("lorad")


def connect(home: str | os.PathLike[str] | None = None, *, start: bool = True) -> "Lorad":
    """Connect to the daemon of a home.

    home: its directory, by default that of `LORAD_HOME`, as for every command; or another box: its name in
        `lorad hosts`, or ssh://USER@HOST.
    start: start the daemon when it does not answer, here and while something is waited for.

    Raises DaemonUnreachable when no daemon answers, or it does not start; StorageError and NotAllowed for a
    home that cannot be used.
    """
    Transport.on_other_version = _other_version
    place: Place | None = None
    if isinstance(home, str) and (home.startswith("ssh://") or home in read_hosts().hosts):
        place = far_home(home)
    elif home is not None:
        place = Home(expanded(home).absolute())
    client = launch.connected(place) if start else Client(place)
    if not start:
        try:
            client.status()
        except DaemonUnreachable as error:
            hint = f"{error.hint} Or let `lorad.connect(start=True)` start it."
            raise DaemonUnreachable(error.message, hint=hint) from None
    client.telling(lambda words: None)  # a client that listens waits longer
    return Lorad(DaemonConnection(client, start))


def _other_version(version: str, box: str) -> None:
    """Warn that the daemon is of another version; "" is one that does not say which.

    box: where it runs; "" is here.
    """
    daemon = f"version {version}" if version else "an earlier version"
    command = f"lorad --host {box} daemon restart" if box else "lorad daemon restart"
    _log.warning("The daemon is %s, this is %s: `%s` replaces it.", daemon, __version__, command)


class Lorad:
    """The daemon of one home, which `lorad.connect()` makes.

    Each request has a connection of its own: it may be used from several threads, and outlives a daemon that
    is restarted. Every method raises DaemonUnreachable when no daemon answers, NotAllowed for what is
    somebody else's, and otherwise what it says.
    """

    def __init__(self, connection: DaemonConnection) -> None:
        self._connection = connection

    @property
    def client(self) -> Client:
        """What asks the daemon, with a method for every request. Not stable."""
        return self._connection.client

    @property
    def status(self) -> Status:
        """The daemon itself: version, home, caller, gateway, disk."""
        return self.client.status()

    # -- runs ------------------------------------------------------------------------------------------------
    def run(self, spec: Spec, /, *, name: str | None = None, **keys: Any) -> Run:
        """Check a spec and start a run of it; returns when it is queued.

        spec: a file, the text of one, or a dict.
        name: the name of the run; by default that in the spec, or else one is made up.
        keys: keys that override the spec, as `seed=1, trainer={"lr": 3e-5}` or `**{"trainer.lr": 3e-5}`. The
            others of a section stay. Relative paths begin at the working directory, in a file at its
            directory.

        Warnings about the spec go to the logger `lorad`. Raises SpecError, with the line or the key to blame,
        and Conflict when the name is taken.
        """
        text, source, cwd = spec_text(spec)
        changed = overrides(keys, self.client.where)
        queued = self.client.run(text, source=source, cwd=cwd, overrides=changed, name=name)
        run = Run(self._connection, queued)
        with contextlib.suppress(DaemonUnreachable):  # the run exists all the same, and its details have them
            for warning in run.details.warnings:
                _log.warning("%s: %s", run.name, warning)
        return run

    def runs(
        self,
        pattern: str = "*",
        *,
        state: str | Sequence[str] = (),
        owner: str | None = None,
        sweep: str | None = None,
        tag: str | Sequence[str] = (),
        base: str | None = None,
        sort: str | Sequence[str] = (),
        limit: int | None = None,
    ) -> Table[Run]:
        """List runs, newest first.

        pattern: the pattern of their names, with * and ?, which all texts here may have.
        state: one or several states, or reasons of an end: `failed`.
        owner: a user; `me` is you.
        sweep: the name of a sweep.
        tag: one or several tags, of which one has to fit.
        base: the model, whole or the last part of its path.
        sort: a column, a key of the spec or a metric, or several; `-reward` puts the largest first.
        limit: how many runs at most.

        Raises SpecError for an unknown state or column.
        """
        if limit == 0:
            return Table((), row=run_row)
        selection = Selection(
            names=[pattern],
            state=_several(state),
            owner=_several(owner),
            sweep=_several(sweep),
            tag=_several(tag),
            base=_several(base),
        )
        selected = self.client.select(selection, sort=_several(sort), limit=limit or 0)
        return Table((Run(self._connection, run) for run in selected), row=run_row)

    def get(self, name: str) -> Run:
        """Find a run by its name. Raises NotFound."""
        return Run(self._connection, self.client.show(name))

    def sweep(
        self,
        spec: Spec,
        grid: Mapping[str, Iterable[Any]],
        /,
        *,
        name: str | None = None,
        halving: bool | HalvingRequest = False,
        **keys: Any,
    ) -> Sweep:
        """Start a run for each point of a grid, all on one warm base; returns when they are queued.

        grid: the values of each key: `{"trainer.lr": [1e-4, 3e-4], "seed": [1, 2]}`.
        name: the name of the sweep; its runs are NAME-1, NAME-2, …
        halving: stop the worse runs at each rung.
        spec, keys: see `run`.

        Raises SpecError.
        """
        text, source, cwd = spec_text(spec)
        started = self.client.sweep(
            text,
            source=source,
            cwd=cwd,
            overrides=[*axes(grid, self.client.where), *overrides(keys, self.client.where)],
            name=name,
            halving=HalvingRequest() if halving is True else halving or None,
        )
        for warning in started.warnings:
            _log.warning("%s: %s", started.sweep, warning)
        return Sweep(self._connection, started.sweep)

    def get_sweep(self, name: str) -> Sweep:
        """Find a sweep by its name. Raises NotFound."""
        sweep = Sweep(self._connection, name)
        return Sweep(self._connection, sweep.details.sweep)

    def events(self, after: int = -1) -> Iterator[Event]:
        """Yield events of all runs with id > after, for ever, as they happen; `after=-1`: only new ones."""
        return (event for event in self.client.events(after) if event.kind != "idle")

    # -- versions and what serves ----------------------------------------------------------------------------
    @property
    def aliases(self) -> Table[ServedAlias]:
        """What is served under which name, and who asks for it how much."""
        return Table(self.client.aliases())

    def swap(self, alias: str, version: str | Version | None = None, *, rollback: bool = False) -> Swapped:
        """Serve a version under an alias, once it is loaded and attested; returns when the gateway answers.

        version: run@number, run@best, or one of `run.versions`.
        rollback: serve the version before instead.

        Raises AttestationFailed and AdapterRefused, which change nothing, and NotFound.
        """
        named = None if version is None else version_name(version)
        return self.client.swap(alias, named, rollback=rollback)

    def remove_alias(self, alias: str) -> RemovedAlias:
        """Serve nothing under an alias any more. Raises NotFound."""
        return self.client.remove_alias(alias)

    def pin(self, version: str | Version) -> Version:
        """Keep a version loaded, and its files safe. Raises NotFound."""
        return self.client.pin(version_name(version))

    def unpin(self, version: str | Version) -> Version:
        """Remove a pin. Raises NotFound."""
        return self.client.unpin(version_name(version))

    def export(self, version: str | Version, directory: str | os.PathLike[str]) -> Exported:
        """Copy a version, verified, into a new or empty directory that PEFT, SGLang and vLLM load.

        Raises NotFound, Conflict for a directory with files, and IntegrityError.
        """
        return self.client.export(version_name(version), str(expanded(directory).absolute()))

    def generate(
        self,
        version: str | Version,
        prompt: str,
        *,
        n: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_new_tokens: int = 64,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> Completions:
        """Complete a prompt `n` times with a version; its pool is started if it is not warm.

        version: an alias, run@number, run@best, a run's name for its current version, or one of
        `run.versions`.
        n: how many completions.
        temperature: 0 is greedy.
        top_k: 0 is all.
        stop: texts that end a completion.

        Raises NotFound, SpecError.
        """
        sampling = Sampling(n, temperature, top_p, top_k, max_new_tokens, seed, list(stop))
        return self.client.generate(version_name(version), prompt, sampling)

    def eval(
        self,
        version: str | Version,
        data: str | os.PathLike[str] | None = None,
        *,
        reward: str | None = None,
        problems: int | None = None,
        n: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_new_tokens: int | None = None,
        pass_at: float = 1.0,
        prompt_key: str | None = None,
        answer_key: str | None = None,
        env: str | None = None,
        suite: str | None = None,
        python: str | None = None,
        out: str | os.PathLike[str] | None = None,
    ) -> Result:
        """Evaluate a version on rows, and keep the figures with it.

        data: a builtin task, a file of rows, or a hub dataset.
        reward: a builtin one or FILE.py:FUNCTION; by default the run's.
        problems: how many rows, from the first; by default all of a file, 256 of a task.
        n: completions of each problem, for avg@n and pass@k.
        temperature: 0 is greedy.
        top_k: 0 is all.
        max_new_tokens: by default the run's.
        pass_at: the reward from which a completion has passed.
        prompt_key, answer_key: columns of the rows.
        env: the environment whose episodes are played, a builtin one or FILE.py:CLASS; by default the run's.
        suite: `lm_eval:TASK` or `inspect:FILE` instead of data.
        python: the interpreter that has the suite; by default this one.
        out: a file for the completions.

        Raises SpecError, NotFound, and what ended the evaluation.
        """
        from lorad.client.evaluate import evaluated  # slow: it knows builtin tasks

        if (data is None) == (suite is None):
            raise SpecError("either data or a suite is evaluated", hint='For example eval("r@4", "sort").')
        settings: dict[str, Any] = {
            "data": None if data is None else os.fspath(data), "reward": reward, "problems": problems, "n": n,
            "temperature": temperature, "top_p": top_p, "top_k": top_k, "max_new_tokens": max_new_tokens,
            "pass_at": pass_at, "prompt_key": prompt_key, "answer_key": answer_key, "env": env,
        }  # fmt: skip
        return evaluated(
            self.client,
            version_name(version),
            settings,
            suite=suite,
            python=python or sys.executable,
            out="" if out is None else os.fspath(out),
            note=_log.warning,
        )

    # -- the machine -----------------------------------------------------------------------------------------
    @property
    def pools(self) -> Table[Pool]:
        """Base models that are kept warm."""
        return Table(self.client.pools())

    @property
    def devices(self) -> Table[Device]:
        """What there is to run on, and who uses it."""
        return Table(self.client.devices())

    @property
    def nodes(self) -> Table[NodeStatus]:
        """The nodes of the cluster, and who has them."""
        return Table(self.client.nodes())

    def __repr__(self) -> str:
        where = self.client.where
        return f"<Lorad {where.root if isinstance(where, Home) else where.name}>"


def _several(words: str | Sequence[str] | None) -> list[str]:
    """Return one word, several or none as a list."""
    if words is None:
        return []
    return [words] if isinstance(words, str) else [*words]
