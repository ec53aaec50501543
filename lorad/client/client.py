"""The daemon's API, one method per request. The bodies of requests are the Structs of `requests.py`,
the answers those of `shapes.py` and `box_shapes.py`.

Every method raises DaemonUnreachable when no daemon answers, and otherwise the error that the daemon sent
(see `lorad.errors`). An answer that does not fit its Struct, as one of another version's daemon, is a
LoradError.
"""

import builtins
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from lorad.box.paths import Home, default_home
from lorad.client import box_shapes, check_shapes, mark_shapes, requests, shapes
from lorad.client.choice import Choice
from lorad.client.transport import RESTART, Transport
from lorad.errors import DaemonUnreachable, LoradError, NotFound, from_wire
from lorad.selection import Selection

T = TypeVar("T")


class Client:
    """Talks to the daemon of one home.

    Cheap to make; safe to use from several threads (a connection per request).
    """

    def __init__(
        self, home: Home | None = None, *, timeout: float = 600.0, transport: Transport | None = None
    ) -> None:
        self.home = home or Home(default_home())
        self._http = transport or Transport(self.home.socket, timeout)

    def telling(self, tell: Callable[[str], None]) -> "Client":
        """Have what the daemon does about a request of this client told while it is waited for, and "" at its
        end.
        """
        self._http.on_doing = tell
        return self

    def patient(self, timeout: float) -> "Client":
        """Make the same client with another timeout, in seconds."""
        return Client(self.home, transport=self._http.patient(timeout))

    # -- the daemon ------------------------------------------------------------------------------------------
    def status(self) -> box_shapes.Status:
        return _as(box_shapes.Status, self._http.get("/v1/status"))

    def shutdown(self, *, gateway: bool = False, pools: bool = False) -> box_shapes.Shutdown:
        """Ask the daemon to exit; runs continue, and so do gateway and pools unless they are to end as well.

        A pool with a run at work does not end."""
        return _as(
            box_shapes.Shutdown, self._http.post("/v1/shutdown", requests.ShutdownRequest(gateway, pools))
        )

    def database(self) -> box_shapes.Census:
        """Check the whole database, and its rows against the disk."""
        return _as(box_shapes.Census, self._http.get("/v1/database"))

    def orphans(self) -> builtins.list[box_shapes.Orphan]:
        return _as(builtins.list[box_shapes.Orphan], self._http.list_of("/v1/orphans"))

    def pools(self) -> builtins.list[box_shapes.Pool]:
        return _as(builtins.list[box_shapes.Pool], self._http.list_of("/v1/pools"))

    def stop_pool(self, pool: str, *, force: bool = False) -> box_shapes.Pool:
        """End a pool. Raises Conflict while a run or a request uses it, unless by force: the runs then end,
        and can be resumed."""
        return _as(box_shapes.Pool, self._http.delete(f"/v1/pools/{quote(pool)}?force={int(force)}"))

    def bill(
        self,
        by: str = "run",
        *,
        user: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> box_shapes.Bill:
        """Return who used how much. by: run, user, sweep, alias, pool or day. user: of theirs alone.

        since, until: Unix times; use is kept by the hour. Raises SpecError.
        """
        times = {"since": since, "until": until}
        query = {"by": by} | ({"user": user} if user else {})
        query |= {key: str(int(at)) for key, at in times.items() if at is not None}
        return _as(box_shapes.Bill, self._http.get(f"/v1/bill?{urlencode(query)}"))

    def nodes(self) -> builtins.list[box_shapes.Node]:
        """List the nodes of the cluster, see docs/cluster.md."""
        return _as(builtins.list[box_shapes.Node], self._http.list_of("/v1/nodes"))

    def devices(self, *, history: bool = False) -> builtins.list[box_shapes.Device]:
        """List the devices of the machine. history: with what was measured of them in the last hour."""
        path = f"/v1/devices{'?history=1' if history else ''}"
        return _as(builtins.list[box_shapes.Device], self._http.list_of(path))

    def reserve(self, device: str, request: requests.ReserveRequest) -> box_shapes.Device:
        """Keep a device from lorad. It begins when nothing of lorad is there any more."""
        return _as(
            box_shapes.Device, self._http.post(f"/v1/devices/{quote(device, safe='')}/reserve", request)
        )

    def release(self, device: str) -> box_shapes.Device:
        """Let lorad use a device again that was reserved."""
        return _as(box_shapes.Device, self._http.delete(f"/v1/devices/{quote(device, safe='')}/reservation"))

    def events(self, after: int = 0, *, run: str | None = None) -> Iterator[shapes.Event]:
        """Events with id > after, for ever, as they happen (NDJSON); `after=-1`: only new ones. An event of
        kind `idle` comes every few seconds when nothing happens, so that a reader can look up."""
        query = {"after": after} | ({"run": run} if run else {})
        for event in self._http.stream("GET", f"/v1/events?{urlencode(query)}", None):
            yield _as(shapes.Event, event)

    def history(self, run: str | None = None, *, limit: int = 200) -> builtins.list[shapes.Event]:
        """List the last events, of all that the caller may see or of one run: oldest first, at most 1000."""
        query = {"last": limit} | ({"run": run} if run else {})
        return _as(builtins.list[shapes.Event], self._http.list_of(f"/v1/events?{urlencode(query)}"))

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
    ) -> shapes.Run:
        """Check (preflight) and queue a run. `source`: the file's name for messages; `cwd`: for its paths.

        suffix: take NAME-2 or the like where the name is in use. replace: remove the run of that name, which
        is over, once the check has passed.
        """
        request = requests.RunRequest(spec, source, cwd, [*overrides], name, suffix, replace)
        return _as(shapes.Run, self._http.post("/v1/runs", request))

    def check(self, request: requests.RunRequest) -> check_shapes.Check:
        """Check a spec as `run` does, and say what it comes to and when it would start. Nothing is queued."""
        return _as(check_shapes.Check, self._http.post("/v1/check", request))

    def list(self, *, all: bool = False, limit: int = 0) -> builtins.list[shapes.Run]:
        """List runs, newest first; without `all`, the active ones and those of the last day.

        limit: how many runs at most; those that have not ended are always listed. 0 is no limit.
        """
        return _as(builtins.list[shapes.Run], self._http.list_of(f"/v1/runs?all={int(all)}&limit={limit}"))

    def select(
        self,
        selection: Selection,
        *,
        recent: bool = False,
        keys: Sequence[str] = (),
        sort: Sequence[str] = (),
        limit: int = 0,
    ) -> builtins.list[shapes.Run]:
        """List the runs that are meant, newest first where `sort` says nothing else.

        recent: without those that ended over a day ago. keys: dotted keys of the spec, and metrics of the
        last step, which the runs have as `values`. sort: columns or keys; `-` before one puts the largest
        first. limit: how many; 0: all. Raises SpecError for a word that is neither.
        """
        request = requests.SelectRequest(selection, recent, [*keys], [*sort], limit)
        return _as(builtins.list[shapes.Run], self._http.post("/v1/select", request)["items"])

    def named(self, names: Sequence[str]) -> builtins.list[shapes.Run]:
        """List the runs with these names, at most 100, newest first."""
        return _as(
            builtins.list[shapes.Run],
            self._http.list_of(f"/v1/runs?names={','.join(quote(name) for name in names)}"),
        )

    def show(self, run: str) -> shapes.RunDetails:
        return _as(shapes.RunDetails, self._http.get(_path(run)))

    def resume(
        self, run: str, *, step: int | None = None, steps: int | None = None, overrides: Sequence[str] = ()
    ) -> shapes.Resumed:
        """Queue a new attempt from the checkpoint at `step` (default: the newest whole one).

        overrides: `key=value` of what may change between attempts: trainer, rollout, pool, resources and the
            like.
        """
        request = requests.ResumeRequest(step, steps, [*overrides])
        return _as(shapes.Resumed, self._http.post(f"{_path(run)}/resume", request))

    def pause(self, run: str) -> shapes.Run:
        return _as(shapes.Run, self._http.post(f"{_path(run)}/pause"))

    def stop(self, run: str) -> shapes.Run:
        return _as(shapes.Run, self._http.post(f"{_path(run)}/stop"))

    def kill(self, run: str) -> shapes.Run:
        return _as(shapes.Run, self._http.post(f"{_path(run)}/kill"))

    def remove(self, run: str) -> shapes.Removed:
        """Delete an ended or paused run with its directory."""
        return _as(shapes.Removed, self._http.delete(_path(run)))

    def label(
        self, run: str, *, add: Sequence[str] = (), remove: Sequence[str] = (), note: str | None = None
    ) -> shapes.Run:
        """Add tags to a run, take some off it, and write its note (None: as it is)."""
        request = mark_shapes.LabelRequest([*add], [*remove], note)
        return _as(shapes.Run, self._http.post(f"{_path(run)}/labels", request))

    def edit(self, run: str, overrides: Sequence[str]) -> shapes.Run:
        """Change keys of a queued run: resources, and trainer.steps before its first attempt."""
        return _as(shapes.Run, self._http.post(f"{_path(run)}/edit", mark_shapes.EditRequest([*overrides])))

    def rename(self, run: str, name: str) -> shapes.Run:
        """Give a run that does not work another name."""
        return _as(shapes.Run, self._http.post(f"{_path(run)}/rename", mark_shapes.RenameRequest(name)))

    def groups(self) -> builtins.list[mark_shapes.Group]:
        return _as(builtins.list[mark_shapes.Group], self._http.list_of("/v1/groups"))

    def limit_group(self, group: str, limit: int | None) -> mark_shapes.Group:
        """Let so many runs of a group work at a time; None is any number."""
        request = mark_shapes.GroupRequest(limit)
        return _as(mark_shapes.Group, self._http.post(f"/v1/groups/{quote(group, safe='')}", request))

    def steps(
        self, run: str, *, after: int = 0, limit: int = 10000, every: int = 1
    ) -> builtins.list[shapes.Step]:
        """Steps of the surviving lineage with step > after, in order. every: only multiples of it, at most
        `limit`, and the last step of all."""
        query = {"after": after, "limit": limit} | ({"every": every} if every > 1 else {})
        return _as(builtins.list[shapes.Step], self._http.list_of(f"{_path(run)}/steps?{urlencode(query)}"))

    def evals(self, run: str) -> builtins.list[shapes.Evaluation]:
        return _as(builtins.list[shapes.Evaluation], self._http.list_of(f"{_path(run)}/evals"))

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
    ) -> builtins.list[shapes.Sample]:
        """Read the samples of one step; by default those of the last.

        eval: the completions of this set of problems instead, `main` for that of data.eval. problem: those of
        one problem, by its number: of an evaluation at all steps, else of the step. prompt_id: those of one
        prompt by its id, at one step. choice: which of them, before `limit` counts. brief: without tokens and
        log-probabilities, whose number and mean are kept. Raises SpecError, NotFound, IntegrityError.
        """
        choice = choice or Choice()
        given: dict[str, Any] = {"step": step, "eval": eval, "problem": problem, "prompt_id": prompt_id}
        given |= {"where": choice.where or None, "sort": None if choice.sort == "drawn" else choice.sort}
        given |= {"reverse": int(choice.reverse) or None, "brief": int(brief) or None}
        query = {"limit": limit} | {key: value for key, value in given.items() if value is not None}
        return _as(
            builtins.list[shapes.Sample], self._http.list_of(f"{_path(run)}/samples?{urlencode(query)}")
        )

    def logs(
        self, run: str, *, of: str = "driver", attempt: int = 0, offset: int = -65536, limit: int = 1 << 20
    ) -> shapes.LogPart:
        """Read a part of a log, from a byte offset (negative: from the end).

        attempt: of the driver, whose log it is; 0: the newest.
        """
        query = {"of": of, "offset": offset, "limit": limit} | ({"attempt": attempt} if attempt else {})
        return _as(shapes.LogPart, self._http.get(f"{_path(run)}/logs?{urlencode(query)}"))

    def log_names(self, run: str) -> builtins.list[str]:
        """List which logs `logs` can read of a run now: `driver`, `pool`, `trainer`, `engine-0` and so on."""
        return _as(builtins.list[str], self._http.list_of(f"{_path(run)}/logs/names"))

    def own_logs(self, of: str, *, offset: int = -65536, limit: int = 1 << 20) -> shapes.LogPart:
        """Read the log of the `daemon`, or of the caller's `gateway`, as `logs` does.

        An admin's gateway is the one that everybody asks; any other user's is the one of their own versions.
        """
        return _as(
            shapes.LogPart,
            self._http.get(f"/v1/logs?{urlencode({'of': of, 'offset': offset, 'limit': limit})}"),
        )

    # -- versions --------------------------------------------------------------------------------------------
    def adapters(self, run: str | None = None) -> builtins.list[shapes.Version]:
        return _as(
            builtins.list[shapes.Version],
            self._http.list_of(f"/v1/versions?{urlencode({'run': run} if run else {})}"),
        )

    def checkpoints(self, run: str) -> builtins.list[shapes.Checkpoint]:
        return _as(builtins.list[shapes.Checkpoint], self._http.list_of(f"{_path(run)}/checkpoints"))

    def export(self, version: str, directory: str) -> shapes.Exported:
        """Copy a version, verified, as a PEFT directory. `version`: run@number."""
        path = f"/v1/versions/{quote(version, safe='')}/export"
        return _as(shapes.Exported, self._http.post(path, requests.ExportRequest(directory)))

    def pin(self, version: str) -> shapes.Version:
        """Keep a version loaded and its files safe. The next request for it starts its pool."""
        return _as(shapes.Version, self._http.post(f"/v1/versions/{quote(version, safe='')}/pin"))

    def unpin(self, version: str) -> shapes.Version:
        return _as(shapes.Version, self._http.post(f"/v1/versions/{quote(version, safe='')}/unpin"))

    def discard(self, version: str) -> shapes.Version:
        """Delete the files of a version. Raises Conflict while something needs them."""
        return _as(shapes.Version, self._http.delete(f"/v1/versions/{quote(version, safe='')}"))

    def aliases(self) -> builtins.list[shapes.ServedAlias]:
        return _as(builtins.list[shapes.ServedAlias], self._http.list_of("/v1/aliases"))

    def alias_moves(self, alias: str) -> builtins.list[shapes.Move]:
        """List the moves of an alias, newest first."""
        return _as(
            builtins.list[shapes.Move], self._http.list_of(f"/v1/aliases/{quote(alias, safe='')}/moves")
        )

    def swap(self, alias: str, version: str | None = None, *, rollback: bool = False) -> shapes.Swapped:
        """Serve another version under an alias, or the one before (`rollback`).

        The version is loaded and attested first; a refused one changes nothing. It returns when the gateway
        answers."""
        request = requests.SwapRequest(version, rollback)
        return _as(shapes.Swapped, self._http.post(f"/v1/aliases/{quote(alias, safe='')}", request))

    def remove_alias(self, alias: str) -> shapes.RemovedAlias:
        return _as(shapes.RemovedAlias, self._http.delete(f"/v1/aliases/{quote(alias, safe='')}"))

    def verify(self, run: str) -> box_shapes.Verification:
        """Hash what a run wrote again, audit it, and attest again what is loaded of it."""
        return _as(box_shapes.Verification, self._http.post(f"{_path(run)}/verify"))

    def gc(self, *, dry_run: bool = False) -> box_shapes.Collected:
        """Delete files that nothing can ask for."""
        return _as(box_shapes.Collected, self._http.post("/v1/gc", requests.CollectRequest(dry_run)))

    def serve(
        self, model: str, adapters: Sequence[requests.AdapterRequest], *, cwd: str, overrides: Sequence[str]
    ) -> shapes.Served:
        """Keep a base warm and serve PEFT directories under aliases.

        overrides: `key=value` of a spec: rollout, pool, resources."""
        request = requests.ServeRequest(model, cwd, [*adapters], [*overrides])
        return _as(shapes.Served, self._http.post("/v1/serve", request))

    def stop_serving(self, model: str) -> shapes.StoppedServing:
        """Let the pool of a base end when it is idle. Aliases stay."""
        return _as(shapes.StoppedServing, self._http.post("/v1/serve/stop", requests.ModelRequest(model)))

    def serving(self, model: str) -> shapes.Serving:
        """Start the pool of `model`, an alias or run@version, and load it. Returns what the gateway needs."""
        return _as(shapes.Serving, self._http.post("/v1/serving", requests.ModelRequest(model)))

    def serving_base(self, spec: str, *, source: str, cwd: str, overrides: Sequence[str]) -> shapes.Serving:
        """Start the pool that a run of this spec would have, to sample from its base."""
        request = requests.RunRequest(spec, source, cwd, [*overrides])
        return _as(shapes.Serving, self._http.post("/v1/serving/base", request))

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
    ) -> shapes.StartedSweep:
        """Queue a run for each point of the grid that overrides with several values span, or for each of
        `points`.
        """
        chosen = points or requests.PointsRequest()
        request = requests.SweepRequest(spec, source, cwd, [*overrides], name, halving=halving, points=chosen)
        return _as(shapes.StartedSweep, self._http.post("/v1/sweeps", request))

    def sweeps(self, name: str | None = None) -> builtins.list[shapes.Sweep]:
        """List the sweeps, newest first, or the one of that name."""
        return _as(
            builtins.list[shapes.Sweep],
            self._http.list_of("/v1/sweeps" + (f"?{urlencode({'sweep': name})}" if name else "")),
        )

    def fork(
        self, version: str, *, overrides: Sequence[str], name: str | None, steps: int | None, fresh: bool
    ) -> shapes.Forked:
        """Make a new run that begins with a version and its optimizer's state (fresh: without it)."""
        request = requests.ForkRequest([*overrides], name, steps, fresh)
        return _as(shapes.Forked, self._http.post(f"/v1/versions/{quote(version, safe='')}/fork", request))

    def trial(
        self, spec: str, *, source: str, cwd: str, overrides: Sequence[str], n: int
    ) -> Iterator[shapes.TrialEvent]:
        """Try a spec on `n` rows of its data; events as they happen (NDJSON), `idle` when nothing does.

        Raises what ended it.
        """
        request = requests.TrialRequest(spec, source, cwd, [*overrides], n)
        for line in self._http.stream("POST", "/v1/try", request):
            event = _as(shapes.TrialEvent, line)
            if event.error is not None:
                raise from_wire(line["error"])
            yield event
            if event.kind == "end":
                return
        raise DaemonUnreachable("the daemon ended during the trial", hint=RESTART)

    def generate(self, version: str, prompt: str, sampling: requests.Sampling) -> shapes.Generated:
        """Complete a prompt. `version`: an alias, run@number, or a run's name for its current version."""
        request = requests.GenerateRequest(version, prompt, sampling)
        return _as(shapes.Generated, self._http.post("/v1/generate", request))

    def complete(
        self,
        version: str,
        prompts: builtins.list[builtins.list[int]],
        seeds: builtins.list[builtins.list[int]],
        sampling: requests.Sampling,
    ) -> shapes.Generated:
        """Complete several prompts of token ids; the completions of each follow each other."""
        request = requests.GenerateRequest(version, "", sampling, prompts, seeds)
        return _as(shapes.Generated, self._http.post("/v1/generate", request))

    def keep_result(self, version: str, result: requests.ResultRequest) -> shapes.Result:
        """Keep what a version came to when it was evaluated."""
        path = f"/v1/versions/{quote(version, safe='')}/results"
        return _as(shapes.Result, self._http.post(path, result))

    def results(self, run: str | None = None) -> builtins.list[shapes.Result]:
        """List what the versions of a run, or the last ones of all, came to when they were evaluated."""
        query = urlencode({"run": run} if run else {})
        return _as(builtins.list[shapes.Result], self._http.list_of(f"/v1/results?{query}"))


def _as(kind: type[T], answer: Any) -> T:
    """Raises LoradError for an answer that is not of that kind."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        hint = "The daemon may be of another version: see `lorad daemon status`."
        raise LoradError(f"an answer is not understood: {error}", hint=hint) from None


def _path(run: str) -> str:
    """Make the path of requests about a run.

    Raises NotFound for what is no name and would be another path.
    """
    if run in ("", ".", ".."):
        raise NotFound(f"no run named {run!r}", hint="`lorad list --all` shows every run.")
    return f"/v1/runs/{quote(run, safe='')}"
