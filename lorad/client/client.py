"""The daemon's API, one method per request of `lorad.records.routes`, which has their bodies and answers.

Every method raises DaemonUnreachable when no daemon answers, and otherwise the error that the daemon sent
(see `lorad.errors`). An answer that does not fit its Struct, as one of another version's daemon, is a
LoradError.
"""

import builtins
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, get_origin

from msgspec import Struct

from lorad.box.paths import Home
from lorad.client.answers import Query, answer_of, written
from lorad.client.boxes.hosts import Place, place
from lorad.client.choice import Choice
from lorad.client.transport import Transport
from lorad.errors import DaemonUnreachable, SpecError, from_wire
from lorad.records import requests, versions
from lorad.records.bill import Bill
from lorad.records.checks import Check
from lorad.records.daemon import Census, Collected, Orphan, Shutdown, Status, Verification
from lorad.records.devices import Device
from lorad.records.measured import Evaluation, Result, Step
from lorad.records.pools import NodeStatus, Pool
from lorad.records.routes import Api, Route
from lorad.records.runs import Event, Forked, LogPart, Removed, Resumed, Run, RunDetails, RunGroup
from lorad.records.samples import Sample, TrialEvent
from lorad.records.sweeps import StartedSweep, Sweep
from lorad.selection import Selection

T = TypeVar("T")


