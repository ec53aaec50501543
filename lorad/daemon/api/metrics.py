"""The daemon's figures in Prometheus's text format (version 0.0.4).

What can be counted in the database is: such counters outlive the daemon (and go back when a run is removed).
The rest is since the daemon began, of gateways since they began. Labels with names of runs are there for
active runs only, RUNS at most, those of ALIASES aliases, and only where everybody may see every run.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct

import lorad
from lorad.daemon.context import Context
from lorad.daemon.counters import BOUNDS, Histogram
from lorad.daemon.serving.traffic import traffic_of
from lorad.protocol.traffic import Figures
from lorad.states import ACTIVE, RunState
from lorad.store import runs
from lorad.store.aliases import aliases
from lorad.store.bill import BillRow, bill
from lorad.store.db import Rows
from lorad.store.events import last_id
from lorad.store.metrics import StepTotals, add_new_steps, ended_attempts, readings, waits

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_RUNS = 50
_ALIASES = 50
_TRAFFIC = (
    ("requests", "counter", "Requests for an alias that ended, at its gateway."),
    ("failed", "counter", "Requests for an alias that failed on the serving side."),
    ("tokens", "counter", "Tokens that were generated for them."),
    ("in_flight", "gauge", "Requests for an alias under way."),
    ("ttft_p50", "gauge", "Seconds until the first token of streams, of the last minute: median."),
    ("ttft_p95", "gauge", "The same: 95th percentile."),
    ("p50", "gauge", "Seconds until the end of an answer, of the last minute: median."),
    ("p95", "gauge", "The same: 95th percentile."),
)
_OF_RUN = (
    ("step", "Optimizer steps of an active run."),
    ("reward", "Mean reward of its last step."),
    ("kl", "Nats per token to the reference policy, in its last step."),
    ("entropy", "Nats per token, in its last step."),
    ("tokens_per_second", "Tokens per second of its last step."),
    ("eval", "Its newest evaluation."),
)
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
_Labels = Mapping[str, Any]
_NONE: _Labels = {}


class _Read(Struct, frozen=True):
    """What the database says."""

    totals: StepTotals
    states: dict[str, int]
    attempts: dict[str, int]
    waits: list[float]  # seconds of those in the queue
    lags: dict[str, tuple[int, float]]  # active runs: bytes and seconds that ingest is behind
    progress: dict[str, dict[str, float | None]]  # active runs: the figures of `_OF_RUN`
    versions: int
    aliases: int
    events: int
    bill: list[BillRow]  # by user and device


async def exposition(ctx: Context) -> str:
    facts = await ctx.read(_read, ctx.requests.meter.totals)
    ctx.requests.meter.totals = facts.totals
    rows = aliases(ctx.store)[:_ALIASES] if ctx.config.sharing.read == "all" else []
    traffic = await traffic_of(ctx, rows)
    return "".join(f"{line}\n" for line in (*_lines(ctx, facts), *_of_traffic(traffic)))


def _read(rows: Rows, before: StepTotals) -> _Read:
    states = runs.count_by_state(rows)
    progress: dict[str, dict[str, float | None]] = {}
    for run in runs.in_states(rows, *ACTIVE)[:_RUNS]:
        progress[run.name] = {
            "step": run.step,
            "reward": run.reward,
            "kl": run.signals.kl,
            "entropy": run.signals.entropy,
            "tokens_per_second": run.rates.tokens_per_second,
            "eval": run.eval_last,
        }
    return _Read(
        totals=add_new_steps(rows, before),
        states={state: states.get(state, 0) for state in RunState},
        attempts=ended_attempts(rows),
        waits=list(waits(rows)),
        lags=dict(lags(rows)),
        progress=progress,
        versions=rows.count("versions"),
        aliases=rows.count("aliases"),
        events=last_id(rows),
        bill=bill(rows, "user"),
    )


def lags(rows: Rows) -> Iterator[tuple[str, tuple[int, float]]]:
    """Yield how far each run's rows are behind its journal: in bytes,
    and in seconds since the newest event.
    """
    for reading in readings(rows):
        try:
            journal = (Path(reading.directory) / "journal.jsonl").stat()
        except OSError:
            continue
        behind = max(0, journal.st_size - reading.offset)
        is_late = behind and reading.newest is not None
        yield reading.run, (behind, max(0.0, journal.st_mtime - (reading.newest or 0.0)) if is_late else 0.0)


def _lines(ctx: Context, facts: _Read) -> Iterator[str]:
    yield from _one(
        "lorad_info",
        "gauge",
        "The version of lorad and its schema.",
        1,
        {"version": lorad.__version__, "schema": ctx.store.schema},
    )
    yield from _of_runs(ctx, facts)
    is_open = ctx.config.sharing.read == "all"
    progress = facts.progress if is_open else {}
    for key, says in _OF_RUN:
        values = {("run", run): value for run, row in progress.items() if (value := row[key]) is not None}
        yield from _many(f"lorad_run_{key}", "gauge", says, values)
    yield from _of_devices(ctx, is_open=is_open)
    yield from _of_bill(facts.bill, is_open=is_open)
    yield from _of_requests(ctx)
    yield from _of_process(ctx)


def _of_runs(ctx: Context, facts: _Read) -> Iterator[str]:
    totals = facts.totals
    yield from _many(
        "lorad_runs", "gauge", "Runs by state.", {("state", k): v for k, v in facts.states.items()}
    )
    ended = {("reason", k): v for k, v in facts.attempts.items()}
    yield from _many("lorad_attempts_ended_total", "counter", "Attempts that ended, by reason.", ended)
    yield from _one(
        "lorad_steps_total", "counter", "Optimizer steps, those behind a rewind too.", totals.steps
    )
    yield from _one("lorad_tokens_total", "counter", "Sampled tokens of those steps.", totals.tokens)
    says = "Samples of those steps whose reward failed."
    yield from _one("lorad_failed_rewards_total", "counter", says, totals.failed_rewards)
    says = "Updates of those steps whose loss or gradient was not finite."
    yield from _one("lorad_skipped_updates_total", "counter", says, totals.skipped_updates)
    yield from _summary("lorad_step_seconds", "Seconds of a step.", totals.seconds, totals.steps)
    says = "Seconds in which a step's version was exported, loaded and attested."
    yield from _summary("lorad_publish_seconds", says, totals.publish_seconds, totals.published)
    yield from _one("lorad_versions", "gauge", "Versions that are known.", facts.versions)
    yield from _one("lorad_aliases", "gauge", "Aliases.", facts.aliases)
    yield from _one("lorad_events", "gauge", "The number of the newest event.", facts.events)
    yield from _one("lorad_queue_length", "gauge", "Runs that wait for a device.", len(facts.waits))
    yield from _one(
        "lorad_queue_longest_wait_seconds",
        "gauge",
        "The longest wait of these runs.",
        max(facts.waits, default=0.0),
    )
    yield from _of_ingest(ctx, facts.lags)


def _of_ingest(ctx: Context, lags: dict[str, tuple[int, float]]) -> Iterator[str]:
    says = "The part of the journals that has not been read into the database yet."
    named = list(lags.items())[:_RUNS] if ctx.config.sharing.read == "all" else []
    for number, (unit, kind) in enumerate((("bytes", int), ("seconds", float))):
        by_run = {("run", run): kind(lag[number]) for run, lag in named}
        yield from _many(f"lorad_ingest_lag_{unit}", "gauge", says, by_run)
        largest = max((lag[number] for lag in lags.values()), default=0)
        yield from _one(
            f"lorad_ingest_lag_{unit}_max", "gauge", "The largest lag of all active runs.", largest
        )


def _of_devices(ctx: Context, *, is_open: bool) -> Iterator[str]:
    """Write who has the devices, and how pools are, by their names where everybody may see these."""
    up = [pool for pool in ctx.pools.values() if pool.process.is_up]
    leases = {
        ("device", device, "pool", pool.id if is_open else "*"): 1 for pool in up for device in pool.holds
    }
    yield from _one("lorad_devices", "gauge", "Devices of this machine.", len(ctx.gpus.devices))
    yield from _many("lorad_leases", "gauge", "1 for each device that a pool holds.", leases)
    states = Counter(("state", pool.state) for pool in up)
    yield from _many("lorad_pools", "gauge", "Pools that are up, by state.", states)
    answering = [(pool.id, pool.status) for pool in up if pool.status and is_open]
    memory = {("pool", name): status.rss_bytes for name, status in answering}
    yield from _many("lorad_pool_memory_bytes", "gauge", "Resident memory of a pool's process.", memory)
    for of in ("engine", "trainer"):
        rates = {("pool", name): getattr(status, f"{of}_tokens_per_second") for name, status in answering}
        yield from _many(
            f"lorad_pool_{of}_tokens_per_second",
            "gauge",
            f"Tokens per second of its {of}, over the last seconds.",
            rates,
        )


def _of_bill(rows: list[BillRow], *, is_open: bool) -> Iterator[str]:
    """Write what was used, by user where everybody may see that; "" is what is nobody's."""
    for key, says in _BILL:
        sums: dict[tuple[str, str], float] = {}
        for row in rows:
            label = "user", row.key if is_open or not row.key else "*"
            if (amount := getattr(row, key.removesuffix("_seconds"))) is not None:
                sums[label] = sums.get(label, 0) + amount
        yield from _many(f"lorad_bill_{key}_total", "counter", says, sums)


