"""Checks of `lorad doctor` on threads, waiting and malloc: what a new pool would get, and what the pools
have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from lorad.box.config import RuntimeSettings, load
from lorad.box.machine import Machine, read_machine
from lorad.box.paths import Home
from lorad.box.runtime import Overrides, Why, choose_runtime
from lorad.cli.output import size
from lorad.client import box_shapes as shapes
from lorad.client.box_shapes import Pool, Runtime
from lorad.client.client import Client
from lorad.errors import LoradError

SIZES = {"tiny model": 600_000, "large model": 1_000_000_000}  # parameters

Told = tuple[str, str, dict[str, Any]]  # name, description, data


def runtime_checks(home: Home, device: str) -> Iterator[Told]:
    """Check the runtime of the daemon if one is up: its CPUs and environment may differ from this shell's."""
    pid, pools = daemon_of(home)
    machine = read_machine(pid or "self")
    overrides = Overrides(config=settings(home), environment=environment(pid))
    yield "cpus", cpus(machine), asdict(machine)
    slots = cpu_slots(home) if device == "cpu" else 1
    tiny, large = (choose_runtime(count, machine, device, overrides, slots=slots) for count in SIZES.values())
    for name, chosen in zip(SIZES, (tiny, large), strict=True):
        yield name, f"{threads(chosen.threads)} ({words(chosen.reasons['threads'])})", chosen.told()
    yield "waiting", f"{large.wait_policy} ({words(large.reasons['wait_policy'])})", large.told()
    yield "malloc", f"{sizes(large.malloc)} ({words(large.reasons['malloc'])})", large.told()
    for pool in pools:
        yield f"pool {pool.pool}", in_words(pool.runtime), msgspec.to_builtins(pool.runtime) or {}


def daemon_of(home: Home) -> tuple[int | None, list[Pool]]:
    """Its pid and its pools; None and none without a daemon."""
    client = Client(home)
    try:
        return int(client.status().pid), client.pools()
    except LoradError:
        return None, []


def settings(home: Home) -> RuntimeSettings:
    try:
        return load(home.config).runtime
    except LoradError:
        return RuntimeSettings()  # another check reports it


def cpu_slots(home: Home) -> int:
    try:
        return load(home.config).devices.cpu_slots
    except LoradError:
        return 1


def environment(pid: int | None) -> Mapping[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0") if pid else []
    except OSError:
        entries = []
    return (
        {name: value for name, _, value in (entry.partition("=") for entry in entries)}
        if entries
        else os.environ
    )


def cpus(machine: Machine) -> str:
    quota = "no cgroup quota" if machine.quota is None else f"cgroup quota {machine.quota:g}"
    granted = f"{machine.cpus} by affinity on {machine.cores} of {machine.all_cores} cores, {quota}"
    return f"{machine.usable} usable ({granted}), load {machine.load:.1f}"


def in_words(told: Runtime | None) -> str:
    """Describe what a pool was started with."""
    if told is None:
        return "not known"
    why = words(told.reasons["threads"])
    return f"{threads(told.threads)} ({why}), {told.wait_policy} waiting, {sizes(told.malloc)}"


def threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"


def words(why: Why | shapes.Why) -> str:
    return f"{'automatic' if why.source == 'load' else why.source}: {why.text}"


def sizes(malloc: Mapping[str, int]) -> str:
    told = (f"{name}={size(value) if name.endswith('_') else value}" for name, value in malloc.items())
    return ", ".join(told) or "nothing set"