class Client:
    """Talks to the daemon of one home, here or on another box.

    Cheap to make; safe to use from several threads (a connection per request).
    """

    def __init__(
        self, where: "Place | None" = None, *, timeout: float = 600.0, transport: Transport | None = None
    ) -> None:
        self.where = where or place()
        if transport is not None:
            self._http = transport
        elif isinstance(self.where, Home):
            self._http = Transport(self.where.socket, timeout)
        else:
            self._http = self.where.transport(timeout)

    @property
    def home(self) -> Home:
        """The home, with files on this machine. Raises SpecError where it is on another one."""
        if isinstance(self.where, Home):
            return self.where
        message = f"this reads files of lorad's home, which is on {self.where.name}"
        raise SpecError(message, hint=f"Call it there: `ssh {self.where.entry.ssh}`.")

    def telling(self, tell: Callable[[str], None]) -> "Client":
        """Call `tell` with what the daemon does while this client waits for it, and with "" at the end."""
        self._http.on_doing = tell
        return self

    def patient(self, timeout: float) -> "Client":
        """Make the same client with another timeout, in seconds."""
        transport = copy.copy(self._http)
        transport.timeout = timeout
        return Client(self.where, transport=transport)

    def _ask(self, route: Route[T], content: Struct | Query | None = None, /, **names: str) -> T:
        """Send a request with `names` in its path, and `content` as its body or its query."""
        answer = self._http.ask(*written(route, content, names))
        is_list = get_origin(route.answer) is builtins.list
        return answer_of(route.answer, answer["items"] if is_list else answer)

    # -- the daemon ------------------------------------------------------------------------------------------
    def status(self) -> Status:
        return self._ask(Api.show_status)

    def shutdown(self, *, gateway: bool = False, pools: bool = False) -> Shutdown:
        """Ask the daemon to exit. Runs continue, and so do gateway and pools unless told to end as well.

        A pool with a run at work does not end.
        """
        return self._ask(Api.shutdown, requests.ShutdownRequest(gateway, pools))

    def database(self) -> Census:
        """Check the whole database, and its rows against the disk."""
        return self._ask(Api.check_database)

    def orphans(self) -> builtins.list[Orphan]:
        """List processes of lorad that nothing looks after any more."""
        return self._ask(Api.list_orphans)

    def pools(self) -> builtins.list[Pool]:
        return self._ask(Api.list_pools)

    def stop_pool(self, pool: str, *, force: bool = False) -> Pool:
        """End a pool. Raises Conflict while a run or a request uses it, unless `force` ends these, too."""
        return self._ask(Api.stop_pool, {"force": int(force)}, pool=pool)

    def bill(
        self,
        by: str = "run",
        *,
        user: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> Bill:
        """Return who used how much. Raises SpecError.

        by: what a line is about: run, user, sweep, alias, pool or day.
        since, until: Unix times; use is kept by the hour.
        """
        times = {"since": since, "until": until}
        hours = {key: None if at is None else int(at) for key, at in times.items()}
        return self._ask(Api.show_bill, {"by": by, "user": user or None, **hours})

    def nodes(self) -> builtins.list[NodeStatus]:
        """List the nodes of the cluster, see docs/cluster.md."""
        return self._ask(Api.list_nodes)

    def devices(self, *, history: bool = False) -> builtins.list[Device]:
        """List the devices of the machine, with `history` also what was measured in the last hour."""
        return self._ask(Api.list_devices, {"history": 1 if history else None})

    def reserve(self, device: str, request: requests.ReserveRequest) -> Device:
        """Keep a device from lorad. The reservation begins when nothing of lorad is on it any more."""
        return self._ask(Api.reserve_device, request, device=device)

    def release(self, device: str) -> Device:
        return self._ask(Api.release_device, device=device)

    def events(self, after: int = 0, *, run: str | None = None) -> Iterator[Event]:
        """Yield events with id > after, for ever, as they happen; `after=-1` yields only new ones.

        While nothing happens, an event of kind `idle` comes every few seconds, so that a reader can look up.
        """
        for event in self._http.stream(*written(Api.read_events, {"after": after, "run": run or None})):
            yield answer_of(Event, event)

    def history(self, run: str | None = None, *, limit: int = 200) -> builtins.list[Event]:
        """List the last events that the caller may see, or those of one run, oldest first, at most 1000."""
        return self._ask(Api.read_events, {"last": limit, "run": run or None})

    # -- runs ------------------------------------------------------------------------------------------------
    def run(
        self,
        spec: str,
        *,
        source: str,
        cwd: str,
        overrides: Sequence[str],
        name: str | None,
        suffix: bool = False,
        replace: bool = False,
    ) -> Run:
        """Check (preflight) and queue a run. The arguments are the fields of RunRequest."""
        request = requests.RunRequest(spec, source, cwd, [*overrides], name, suffix, replace)
        return self._ask(Api.run, request)

    def check(self, request: requests.RunRequest) -> Check:
        """Check a spec as `run` does, and say what it needs and when it would start. Nothing is queued."""
        return self._ask(Api.check, request)

    def list(self, *, all: bool = False, limit: int = 0) -> builtins.list[Run]:
        """List runs, newest first; without `all`, only those that have not ended or ended in the last day.

        limit: how many runs at most, though those that have not ended are always listed; 0 is no limit.
        """
        return self._ask(Api.list_runs, {"all": int(all), "limit": limit})

    def select(
        self,
        selection: Selection,
        *,
        recent: bool = False,
        keys: Sequence[str] = (),
        sort: Sequence[str] = (),
        limit: int = 0,
    ) -> builtins.list[Run]:
        """List the runs that a selection means, newest first where `sort` says nothing else.

        The arguments are the fields of SelectRequest; the runs have what `keys` name as `values`. Raises
        SpecError for a word that is neither column, key nor metric.
        """
        request = requests.SelectRequest(selection, recent, [*keys], [*sort], limit)
        return self._ask(Api.select_runs, request)

    def named(self, names: Sequence[str]) -> builtins.list[Run]:
        """List the runs with these names, at most 100, newest first."""
        return self._ask(Api.list_runs, {"names": ",".join(names)})

    def show(self, run: str) -> RunDetails:
        return self._ask(Api.show_run, run=run)

    def resume(
        self, run: str, *, step: int | None = None, steps: int | None = None, overrides: Sequence[str] = ()
    ) -> Resumed:
        """Queue a new attempt from the checkpoint at `step`, by default the newest whole one.

        overrides: `key=value` for what may change between attempts, as trainer, rollout, pool, resources.
        """
        request = requests.ResumeRequest(step, steps, [*overrides])
        return self._ask(Api.resume, request, run=run)

    def pause(self, run: str) -> Run:
        """Have a run finish its step, write a checkpoint and wait for `resume`."""
        return self._ask(Api.pause, run=run)

    def stop(self, run: str) -> Run:
        """Have a run finish its step, write a checkpoint and end."""
        return self._ask(Api.stop, run=run)

    def kill(self, run: str) -> Run:
        return self._ask(Api.kill, run=run)

    def remove(self, run: str) -> Removed:
        """Delete an ended or paused run with its directory."""
        return self._ask(Api.remove, run=run)

    def label(
        self, run: str, *, add: Sequence[str] = (), remove: Sequence[str] = (), note: str | None = None
    ) -> Run:
        """Add tags to a run, take some off it, and write its note; None leaves the note as it is."""
        request = requests.LabelRequest([*add], [*remove], note)
        return self._ask(Api.label, request, run=run)

    def edit(self, run: str, overrides: Sequence[str]) -> Run:
        """Change keys of a queued run: resources and, before its first attempt, trainer.steps."""
        return self._ask(Api.edit, requests.EditRequest([*overrides]), run=run)

    def rename(self, run: str, name: str) -> Run:
        """Give a run that does not work another name."""
        return self._ask(Api.rename, requests.RenameRequest(name), run=run)

    def groups(self) -> builtins.list[RunGroup]:
        return self._ask(Api.list_groups)

    def limit_group(self, group: str, limit: int | None) -> RunGroup:
        """Let at most `limit` runs of a group work at a time; None is any number."""
        return self._ask(Api.limit_group, requests.GroupRequest(limit), group=group)

    def steps(self, run: str, *, after: int = 0, limit: int = 10000, every: int = 1) -> builtins.list[Step]:
        """List steps of the surviving lineage with step > after, in order, at most `limit` of them.

        every: list only steps that are multiples of it, and the last step of all.
        """
        query = {"after": after, "limit": limit, "every": every if every > 1 else None}
        return self._ask(Api.list_steps, query, run=run)

    def evals(self, run: str) -> builtins.list[Evaluation]:
        return self._ask(Api.list_evals, run=run)

    def samples(
        self,
        run: str,
        *,
        step: int | None = None,
        limit: int = 1000,
        eval: str | None = None,
        problem: int | None = None,
        prompt_id: str | None = None,
        choice: Choice | None = None,
        brief: bool = False,
    ) -> builtins.list[Sample]:
        """Read the samples of one step, by default the last. Raises SpecError, NotFound, IntegrityError.

        eval: the set of problems whose completions are read instead; `main` is that of data.eval.
        problem: the number of the only problem that is read; with `eval`, at all steps.
        prompt_id: the id of the only prompt that is read, at one step.
        choice: which samples are read, and in which order, before `limit` cuts.
        brief: leave out tokens and log-probabilities, but keep how many there were and their mean.
        """
        choice = choice or Choice()
        query: Query = {
            "limit": limit,
            "step": step,
            "eval": eval,
            "problem": problem,
            "prompt_id": prompt_id,
            "where": choice.where or None,
            "sort": None if choice.sort == "drawn" else choice.sort,
            "reverse": int(choice.reverse) or None,
            "brief": int(brief) or None,
        }
        return self._ask(Api.list_samples, query, run=run)

    def logs(
        self, run: str, *, of: str = "driver", attempt: int = 0, offset: int = -65536, limit: int = 1 << 20
    ) -> LogPart:
        """Read a part of a log, from a byte offset; a negative one counts from the end.

        attempt: the attempt whose driver wrote the log; 0 for the newest.
        """
        query: Query = {"of": of, "offset": offset, "limit": limit, "attempt": attempt or None}
        return self._ask(Api.read_log, query, run=run)

    def log_names(self, run: str) -> builtins.list[str]:
        """List the logs of a run that `logs` can read now: `driver`, `pool`, `trainer`, `engine-0`, …"""
        return self._ask(Api.list_logs, run=run)

    def own_logs(self, of: str, *, offset: int = -65536, limit: int = 1 << 20) -> LogPart:
        """Read the log of the `daemon`, or of the caller's `gateway`, as `logs` does.

        An admin's gateway is the one that everybody asks; any other user's is the one of their own versions.
        """
        return self._ask(Api.read_own_log, {"of": of, "offset": offset, "limit": limit})

    # -- versions --------------------------------------------------------------------------------------------
    def adapters(self, run: str | None = None) -> builtins.list[versions.Version]:
        return self._ask(Api.list_versions, {"run": run or None})

    def checkpoints(self, run: str) -> builtins.list[versions.Checkpoint]:
        return self._ask(Api.list_checkpoints, run=run)

    def export(self, version: str, directory: str) -> versions.Exported:
        """Copy a version (run@number), verified, as a PEFT directory."""
        if not isinstance(self.where, Home):
            from lorad.client.archive import fetch_version  # slow, and rarely needed

            return fetch_version(self._http, version, directory)
        return self._ask(Api.export, requests.ExportRequest(directory), version=version)

    def pin(self, version: str) -> versions.Version:
        """Keep a version loaded and its files safe. The next request for it starts its pool."""
        return self._ask(Api.pin, version=version)

    def unpin(self, version: str) -> versions.Version:
        return self._ask(Api.unpin, version=version)

    def discard(self, version: str) -> versions.Version:
        """Delete the files of a version. Raises Conflict while something needs them."""
        return self._ask(Api.discard_files, version=version)

    def aliases(self) -> builtins.list[versions.ServedAlias]:
        return self._ask(Api.list_aliases)

    def alias_moves(self, alias: str) -> builtins.list[versions.AliasMove]:
        """List the moves of an alias, newest first."""
        return self._ask(Api.list_moves, alias=alias)

    def swap(self, alias: str, version: str | None = None, *, rollback: bool = False) -> versions.Swapped:
        """Serve another version under an alias, or the one before (`rollback`), once it is attested.

        A refused version changes nothing. Returns when the gateway answers.
        """
        return self._ask(Api.swap, requests.SwapRequest(version, rollback), alias=alias)

    def remove_alias(self, alias: str) -> versions.RemovedAlias:
        return self._ask(Api.remove_alias, alias=alias)

    def verify(self, run: str) -> Verification:
        """Hash again what a run wrote, audit it, and attest again those of its versions that are loaded."""
        return self._ask(Api.verify, run=run)

    def gc(self, *, dry_run: bool = False) -> Collected:
        """Delete files that nothing can ask for."""
        return self._ask(Api.collect, requests.CollectRequest(dry_run))

    def serve(
        self, model: str, adapters: Sequence[requests.AdapterRequest], *, cwd: str, overrides: Sequence[str]
    ) -> versions.ServedModel:
        """Keep a base warm and serve PEFT directories under aliases.

        overrides: `key=value` for rollout, pool and resources of a spec.
        """
        request = requests.ServeRequest(model, cwd, [*adapters], [*overrides])
        return self._ask(Api.serve, request)

    def stop_serving(self, model: str) -> versions.StoppedServing:
        """Let the pool of a base end once it is idle. Aliases stay."""
        return self._ask(Api.stop_serving, requests.ModelRequest(model))

    def serving(self, model: str) -> versions.LoadedModel:
        """Start the pool of `model`, an alias or run@version, and load it. Returns what a gateway needs."""
        return self._ask(Api.bring_up, requests.ModelRequest(model))

    def serving_base(
        self, spec: str, *, source: str, cwd: str, overrides: Sequence[str]
    ) -> versions.LoadedModel:
        """Start the pool that a run of this spec would have, to sample from its base."""
        request = requests.RunRequest(spec, source, cwd, [*overrides])
        return self._ask(Api.bring_up_base, request)

    def sweep(
        self,
        spec: str,
        *,
        source: str,
        cwd: str,
        overrides: Sequence[str],
        name: str | None,
        halving: requests.HalvingRequest | None,
        points: requests.PointsRequest | None = None,
    ) -> StartedSweep:
        """Queue a run for each of `points`, or of the grid that overrides with several values make."""
        chosen = points or requests.PointsRequest()
        request = requests.SweepRequest(spec, source, cwd, [*overrides], name, halving=halving, points=chosen)
        return self._ask(Api.sweep, request)

    def sweeps(self, name: str | None = None) -> builtins.list[Sweep]:
        """List the sweeps, newest first, or only the one of a name."""
        return self._ask(Api.list_sweeps, {"sweep": name or None})

    def fork(
        self, version: str, *, overrides: Sequence[str], name: str | None, steps: int | None, fresh: bool
    ) -> Forked:
        """Start a new run from a version and its optimizer's state; `fresh` leaves the state out."""
        request = requests.ForkRequest([*overrides], name, steps, fresh)
        return self._ask(Api.fork, request, version=version)

    def trial(
        self, spec: str, *, source: str, cwd: str, overrides: Sequence[str], n: int
    ) -> Iterator[TrialEvent]:
        """Try a spec on `n` rows of its data, and yield what happens. Raises what ended the trial."""
        request = requests.TrialRequest(spec, source, cwd, [*overrides], n)
        for line in self._http.stream(*written(Api.try_out, request)):
            event = answer_of(TrialEvent, line)
            if event.error is not None:
                raise from_wire(line["error"])
            yield event
            if event.kind == "end":
                return
        raise DaemonUnreachable("the daemon ended during the trial", hint=self._http.restart)

    def generate(self, version: str, prompt: str, sampling: requests.Sampling) -> versions.Completions:
        """Complete a prompt with a version: an alias, run@number, or a run's name for its current one."""
        request = requests.GenerateRequest(version, prompt, sampling)
        return self._ask(Api.generate, request)

    def complete(
        self,
        version: str,
        prompts: builtins.list[builtins.list[int]],
        seeds: builtins.list[builtins.list[int]],
        sampling: requests.Sampling,
    ) -> versions.Completions:
        """Complete several prompts of token ids. The completions of a prompt follow each other."""
        request = requests.GenerateRequest(version, "", sampling, prompts, seeds)
        return self._ask(Api.generate, request)

    def keep_result(self, version: str, result: requests.ResultRequest) -> Result:
        return self._ask(Api.keep_result, result, version=version)

    def results(self, run: str | None = None) -> builtins.list[Result]:
        """List the results of evaluating the versions of a run, or the last results of all."""
        return self._ask(Api.list_results, {"run": run or None})
