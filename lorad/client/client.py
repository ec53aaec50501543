"""The daemon's API, one method per request: HTTP with JSON over a Unix socket. Standard library only.

Every method raises DaemonUnreachable when no daemon answers, and otherwise the error that the daemon sent (see
`lorad.errors`). JSON keys are those of the design; the shapes are told here, once:

- run       {name, state, reason, detail, waiting, step, steps, reward, eval_first, eval_last, version, owner, pool,
             created_at, started_at, ended_at, attempt, preempted, rates: {tokens_per_second, step_seconds},
             signals, recent, base, origin}
            state: lorad.states.RunState; reason: EndReason or null; detail: why it ended, in words; waiting: why it is
            queued, in words; reward: mean of the last step; version: the current version's number;
            preempted: the run that it makes or made room for, or null
            signals: {at (of the last step), kl, entropy, truncated, logprob_difference, failed_rewards, skipped_updates
            (of that step), failed_rewards_total, skipped_updates_total (of the run),
            zero_variance (share of its groups), not_finite: [name of a metric that was no number], attested (of the
            current version), begun (when the newest attempt began to work)}, as far as they are known; recent: mean
            rewards of the last 24 steps, null for no number; base: the model of its spec; origin: run@version or
            directory that it came from, or null
- show      a run plus {directory, cwd, sweep, serving, spec, processes: [{role, pid}], warnings: [str],
             trainable, attempts: [{attempt, started_at, ended_at, resumed_from, exit_code, signal, reason, detail,
             changed}]}
            cwd: where relative paths of its spec begin, or null; changed: {key: value} where its spec is not
            that of the attempt before; trainable: {parameters, base, share} of the newest attempt, or null
- step      {step, attempt, at, version, metrics: {lr, updates, response_length, truncated, zero_variance_groups,
             failed_rewards, failed_rewards_total, skipped_updates, skipped_updates_total, tokens, tokens_per_second,
             seconds, seconds_sample, seconds_score, seconds_weigh, seconds_train, …}}
            where they were measured: reward, reward_std (of samples with a reward), loss, kl, entropy, ratio,
            clip_fraction (of what was trained on), grad_norm, logprob_difference, logprob_difference_max,
            staleness_difference, seconds_publish, seconds_attest (a part of the one before),
            trainer_tokens_per_second, trainer_memory, trainer_memory_peak (bytes), mfu
- eval      {step, attempt, at, version, score, problems, failed}
            score: of the problems whose reward did not fail; null: all did
- version   {run, version, step, sha256, path, rank, alpha, parent, created_at, loaded, pinned, aliases, attested}
- checkpoint {run, step, version, path, bytes, created_at}
- alias     {alias, run, version, updated_at, by, sha256, attested}; from `aliases` with {owner, step, traffic}
            step: that made the version; traffic: {requests, in_flight, failed, tokens, requests_per_second,
             tokens_per_second, ttft_p50, ttft_p95, p50, p95, window}, see lorad/protocol/traffic.py, of the gateway
             since it began, rates and seconds of the last `window` seconds; null while there is none
- move      {alias, run, version, at, by}: of an alias; version null: it was removed
- sweep     {sweep, owner, created_at, grid: {key: [value]}, halving: {eta, rungs: [step], metric} or null, runs: [run
             plus {values: {key: value}}], rungs: [{step, kept: [name], stopped: [name], scores: {name: number}, at}]}
- pool      {pool, state, model, pid, device, mode, threads, runtime, tenants, loaded, engine_tokens_per_second,
             trainer_tokens_per_second, memory_bytes, idle_seconds, engine, trainer, devices, runs, capacity}
            runs: [{run, phase, bytes, waited}] with an open slot: the verb under way or `idle`, bytes of the slot,
            seconds for which it waited for its turn; tenants: their names
            capacity: {max_versions, versions, max_rank, memory, memory_used}, see lorad/protocol/calls.py, or null
            engine: {name} of the backend before the pool answers, then {name, software, alive, asleep, running,
             waiting, slots_used, slots, prefix_hits, cache_used, detail}, see lorad/engines/base.py
            trainer: {name}, then {name, software: {name: version}, alive, here, memory, memory_peak, detail}
            runtime: {threads, wait_policy, malloc: {variable: number}, reasons: {threads: {source, text}, …}} or null
- device    {device, name, memory_total, memory_used, utilization (0 to 1 or null), pool, lease: {pool, uid, user, why,
             since, free_after (seconds idle, or null)} or null, processes: [{pid, user, name, memory, ours}]}
- event     {id, at, run, kind, data}: kind is `state`, or a journal kind (step, eval, version, checkpoint, end, …)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import quote, urlencode

from lorad.client.transport import Items, Json, Transport
from lorad.errors import NotFound
from lorad.paths import Home, default_home

Strings = list[str]  # spelt out here: inside Client, `list` is a request


class Client:
    """Talks to the daemon of one home. Cheap to make; safe to use from several threads (a connection per request)."""

    def __init__(self, home: Home | None = None, *, timeout: float = 600.0, transport: Transport | None = None) -> None:
        self.home = home or Home(default_home())
        self._http = transport or Transport(self.home.socket, timeout)

    def patient(self, timeout: float) -> Client:
        """The same client with another timeout, in seconds."""
        return Client(self.home, transport=self._http.patient(timeout))

    # -- the daemon ------------------------------------------------------------------------------------------------
    def status(self) -> Json:
        """{pid, version, home, caller: {user, admin}, shared, started_at, gateway, url, url_trouble, troubles,
        runs: {state: count}, disk: {free, total} or null, database: {schema, bytes}}. caller: who asks, as the daemon
        sees it; shared: by several users; disk: bytes where runs are. gateway: its socket, null while none answers;
        url: the base URL where it listens on TCP, or null; url_trouble: why it lets nobody in there, or ""."""
        return self._http.get("/v1/status")

    def shutdown(self, *, gateway: bool = False, pools: bool = False) -> Json:
        """Ask the daemon to exit; runs continue, and so do gateway and pools unless they are to end as well: {pid,
        gateway, ended: [pool], staying: [{pool, runs, serves: [run@version], seconds}]}. A pool with a run at work does
        not end. seconds: of idleness, after which it ends by itself."""
        return self._http.post("/v1/shutdown", {"gateway": gateway, "pools": pools})

    def database(self) -> Json:
        """{problems: [str], warnings: [str]} of the whole database, and of the rows against the disk, read now."""
        return self._http.get("/v1/database")

    def orphans(self) -> Items:
        """Processes of this home that nothing accounts for: {pid, attempt, command, user}."""
        return self._http.list_of("/v1/orphans")

    def pools(self) -> Items:
        return self._http.list_of("/v1/pools")

    def stop_pool(self, pool: str, *, force: bool = False) -> Json:
        """End a pool. Raises Conflict while a run or a request uses it, unless by force: the runs then end, and can be
        resumed."""
        return self._http.delete(f"/v1/pools/{quote(pool)}?force={int(force)}")

    def devices(self) -> Items:
        return self._http.list_of("/v1/devices")

    def events(self, after: int = 0, *, run: str | None = None) -> Iterator[Json]:
        """Events with id > after, for ever, as they happen (NDJSON); `after=-1`: only new ones. An event of kind
        `idle` comes every few seconds when nothing happens, so that a reader can look up."""
        query = {"after": after} | ({"run": run} if run else {})
        yield from self._http.stream("GET", f"/v1/events?{urlencode(query)}", None)

    def history(self, run: str | None = None, *, limit: int = 200) -> Items:
        """The last events, of all that the caller may see or of one run: oldest first, at most 1000."""
        query = {"last": limit} | ({"run": run} if run else {})
        return self._http.list_of(f"/v1/events?{urlencode(query)}")

    # -- runs ------------------------------------------------------------------------------------------------------
    def run(self, spec: str, *, source: str, cwd: str, overrides: Strings, name: str | None) -> Json:
        """Check (preflight) and queue a run: a run. `source`: the file's name for messages; `cwd`: for its paths."""
        body = {"spec": spec, "source": source, "cwd": cwd, "overrides": overrides, "name": name}
        return self._http.post("/v1/runs", body)

    def list(self, *, all: bool = False, limit: int = 0) -> Items:
        """Runs, newest first; without `all`, active ones and those of the last day. limit: of those that ended, the
        newest so many, less the others."""
        return self._http.list_of(f"/v1/runs?all={int(all)}&limit={limit}")

    def named(self, names: Strings) -> Items:
        """Of runs with these names, at most 100, what `list` tells of them, newest first."""
        return self._http.list_of(f"/v1/runs?names={','.join(quote(name) for name in names)}")

    def show(self, run: str) -> Json:
        return self._http.get(_path(run))

    def resume(
        self, run: str, *, step: int | None = None, steps: int | None = None, overrides: Sequence[str] = ()
    ) -> Json:
        """Queue a new attempt from the checkpoint at `step` (default: the newest whole one): a run plus
        {warnings, changed_inputs: [files that the attempt before read and that are others now, in words]}.

        overrides: `key=value` of what may change between attempts: trainer, rollout, pool, resources and the like.
        """
        return self._http.post(f"{_path(run)}/resume", {"step": step, "steps": steps, "overrides": [*overrides]})

    def pause(self, run: str) -> Json:
        return self._http.post(f"{_path(run)}/pause", {})

    def stop(self, run: str) -> Json:
        return self._http.post(f"{_path(run)}/stop", {})

    def kill(self, run: str) -> Json:
        return self._http.post(f"{_path(run)}/kill", {})

    def remove(self, run: str) -> Json:
        """Delete an ended or paused run with its directory."""
        return self._http.delete(_path(run))

    def steps(self, run: str, *, after: int = 0, limit: int = 10000, every: int = 1) -> Items:
        """Steps of the surviving lineage with step > after, in order. every: only multiples of it, at most `limit`, and
        the last step of all."""
        query = {"after": after, "limit": limit} | ({"every": every} if every > 1 else {})
        return self._http.list_of(f"{_path(run)}/steps?{urlencode(query)}")

    def evals(self, run: str) -> Items:
        return self._http.list_of(f"{_path(run)}/evals")

    def samples(self, run: str, *, step: int | None = None, limit: int = 1000) -> Items:
        """Of one step (default: the last): {step, version, prompt_id, index, prompt, completion, answer, reward,
        advantage, finish, error, tokens, logprobs}."""
        query = {"limit": limit} | ({} if step is None else {"step": step})
        return self._http.list_of(f"{_path(run)}/samples?{urlencode(query)}")

    def logs(self, run: str, *, of: str = "driver", offset: int = -65536, limit: int = 1 << 20) -> Json:
        """{text, offset, size}: from a byte offset (negative: from the end); `offset` is where to go on."""
        return self._http.get(f"{_path(run)}/logs?{urlencode({'of': of, 'offset': offset, 'limit': limit})}")

    def own_logs(self, of: str, *, offset: int = -65536, limit: int = 1 << 20) -> Json:
        """As `logs`, of the `daemon`, or of the `gateway` that is the caller's: the one that everybody asks for an
        admin, else that of the caller's own versions."""
        return self._http.get(f"/v1/logs?{urlencode({'of': of, 'offset': offset, 'limit': limit})}")

    # -- versions --------------------------------------------------------------------------------------------------
    def adapters(self, run: str | None = None) -> Items:
        return self._http.list_of(f"/v1/versions?{urlencode({'run': run} if run else {})}")

    def checkpoints(self, run: str) -> Items:
        return self._http.list_of(f"{_path(run)}/checkpoints")

    def export(self, version: str, directory: str) -> Json:
        """Copy a version, verified, as a PEFT directory: {version, path, sha256}. `version`: run@number."""
        return self._http.post(f"/v1/versions/{quote(version, safe='')}/export", {"directory": directory})

    def pin(self, version: str) -> Json:
        """Keep a version loaded and its files safe: a version. Its pool is started by whoever asks for it."""
        return self._http.post(f"/v1/versions/{quote(version, safe='')}/pin", {})

    def unpin(self, version: str) -> Json:
        return self._http.post(f"/v1/versions/{quote(version, safe='')}/unpin", {})

    def aliases(self) -> Items:
        return self._http.list_of("/v1/aliases")

    def alias_moves(self, alias: str) -> Items:
        """Newest first."""
        return self._http.list_of(f"/v1/aliases/{quote(alias, safe='')}/moves")

    def swap(self, alias: str, version: str | None = None, *, rollback: bool = False) -> Json:
        """Serve another version under an alias, or the one before (`rollback`): an alias plus {previous, attestation,
        seconds, gateway, url}, with {verdict, detail}. The version is loaded and attested first; a refused one changes
        nothing. It returns when the gateway answers; gateway is null where that does not come up."""
        return self._http.post(f"/v1/aliases/{quote(alias, safe='')}", {"version": version, "rollback": rollback})

    def remove_alias(self, alias: str) -> Json:
        return self._http.delete(f"/v1/aliases/{quote(alias, safe='')}")

    def verify(self, run: str) -> Json:
        """{run, checks: [{check, looked_at (in words), problems: [str], seconds}], problems: count}."""
        return self._http.post(f"{_path(run)}/verify", {})

    def gc(self, *, dry_run: bool = False) -> Json:
        """Delete files that nothing can ask for: {deleted: [{run, path, bytes, why}], bytes, dry_run,
        kept: [{alias, version}] (what an alias goes back to)}."""
        return self._http.post("/v1/gc", {"dry_run": dry_run})

    def serve(self, model: str, adapters: Items, *, cwd: str, overrides: Strings) -> Json:
        """Keep a base warm and serve PEFT directories under aliases: {pool, gateway, url, aliases: [alias]}.

        adapters: {name, directory}; overrides: `key=value` of a spec: rollout, pool, resources."""
        return self._http.post("/v1/serve", {"model": model, "adapters": adapters, "cwd": cwd, "overrides": overrides})

    def stop_serving(self, model: str) -> Json:
        """Let the pool of a base end when it is idle: {model, runs: [str]}. Aliases stay."""
        return self._http.post("/v1/serve/stop", {"model": model})

    def serving(self, model: str) -> Json:
        """What the gateway needs to serve `model`, an alias or run@version, whose pool is started and which is loaded
        after this: {model, run, version, sha256, socket, model_path, chat_template}."""
        return self._http.post("/v1/serving", {"model": model})

    def sweep(
        self, spec: str, *, source: str, cwd: str, overrides: Strings, name: str | None, halving: Json | None
    ) -> Json:
        """A run for each point of the grid that overrides with several values span: a sweep plus {warnings}. halving:
        {eta, rungs, metric}, with null for what is to be chosen."""
        body = {"spec": spec, "source": source, "cwd": cwd, "overrides": overrides, "name": name, "halving": halving}
        return self._http.post("/v1/sweeps", body)

    def sweeps(self, name: str | None = None) -> Items:
        """Newest first, or the one of that name."""
        return self._http.list_of("/v1/sweeps" + (f"?{urlencode({'sweep': name})}" if name else ""))

    def fork(self, version: str, *, overrides: Strings, name: str | None, steps: int | None, fresh: bool) -> Json:
        """A new run that begins with a version and its optimizer's state (fresh: without it): a run plus {warnings}."""
        body = {"overrides": overrides, "name": name, "steps": steps, "fresh": fresh}
        return self._http.post(f"/v1/versions/{quote(version, safe='')}/fork", body)

    def generate(self, version: str, prompt: str, sampling: Json) -> Json:
        """{version, completions: [{text, tokens, finish}]}; sampling: {n, temperature, top_p, top_k, max_new_tokens,
        seed, stop}. `version`: an alias, run@number, or a run's name for its current version."""
        return self._http.post("/v1/generate", {"version": version, "prompt": prompt, "sampling": sampling})


def _path(run: str) -> str:
    """Of the requests about a run. Raises NotFound for what is no name and would be another path."""
    if run in ("", ".", ".."):
        raise NotFound(f"no run named {run!r}", hint="`lorad list --all` shows every run.")
    return f"/v1/runs/{quote(run, safe='')}"
