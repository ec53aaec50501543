"""Pools, devices, events and alarms where there is little room: a line or a few."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from lorad.alarms import Alarm
from lorad.client.words import set_aside
from lorad.records.devices import Device
from lorad.records.pools import Pool
from lorad.records.runs import Event
from lorad.text import coarse_age, one_line, size
from lorad.tui.dashboard.run_rows import LEVELS
from lorad.tui.event_words import event_text

_GIB = 2.0**30


def base(model: str) -> str:
    """Return the last part of a path or a hub id."""
    return model.rstrip("/").rpartition("/")[2] or model


def phase(pool: Pool) -> str:
    """Describe what the runs of a pool do now."""
    counts = Counter(run.phase for run in pool.runs if run.phase != "idle")
    return ", ".join(f"{count} {verb}" if count > 1 else verb for verb, count in counts.items()) or "idle"


def slots(pool: Pool) -> str:
    """Write how many versions are loaded, and how many fit."""
    capacity = pool.capacity
    engine = pool.engine
    used, all_ = (capacity.versions, capacity.max_versions) if capacity else (engine.slots_used, engine.slots)
    return f"{used}/{all_}" if all_ and isinstance(used, int) else ""


def speed(tokens: Any) -> str:
    """Write a number of tokens per second: 1234.5 becomes 1,234."""
    return f"{tokens:,.0f}" if isinstance(tokens, int | float) and math.isfinite(tokens) else ""


def busy(device: Device) -> str:
    return "" if device.utilization is None else f"{device.utilization:.0%}"


def pool_of(device: Device) -> str | None:
    return device.pool or (device.lease.pool if device.lease else None)


def holder(device: Device) -> str:
    """Say who leases a device, and since when, and who reserved it."""
    lease = device.lease
    holder = device.pool or ""
    if lease:
        since = coarse_age(lease.since)
        part = f", {device.part}" if device.part else ""
        holder = f"{lease.pool or lease.why or 'held'}{part} ({lease.user}{since and f', {since}'})"
    return "; ".join(words for words in (holder, set_aside(device)) if words)


def used(device: Device) -> str:
    """Write how much of the memory is used, as in 71/80 GiB."""
    digits = 0 if device.memory_total >= 10 * _GIB else 1
    return f"{device.memory_used / _GIB:.{digits}f}/{device.memory_total / _GIB:.{digits}f} GiB"


def others(device: Device) -> str:
    """List the processes that are not lorad's."""
    processes = [process for process in device.processes if not process.ours]
    return ", ".join(f"{each.user} {size(each.memory)} ({each.name} {each.pid})" for each in processes)


def pools_lines(pools: Sequence[Pool], lines: int) -> Text:
    """Write a line for each pool where there is room for so many, else all of them in one."""
    parts = []
    for pool in pools:
        runs = counted(len(pool.tenants), "run")
        pace = f"{speed(pool.engine_tokens_per_second)}/{speed(pool.trainer_tokens_per_second)} tok/s"
        loaded = f", {slots(pool)} slots" if slots(pool) else ""
        if len(pools) > lines:
            parts.append(f"{pool.pool} {runs}, {pace}")
        else:
            parts.append(f"{pool.pool}  {base(pool.model)}, {runs}{loaded}, {pace}, {phase(pool)}")
    return _listed("pools", parts, lines)


def devices_lines(devices: Sequence[Device], lines: int) -> Text:
    """Write a line for each device where there is room for so many, else all of them in one."""
    texts = []
    for device in devices:
        parts = [used(device), busy(device) and f"{busy(device)} busy"]
        parts += [] if len(devices) > lines else [holder(device) or "free", others(device)]
        texts.append(f"{device.device} {', '.join(part for part in parts if part)}")
    return _listed("devices", texts, lines)


def _listed(heading: str, parts: Sequence[str], lines: int) -> Text:
    if len(parts) > lines:
        return Text.assemble((f"{heading:<8}", "dim"), one_line(" · ".join(parts)))
    heads = [heading, *[""] * len(parts)]
    return Text("\n").join(
        Text.assemble((f"{head:<8}", "dim"), one_line(part)) for head, part in zip(heads, parts, strict=False)
    )


def events_lines(events: Sequence[Event], lines: int) -> Text:
    """Write a line for each of the newest events, newest first."""
    return Text("\n").join(
        Text.assemble(
            (f"{clock(event)} ", "dim"), (one_line(event.run or ""), "bold"), " ", event_text(event)
        )
        for event in events[:lines]
    )


def clock(event: Event) -> str:
    """Format a time: today by the minute, before that by the day."""
    then = time.localtime(event.at)
    is_today = then[:3] == time.localtime(time.time())[:3]
    return time.strftime("%H:%M:%S" if is_today else "%b %d  ", then)


def alarms_line(alarms: Sequence[Alarm]) -> Text:
    """Say how many alarms there are, with as many of the worst as there is room for."""
    texts = []
    for alarm in alarms[:9]:
        subject = one_line(alarm.subject or alarm.on)
        texts.append(Text.assemble(LEVELS[alarm.level], " ", (subject, "bold"), " ", one_line(alarm.says)))
    return Text.assemble((counted(len(alarms), "alarm"), "bold"), "  ", Text("  ·  ").join(texts))


def counted(count: int, what: str, ending: str = "s") -> str:
    return f"{count:,} {what}{ending * (count != 1)}"