def _of_requests(ctx: Context) -> Iterator[str]:
    meter = ctx.requests.meter
    answers = {
        ("method", method, "status", status): n for (method, status), n in sorted(meter.answers.items())
    }
    yield from _many("lorad_requests_total", "counter", "Answers of the API.", answers)
    yield from _histogram(
        "lorad_request_seconds", "Seconds until the answer, but for events.", meter.requests
    )
    yield from _histogram("lorad_swap_seconds", "Seconds of a swap: loaded, attested, moved.", meter.swaps)
    yield from _one("lorad_swaps_failed_total", "counter", "Swaps that changed nothing.", meter.failed_swaps)
    yield from _one("lorad_event_followers", "gauge", "Readers of events.", meter.followers)
    yield from _one("lorad_readers_active", "gauge", "Long questions under way.", ctx.readers.active)


def _of_traffic(traffic: Mapping[str, Figures | None]) -> Iterator[str]:
    """Write the gateways' figures by alias. The counters start from zero when a gateway restarts."""
    reporting = {("alias", alias): figures for alias, figures in traffic.items() if figures is not None}
    for key, kind, says in _TRAFFIC:
        values = {label: getattr(figures, key) for label, figures in reporting.items()}
        name = f"lorad_gateway_{key}{'_total' if kind == 'counter' else ''}"
        yield from _many(
            name, kind, says, {label: value for label, value in values.items() if value is not None}
        )


