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
    """Versions that are loaded of those that fit."""
    capacity, engine = pool.capacity, pool.engine
    used, all_ = (capacity.versions, capacity.max_versions) if capacity else (engine.slots_used, engine.slots)
    return f"{used}/{all_}" if all_ and isinstance(used, int) else ""


def speed(tokens: Any) -> str:
    """1234.5 -> 1,234"""
    known = isinstance(tokens, int | float) and math.isfinite(tokens)
    return f"{tokens:,.0f}" if known else ""


def memory(device: Device) -> float:
    """The part that is in use."""
    return device.memory_used / device.memory_total if device.memory_total else 0.0


def busy(device: Device) -> str:
    return "" if device.utilization is None else f"{device.utilization:.0%}"


def holder(device: Device) -> str:
    """Say who leases a device, and since when, and who reserved it."""
    lease, since = device.lease, coarse_age(device.lease.since if device.lease else None)
    part = f", {device.part}" if device.part else ""
    held = (
        f"{lease.pool or lease.why or 'held'}{part} ({lease.user}{since and f', {since}'})" if lease else ""
    )
    return "; ".join(part for part in (held or device.pool or "", set_aside(device)) if part)


def used(device: Device) -> str:
    """71/80 GiB, of memory."""
    some, all_ = device.memory_used / _GIB, device.memory_total / _GIB
    digits = 0 if all_ >= 10 else 1
    return f"{some:.{digits}f}/{all_:.{digits}f} GiB"


def others(device: Device) -> str:
    """Processes that are not of lorad."""
    found = [one for one in device.processes if not one.ours]
    return ", ".join(f"{one.user} {size(one.memory)} ({one.name} {one.pid})" for one in found)


def pools_lines(pools: Sequence[Pool], lines: int) -> Text:
    """A line each where there are so many, else all in one."""
    return _listed("pools", [_pool_words(pool, is_short=len(pools) > lines) for pool in pools], lines)


def _pool_words(pool: Pool, *, is_short: bool) -> str:
    runs = counted(len(pool.tenants), "run")
    pace = f"{speed(pool.engine_tokens_per_second)}/{speed(pool.trainer_tokens_per_second)} tok/s"
    if is_short:
        return f"{pool.pool} {runs}, {pace}"
    loaded = f", {slots(pool)} slots" if slots(pool) else ""
    return f"{pool.pool}  {base(pool.model)}, {runs}{loaded}, {pace}, {phase(pool)}"


def devices_lines(devices: Sequence[Device], lines: int) -> Text:
    return _listed(
        "devices", [_device_words(device, is_short=len(devices) > lines) for device in devices], lines
    )


def _device_words(device: Device, *, is_short: bool) -> str:
    parts = [used(device), busy(device) and f"{busy(device)} busy"]
    parts += [] if is_short else [holder(device) or "free", others(device)]
    return f"{device.device} {', '.join(part for part in parts if part)}"


def _listed(heading: str, parts: Sequence[str], lines: int) -> Text:
    if len(parts) > lines:
        return Text.assemble((f"{heading:<8}", "dim"), one_line(" · ".join(parts)))
    heads = [heading, *[""] * len(parts)]
    found = [
        Text.assemble((f"{head:<8}", "dim"), one_line(part)) for head, part in zip(heads, parts, strict=False)
    ]
    return Text("\n").join(found)


def events_lines(events: Sequence[Event], lines: int) -> Text:
    """Newest first."""
    return Text("\n").join(
        Text.assemble(
            (f"{clock(event)} ", "dim"), (one_line(event.run or ""), "bold"), " ", event_text(event)
        )
        for event in events[:lines]
    )


def clock(event: Event) -> str:
    """Format a time: today by the minute, before that by the day."""
    then, now = time.localtime(event.at), time.localtime(time.time())
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%b %d  ", then)


def alarms_line(alarms: Sequence[Alarm]) -> Text:
    """Say how many alarms there are, with as many of the worst as there is room for."""
    parts = Text("  ·  ").join(_alarm_text(alarm) for alarm in alarms[:9])
    return Text.assemble((counted(len(alarms), "alarm"), "bold"), "  ", parts)


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _alarm_text(alarm: Alarm) -> Text:
    sign, style = LEVELS[alarm.level]
    return Text.assemble(
        (sign, style), " ", (one_line(alarm.subject or alarm.on), "bold"), " ", one_line(alarm.says)
    )
