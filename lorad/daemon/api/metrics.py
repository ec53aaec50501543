"""The daemon's figures in Prometheus's text format (version 0.0.4).

What can be counted in the database is: such counters outlive the daemon (and go back when a run is removed).
Others begin with the daemon, or with a gateway. Labels name only active runs, 50 at most, and 50 aliases, and
only where everybody may see every run.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct

import lorad
from lorad.daemon.context import Context
from lorad.daemon.counters import BOUNDS
from lorad.daemon.serving.traffic import traffic_of
from lorad.states import ACTIVE, RunState
from lorad.store import runs
from lorad.store.aliases import aliases
from lorad.store.bill import BillRow, bill
from lorad.store.db import Rows
from lorad.store.events import last_id
from lorad.store.metrics import StepTotals, add_new_steps, ended_attempts, readings, waits
from lorad.store.rows import RunRow

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_RUNS = 50
_ALIASES = 50
_TOTAL = "_total"  # how the names of counters end; all other metrics are gauges
_TRAFFIC = (
    ("requests_total", "Requests for an alias that ended, at its gateway."),
    ("failed_total", "Requests for an alias that failed on the serving side."),
    ("tokens_total", "Tokens that were generated for them."),
    ("in_flight", "Requests for an alias under way."),
    ("ttft_p50", "Seconds until the first token of streams, of the last minute: median."),
    ("ttft_p95", "The same: 95th percentile."),
    ("p50", "Seconds until the end of an answer, of the last minute: median."),
    ("p95", "The same: 95th percentile."),
)
_OF_RUN = {
    "step": ("Optimizer steps of an active run.", attrgetter("step")),
    "reward": ("Mean reward of its last step.", attrgetter("reward")),
    "kl": ("Nats per token to the reference policy, in its last step.", attrgetter("signals.kl")),
    "entropy": ("Nats per token, in its last step.", attrgetter("signals.entropy")),
    "tokens_per_second": ("Tokens per second of its last step.", attrgetter("rates.tokens_per_second")),
    "eval": ("Its newest evaluation.", attrgetter("eval_last")),
}
_BILL = (
    ("held_seconds", "Seconds of devices that runs held, or were served on."),
    ("busy_seconds", "Seconds of devices that their work took."),
    ("wasted_seconds", "Of the seconds held, those whose work a later attempt threw away."),
    ("sampled", "Tokens of the samples of steps."),
    ("trained", "Tokens of steps with a loss."),
    ("served", "Tokens that were sampled for others than runs."),
    ("prompts", "Tokens of prompts."),
    ("cached", "Of the tokens of prompts, those that were not computed again."),
    ("joules", "Energy, where something measures it."),
)


class _Read(Struct, frozen=True):
    """What the database says."""

    totals: StepTotals
    states: dict[str, int]
    attempts: dict[str, int]
    waits: list[float]  # seconds of those in the queue
    lags: dict[str, tuple[int, float]]  # bytes and seconds that rows of active runs are behind their journals
    active: list[RunRow]
    versions: int
    aliases: int
    events: int
    bill: list[BillRow]  # by user and device


async def exposition(ctx: Context) -> str:
    facts = await ctx.read(_read, ctx.requests.meter.totals)
    ctx.requests.meter.totals = facts.totals
    is_open = ctx.config.sharing.read == "all"
    page = _Page()
    version = {("version", lorad.__version__, "schema", ctx.store.schema): 1}
    page.add("lorad_info", "The version of lorad and its schema.", version)
    _write_runs(page, facts, is_open=is_open)
    _write_devices(page, ctx, facts.bill, is_open=is_open)
    _write_daemon(page, ctx)
    traffic = await traffic_of(ctx, aliases(ctx.store)[:_ALIASES] if is_open else [])
    reporting = {("alias", alias): figures for alias, figures in traffic.items() if figures is not None}
    for name, says in _TRAFFIC:
        values = {label: getattr(figures, name.removesuffix(_TOTAL)) for label, figures in reporting.items()}
        measured = {label: value for label, value in values.items() if value is not None}
        page.add(f"lorad_gateway_{name}", says, measured)
    return "".join(f"{line}\n" for line in page.lines)


def _read(rows: Rows, before: StepTotals) -> _Read:
    states = runs.count_by_state(rows)
    return _Read(
        totals=add_new_steps(rows, before),
        states={state: states.get(state, 0) for state in RunState},
        attempts=ended_attempts(rows),
        waits=list(waits(rows)),
        lags=dict(lags(rows)),
        active=runs.in_states(rows, *ACTIVE)[:_RUNS],
        versions=rows.count("versions"),
        aliases=rows.count("aliases"),
        events=last_id(rows),
        bill=bill(rows, "user"),
    )


def lags(rows: Rows) -> Iterator[tuple[str, tuple[int, float]]]:
    """Yield by how many bytes and seconds the rows of each active run are behind its journal."""
    for reading in readings(rows):
        try:
            journal = (Path(reading.directory) / "journal.jsonl").stat()
        except OSError:
            continue
        behind = max(0, journal.st_size - reading.offset)
        is_late = behind and reading.newest is not None
        yield reading.run, (behind, max(0.0, journal.st_mtime - (reading.newest or 0.0)) if is_late else 0.0)


@dataclass
class _Page:
    """Metrics as lines of text."""

    lines: list[str] = field(default_factory=list)

    def add(self, name: str, says: str, values: float | Mapping[tuple[Any, ...], float]) -> None:
        """Write a counter or gauge with its samples.

        values: one value, or one for each set of labels, whose names and values alternate in the key.
        """
        kind = "counter" if name.endswith(_TOTAL) else "gauge"
        self.lines += [f"# HELP {name} {says}", f"# TYPE {name} {kind}"]
        for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
            self.lines.append(sample(name, dict(zip(key[::2], key[1::2], strict=True)), value))

    def add_sums(
        self, name: str, says: str, total: float, count: int, buckets: Mapping[object, int] = {}
    ) -> None:
        """Write a histogram, or a summary where there are no buckets."""
        kind = "histogram" if buckets else "summary"
        self.lines += [f"# HELP {name} {says}", f"# TYPE {name} {kind}"]
        self.lines += [sample(f"{name}_bucket", {"le": bound}, reached) for bound, reached in buckets.items()]
        self.lines += [sample(f"{name}_sum", {}, total), sample(f"{name}_count", {}, count)]


def _write_runs(page: _Page, facts: _Read, *, is_open: bool) -> None:
    """Write what the database says of runs, by their names where everybody may see these."""
    totals = facts.totals
    page.add("lorad_runs", "Runs by state.", {("state", k): v for k, v in facts.states.items()})
    ended = {("reason", k): v for k, v in facts.attempts.items()}
    page.add("lorad_attempts_ended_total", "Attempts that ended, by reason.", ended)
    page.add("lorad_steps_total", "Optimizer steps, those behind a rewind too.", totals.steps)
    page.add("lorad_tokens_total", "Sampled tokens of those steps.", totals.tokens)
    says = "Samples of those steps whose reward failed."
    page.add("lorad_failed_rewards_total", says, totals.failed_rewards)
    says = "Updates of those steps whose loss or gradient was not finite."
    page.add("lorad_skipped_updates_total", says, totals.skipped_updates)
    page.add_sums("lorad_step_seconds", "Seconds of a step.", totals.seconds, totals.steps)
    says = "Seconds in which a step's version was exported, loaded and attested."
    page.add_sums("lorad_publish_seconds", says, totals.publish_seconds, totals.published)
    page.add("lorad_versions", "Versions that are known.", facts.versions)
    page.add("lorad_aliases", "Aliases.", facts.aliases)
    page.add("lorad_events", "The number of the newest event.", facts.events)
    page.add("lorad_queue_length", "Runs that wait for a device.", len(facts.waits))
    longest = max(facts.waits, default=0.0)
    page.add("lorad_queue_longest_wait_seconds", "The longest wait of these runs.", longest)
    says = "The part of the journals that has not been read into the database yet."
    named = list(facts.lags.items())[:_RUNS] if is_open else []
    for number, unit in enumerate(("bytes", "seconds")):
        page.add(f"lorad_ingest_lag_{unit}", says, {("run", run): lag[number] for run, lag in named})
        most = max((lag[number] for lag in facts.lags.values()), default=0)
        page.add(f"lorad_ingest_lag_{unit}_max", "The largest lag of all active runs.", most)
    shown = facts.active if is_open else []
    for name, (says, figure) in _OF_RUN.items():
        values = {("run", run.name): value for run in shown if (value := figure(run)) is not None}
        page.add(f"lorad_run_{name}", says, values)


def _write_devices(page: _Page, ctx: Context, bill: list[BillRow], *, is_open: bool) -> None:
    """Write the devices, the pools and the bill.

    is_open: whether everybody may see names; else pools and users are `*`. The user "" is nobody.
    """
    up = [pool for pool in ctx.pools.values() if pool.process.is_up]
    in_use = [(device, pool.id if is_open else "*") for pool in up for device in pool.holds]
    leases = {("device", device, "pool", name): 1 for device, name in in_use}
    page.add("lorad_devices", "Devices of this machine.", len(ctx.gpus.devices))
    page.add("lorad_leases", "1 for each device that a pool holds.", leases)
    states = Counter(("state", pool.state) for pool in up)
    page.add("lorad_pools", "Pools that are up, by state.", states)
    answering = [(pool.id, pool.status) for pool in up if pool.status and is_open]
    memory = {("pool", name): status.rss_bytes for name, status in answering}
    page.add("lorad_pool_memory_bytes", "Resident memory of a pool's process.", memory)
    for of in ("engine", "trainer"):
        says = f"Tokens per second of its {of}, over the last seconds."
        rates = {("pool", name): getattr(status, f"{of}_tokens_per_second") for name, status in answering}
        page.add(f"lorad_pool_{of}_tokens_per_second", says, rates)
    for key, says in _BILL:
        sums: dict[tuple[str, str], float] = {}
        for row in bill:
            label = "user", row.key if is_open or not row.key else "*"
            if (amount := getattr(row, key.removesuffix("_seconds"))) is not None:
                sums[label] = sums.get(label, 0) + amount
        page.add(f"lorad_bill_{key}_total", says, sums)


def _write_daemon(page: _Page, ctx: Context) -> None:
    """Write what the daemon answered, and what its process and its files take."""
    meter = ctx.requests.meter
    sorted_answers = sorted(meter.answers.items())
    answers = {("method", method, "status", status): n for (method, status), n in sorted_answers}
    page.add("lorad_requests_total", "Answers of the API.", answers)
    for name, says, times in (
        ("lorad_request_seconds", "Seconds until the answer, but for events.", meter.requests),
        ("lorad_swap_seconds", "Seconds of a swap: loaded, attested, moved.", meter.swaps),
    ):
        buckets = dict(zip((*BOUNDS, "+Inf"), accumulate(times.counts), strict=True))
        page.add_sums(name, says, times.sum, sum(times.counts), buckets)
    page.add("lorad_swaps_failed_total", "Swaps that changed nothing.", meter.failed_swaps)
    page.add("lorad_event_followers", "Readers of events.", meter.followers)
    page.add("lorad_readers_active", "Long questions under way.", ctx.readers.active)
    own = psutil.Process(os.getpid())
    cpu = own.cpu_times()
    page.add("lorad_database_bytes", "The database.", ctx.home.database.stat().st_size)
    page.add("lorad_database_wal_bytes", "Its write-ahead log.", ctx.readers.wal_bytes())
    page.add("lorad_journal_bytes", "The daemon's own journal.", ctx.home.journal.stat().st_size)
    if (used := ctx.storage.disk.used) is not None:
        page.add("lorad_disk_bytes", "Size of the home and its storage, when last measured.", used)
    if (budget := ctx.config.disk_budget) is not None:
        page.add("lorad_disk_budget_bytes", "disk_budget of config.yaml.", budget)
    page.add("process_resident_memory_bytes", "Resident memory of the daemon.", own.memory_info().rss)
    page.add("process_cpu_seconds_total", "CPU time of the daemon.", cpu.user + cpu.system)
    page.add("process_start_time_seconds", "Unix time.", ctx.loop.started_at)


def sample(name: str, labels: Mapping[str, Any], value: float) -> str:
    """Write a line of a metric."""
    escapes = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
    pairs = ",".join(f'{key}="{str(text).translate(escapes)}"' for key, text in labels.items())
    return f"{name}{{{pairs}}} {value!r}" if pairs else f"{name} {value!r}"