def _of_process(ctx: Context) -> Iterator[str]:
    own = psutil.Process(os.getpid())
    cpu = own.cpu_times()
    yield from _one("lorad_database_bytes", "gauge", "The database.", ctx.home.database.stat().st_size)
    yield from _one("lorad_database_wal_bytes", "gauge", "Its write-ahead log.", ctx.readers.wal_bytes())
    yield from _one(
        "lorad_journal_bytes", "gauge", "The daemon's own journal.", ctx.home.journal.stat().st_size
    )
    if ctx.storage.disk.used is not None:
        yield from _one(
            "lorad_disk_bytes",
            "gauge",
            "Size of the home and its storage, when last measured.",
            ctx.storage.disk.used,
        )
    if ctx.config.disk_budget is not None:
        yield from _one(
            "lorad_disk_budget_bytes", "gauge", "disk_budget of config.yaml.", ctx.config.disk_budget
        )
    yield from _one(
        "process_resident_memory_bytes", "gauge", "Resident memory of the daemon.", own.memory_info().rss
    )
    yield from _one("process_cpu_seconds_total", "counter", "CPU time of the daemon.", cpu.user + cpu.system)
    yield from _one("process_start_time_seconds", "gauge", "Unix time.", ctx.loop.started_at)


def _one(name: str, kind: str, says: str, value: float, labels: _Labels = _NONE) -> Iterator[str]:
    yield from _head(name, kind, says)
    yield sample(name, labels, value)


def _many(name: str, kind: str, says: str, values: Mapping[tuple[Any, ...], float]) -> Iterator[str]:
    """Write a metric with a sample for each value.

    values: a value for each set of labels, whose names and values follow one another in the key.
    """
    yield from _head(name, kind, says)
    for key, value in values.items():
        yield sample(name, dict(zip(key[::2], key[1::2], strict=True)), value)


def _summary(name: str, says: str, total: float, count: int) -> Iterator[str]:
    yield from _head(name, "summary", says)
    yield sample(f"{name}_sum", _NONE, total)
    yield sample(f"{name}_count", _NONE, count)


def _histogram(name: str, says: str, histogram: Histogram) -> Iterator[str]:
    yield from _head(name, "histogram", says)
    reached = 0
    for bound, count in zip((*BOUNDS, "+Inf"), histogram.counts, strict=True):
        reached += count
        yield sample(f"{name}_bucket", {"le": bound}, reached)
    yield sample(f"{name}_sum", _NONE, histogram.sum)
    yield sample(f"{name}_count", _NONE, reached)


def _head(name: str, kind: str, says: str) -> Iterator[str]:
    yield f"# HELP {name} {says}"
    yield f"# TYPE {name} {kind}"


def sample(name: str, labels: _Labels, value: float) -> str:
    escapes = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
    pairs = ",".join(f'{key}="{str(text).translate(escapes)}"' for key, text in labels.items())
    return f"{name}{{{pairs}}} {value!r}" if pairs else f"{name} {value!r}"
