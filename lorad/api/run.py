"""A run, from Python."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct, structs

from lorad.api import picture, watch
from lorad.api.connection import DaemonConnection, rest
from lorad.api.inputs import overrides
from lorad.api.table import Table
from lorad.api.waiting import is_over, pages, wait
from lorad.client.client import Client
from lorad.client.columns import seconds_left
from lorad.client.conditions import condition
from lorad.client.words import share
from lorad.errors import DaemonUnreachable
from lorad.records import runs
from lorad.records.measured import Evaluation, Result, Step
from lorad.records.runs import Event, Removed, RunDetails
from lorad.records.samples import Sample
from lorad.records.versions import Checkpoint, Version
from lorad.why.finding import Why
from lorad.why.table import explain

_PERIOD = 0.3  # seconds between looks at a log
_ABOUT = ("step", "version", "attempt", "at")
_FIRST = ("reward", "loss", "kl", "tokens_per_second", "seconds")  # metrics that a table begins with


class Progress(Struct, frozen=True):
    """How far a run is."""

    state: str  # lorad.states.RunState
    step: int
    steps: int  # how many are planned; 0 where a client decides
    share: float  # 0 to 1; 0 without a planned end
    seconds_left: float | None  # by the measured time of its steps; None when nothing works on it


class Run:
    """A run: `lorad.connect().get("sorter")`, or what `Lorad.run` has started.

    Every attribute but `name` and `summary` asks the daemon when it is read. Safe to use from several
    threads. Every method raises NotFound when the run does not exist any more, and DaemonUnreachable when no
    daemon answers. In Jupyter it shows a bar and a curve.
    """

    def __init__(self, connection: DaemonConnection, summary: runs.Run) -> None:
        self._connection = connection
        self._summary = summary

    # -- what it is ------------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        """The run's name."""
        return self._summary.name

    @property
    def summary(self) -> runs.Run:
        """The run as this handle saw it last, without asking."""
        return self._summary

    @property
    def details(self) -> RunDetails:
        """Everything about the run, as `lorad show` has it."""
        self._summary = details = self._client.show(self.name)
        return details

    @property
    def state(self) -> str:
        """Where it is in its life: queued, starting, running, stopping, paused or ended."""
        return self.details.state

    @property
    def spec(self) -> dict[str, Any]:
        """The whole spec with its defaults, as plain data."""
        return self.details.spec

    @property
    def progress(self) -> Progress:
        """How far it is, and how long it still takes."""
        run = self.details
        return Progress(run.state, run.step, run.steps, share(run), seconds_left(run))

    # -- what it measured and wrote --------------------------------------------------------------------------
    @property
    def steps(self) -> Table[Step]:
        """The steps of the surviving lineage, in order; as a table with a column for each metric."""
        return Table(pages(self._client, self.name), row=_step_row)

    @property
    def evals(self) -> Table[Evaluation]:
        """Its held-out evaluations, in order; as a table with `eval`, and `eval/NAME` for further sets."""
        return Table(self._client.evals(self.name), row=_eval_row)

    def samples(
        self,
        step: int | None = None,
        *,
        eval: str | None = None,
        problem: int | None = None,
        limit: int = 1000,
    ) -> Table[Sample]:
        """Read what the model wrote at a step, by default the last.

        eval: the set of held-out problems whose completions are read instead; `main` is that of data.eval.
        problem: the number of one problem, whose completions at all steps are read.
        limit: how many samples at most.
        """
        return Table(self._client.samples(self.name, step=step, eval=eval, problem=problem, limit=limit))

    def why(self) -> Why:
        """Say why it does not learn, as `lorad why` does: `findings`, the most likely cause first."""
        return explain(self._client, self.name)

    @property
    def versions(self) -> Table[Version]:
        """Its versions, oldest first."""
        return Table(self._client.adapters(self.name))

    @property
    def checkpoints(self) -> Table[Checkpoint]:
        """The checkpoints that it can be resumed from."""
        return Table(self._client.checkpoints(self.name))

    @property
    def results(self) -> Table[Result]:
        """The results of evaluating its versions."""
        return Table(self._client.results(self.name))

    def events(self, after: int = 0) -> Iterator[Event]:
        """Yield its events with id > after as they happen, until the run is over; `after=-1`: only new ones.

        A daemon that dies meanwhile is started again where `connect` may, and no event is lost.
        """
        if after < 0:
            after = self._newest_event()
        last = self._last_event()
        while last is None or after < last:
            try:
                for event in self._client.events(after, run=self.name):
                    if event.kind != "idle":
                        after = event.id
                        yield event
                    if event.kind in ("idle", "state") or (last is not None and after >= last):
                        last = self._last_event()
                    if last is not None and after >= last:
                        return
                    rest(0)
            except DaemonUnreachable as error:
                self._connection.revive(error)

    def logs(self, of: str = "driver", *, size: int = 65536) -> str:
        """Read the end of a log.

        of: driver, pool, trainer or engine.
        size: how many bytes at most.
        """
        return self._client.logs(self.name, of=of, offset=-size, limit=size).text

    def follow_logs(self, of: str = "driver", *, size: int = 65536) -> Iterator[str]:
        """Yield the end of a log, and what is added to it, until the run is over. See `logs`."""
        offset = -size
        while True:
            try:
                part = self._client.logs(self.name, of=of, offset=offset)
            except DaemonUnreachable as error:
                self._connection.revive(error)
                continue
            offset = part.offset
            if part.text:
                yield part.text
            elif is_over(self.details):
                return
            rest(0 if part.text else _PERIOD)

    # -- waiting ---------------------------------------------------------------------------------------------
    def wait(
        self, *, until: str | Callable[[RunDetails], bool] | None = None, timeout: float | None = None
    ) -> RunDetails:
        """Wait until the run is over, that is ended or paused.

        until: a condition that ends the wait earlier, once a step or an evaluation fulfils it: `eval>0.9`,
            `step>=20`, `loss<0.1`; or a function of the run's details. What happened before counts.
        timeout: seconds.

        Raises RunFailed when it does not end well, NotReached when it is over without what `until` says,
        TimedOut, and SpecError for an `until` that is no condition. A daemon that dies meanwhile is started
        again where `connect` may.
        """
        goal = condition(until) if isinstance(until, str) else until
        self._summary = details = wait(self._connection, self.name, until=goal, timeout=timeout)
        return details

    def watch(self, *, period: float = 1.0) -> None:
        """Show the run in place until it is over: a bar and a curve in Jupyter, a line elsewhere.

        period: seconds between looks. An interrupt (Ctrl-C, or the kernel's) ends the watching, and not the
        run.
        """
        watch.watch(self, period)

    # -- control ---------------------------------------------------------------------------------------------
    def stop(self) -> "Run":
        """Have it finish its step, write a checkpoint and end; it can still be resumed. Returns at once."""
        return self._updated(self._client.stop(self.name))

    def pause(self) -> "Run":
        """Have it finish its step and write a checkpoint, and keep it for `resume`. Returns at once."""
        return self._updated(self._client.pause(self.name))

    def kill(self) -> "Run":
        """End it at once; a resume starts at its last checkpoint."""
        return self._updated(self._client.kill(self.name))

    def resume(self, /, *, step: int | None = None, steps: int | None = None, **keys: Any) -> "Run":
        """Continue exactly from the checkpoint of a step, by default the newest.

        steps: the new total of steps.
        keys: keys of the spec that change from now on: `trainer={"backend": "fsdp"}`.

        Raises Conflict while the run is at work, and SpecError for keys that may not change.
        """
        changed = overrides(keys, self._client.where)
        return self._updated(self._client.resume(self.name, step=step, steps=steps, overrides=changed))

    def fork(
        self,
        /,
        version: int | str | None = None,
        *,
        name: str | None = None,
        steps: int | None = None,
        fresh: bool = False,
        **keys: Any,
    ) -> "Run":
        """Start a new run from a version of this one, by default the current one, with its optimizer's state.

        version: its number, or `best`.
        name: the name of the new run; by default RUN-fork.
        steps: how many steps the new run makes.
        fresh: take the weights without the optimizer's state.
        keys: keys of the spec that are different.

        Raises SpecError and Conflict.
        """
        origin = self.name if version is None else f"{self.name}@{version}"
        changed = overrides(keys, self._client.where)
        forked = self._client.fork(origin, overrides=changed, name=name, steps=steps, fresh=fresh)
        return Run(self._connection, forked)

    def rename(self, name: str) -> "Run":
        """Give it another name.

        Raises Conflict while it works or something uses one of its versions, and where another run has or had
        the name.
        """
        return self._updated(self._client.rename(self.name, name))

    def remove(self) -> Removed:
        """Delete the run with its versions, checkpoints, samples and logs. Raises Conflict while it is at
        work."""
        return self._client.remove(self.name)

    # -- how it shows ----------------------------------------------------------------------------------------
    def __repr__(self) -> str:
        return f"<Run {picture.line(self._summary)}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return what Jupyter shows; without a daemon, what was seen last."""
        try:
            run = self.details
            page = picture.page(run, picture.curves(self._client, run))
        except DaemonUnreachable:
            return {"text/plain": repr(self)}
        return {"text/plain": picture.line(run), "text/html": page}

    # -- inside ----------------------------------------------------------------------------------------------
    @property
    def _client(self) -> Client:
        return self._connection.client

    def _updated(self, summary: runs.Run) -> "Run":
        """Remember what the daemon said of the run now."""
        self._summary = summary
        return self

    def _last_event(self) -> int | None:
        """Return the id of the last event of a run that is over, else None."""
        return self._newest_event() if is_over(self.details) else None

    def _newest_event(self) -> int:
        return max((event.id for event in self._client.history(self.name, limit=1)), default=0)


def run_row(run: Run) -> dict[str, Any]:
    """Make the row of a run in a table of runs."""
    plain: Mapping[str, Any] = structs.asdict(run.summary)
    left_out = ("rates", "signals", "recent")
    return {key: plain[key] for key in runs.Run.__struct_fields__ if key not in left_out}


def _step_row(step: Step) -> dict[str, Any]:
    row = {key: getattr(step, key) for key in _ABOUT}
    first = {key: step.metrics[key] for key in _FIRST if key in step.metrics}
    return row | first | dict(step.metrics)


def _eval_row(evaluation: Evaluation) -> dict[str, Any]:
    row = {key: getattr(evaluation, key) for key in (*_ABOUT, "problems", "failed")}
    more = {key: getattr(evaluation, key) for key in ("perplexity", "token_accuracy")}
    return row | dict(evaluation.figures) | {key: value for key, value in more.items() if value is not None}
