"""Checks of `lorad doctor` on threads, waiting and malloc of the pools, and of a new one."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import msgspec

from lorad.box.config import Config, load
from lorad.box.machine import read_machine
from lorad.box.paths import Home
from lorad.box.runtime import Decision, Overrides, choose_runtime
from lorad.children.interpreter import InterpreterFinding
from lorad.cli.output import size
from lorad.client.client import Client
from lorad.errors import LoradError
from lorad.records.pools import Pool, RuntimeReason
from lorad.text import counted

_SIZES = {"tiny model": 600_000, "large model": 1_000_000_000}  # parameters


def runtime_checks(home: Home, device: str) -> Iterator[InterpreterFinding]:
    """Check the runtime of the daemon if one is up: its CPUs and environment may differ from this shell's."""
    pid = None
    pools = list[Pool]()
    with contextlib.suppress(LoradError):  # there is no daemon
        client = Client(home)
        pid = client.status().pid
        pools = client.pools()
    machine = read_machine(pid or "self")
    try:
        config = load(home.config)
    except LoradError:
        config = Config()  # another check reports it
    environment: Mapping[str, str] = os.environ
    if pid is not None:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            entries = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
            environment = {name: value for name, _, value in (entry.partition("=") for entry in entries)}
    overrides = Overrides(config=config.runtime, environment=environment)
    quota = "no cgroup quota" if machine.quota is None else f"cgroup quota {machine.quota:g}"
    granted = f"{machine.cpus} by affinity on {machine.cores} of {machine.all_cores} cores, {quota}"
    cpus = f"{machine.usable} usable ({granted}), load {machine.load:.1f}"
    yield InterpreterFinding("cpus", True, cpus, facts=asdict(machine))
    slots = config.devices.cpu_slots if device == "cpu" else 1
    tiny, large = (
        choose_runtime(count, machine, device, overrides, slots=slots) for count in _SIZES.values()
    )
    for name, chosen in zip(_SIZES, (tiny, large), strict=True):
        threads = f"{counted(chosen.threads, 'thread')} ({_words(chosen.reasons['threads'])})"
        yield InterpreterFinding(name, True, threads, facts=chosen.told())
    waits = f"{large.wait_policy} ({_words(large.reasons['wait_policy'])})"
    yield InterpreterFinding("waiting", True, waits, facts=large.told())
    malloc = f"{_sizes(large.malloc)} ({_words(large.reasons['malloc'])})"
    yield InterpreterFinding("malloc", True, malloc, facts=large.told())
    for pool in pools:
        detail = "not known"
        if (runtime := pool.runtime) is not None:
            threads = f"{counted(runtime.threads, 'thread')} ({_words(runtime.reasons['threads'])})"
            detail = f"{threads}, {runtime.wait_policy} waiting, {_sizes(runtime.malloc)}"
        yield InterpreterFinding(f"pool {pool.pool}", True, detail, facts=msgspec.to_builtins(runtime) or {})


def _words(why: Decision | RuntimeReason) -> str:
    return f"{'automatic' if why.source == 'load' else why.source}: {why.text}"


def _sizes(malloc: Mapping[str, int]) -> str:
    variables = (f"{name}={size(value) if name.endswith('_') else value}" for name, value in malloc.items())
    return ", ".join(variables) or "nothing set"
