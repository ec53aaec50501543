"""Choose threads, OpenMP's waiting and glibc's malloc for the size of a model and the load of a machine.

Who decides, strongest first; each setting on its own:

1. The run itself. With `deterministic: true` the number of threads is part of its arithmetic, so the first
   attempt's number holds for all attempts, whatever the load is then (`lorad/daemon/pools/threads.py`).
2. The spec: `pool.threads`.
3. The box: `runtime: {threads: 4, wait_policy: active, malloc: off}` in `config.yaml`.
4. The environment of the daemon: `OMP_NUM_THREADS`, `OMP_WAIT_POLICY`, `MALLOC_*` and `GLIBC_TUNABLES`.
5. `choose_runtime`: one thread below SMALL_MODEL parameters; above, the physical cores that are granted
   (affinity, cgroup quota; a slot's share of them) and idle, no more than one for each PER_THREAD parameters.
   Waiting is passive: threads that spin on a busy box take the CPU from those that they wait for. Active
   waiting must be asked for, and is granted only where every thread has a CPU to itself. malloc keeps what a
   step frees instead of returning it to the system and faulting it in again at the next step.

The figures behind it are in `benchmarks/NOTES.md`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct
from msgspec.structs import asdict

from lorad.box.config import RuntimeSettings
from lorad.box.machine import Machine

SMALL_MODEL = 25_000_000  # parameters; below, a second CPU thread makes decoding no faster
PER_THREAD = 6_000_000  # parameters: with fewer for each thread, they wait more than they compute
_GPU_THREADS = 4  # the GPU computes; these load files and prepare batches
_KEEP = 1 << 30  # bytes that malloc keeps on a machine that has plenty
_KEEP_SHARE = 16  # at most this part of the memory
_LEAST_KEPT = 32 << 20
# before it, a larger MALLOC_MMAP_THRESHOLD_ is ignored, without a word
_OLD_GLIBC = (2, 35)
_OLD_GLIBC_LIMIT = 32 << 20
_MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
# 1: blocks over 64 MiB stay only in the main arena, and one thread of a pool computes
_ARENAS = "MALLOC_ARENA_MAX"

_Source = Literal["run", "spec", "config", "environment", "automatic", "load"]
_WaitPolicy = Literal["passive", "active"]


class Decision(Struct, frozen=True):
    """A choice's source and its reason; at another `load` an automatic choice would be another."""

    source: _Source
    text: str


@dataclass(frozen=True)
class Overrides:
    """Decisions of others: `run` are the threads of its first attempt, `spec` is its `pool.threads`."""

    run: int | None = None
    spec: int | None = None
    config: RuntimeSettings = field(default_factory=RuntimeSettings)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Runtime:
    """Says what a pool's process runs with.

    threads: how many compute.
    wait_policy: what threads do that wait for work.
    malloc: variables that lorad adds, in bytes or counts.
    reasons: why each of the three is so.
    """

    threads: int
    wait_policy: _WaitPolicy = "passive"
    malloc: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, Decision] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Return the variables to set before the process begins: OpenMP and malloc read them once."""
        counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        return (
            counts
            | {"OMP_WAIT_POLICY": self.wait_policy}
            | {name: str(size) for name, size in self.malloc.items()}
        )

    def told(self) -> dict[str, object]:
        """Return the choice as JSON: {threads, wait_policy, malloc, reasons: {threads: {source, text}}}."""
        reasons = {name: asdict(why) for name, why in self.reasons.items()}
        return {
            "threads": self.threads,
            "wait_policy": self.wait_policy,
            "malloc": dict(self.malloc),
            "reasons": reasons,
        }


def choose_runtime(
    parameters: int, machine: Machine, device: str, overrides: Overrides, *, slots: int = 1
) -> Runtime:
    """Choose threads, wait policy and malloc for a model on `device`; `slots` pools may share the CPU."""
    threads, why_threads = choose_threads(parameters, machine, device, overrides, slots)
    wait_policy, why_waiting = _choose_wait_policy(threads, machine, overrides)
    malloc, why_malloc = _choose_malloc(machine, overrides)
    reasons = {"threads": why_threads, "wait_policy": why_waiting, "malloc": why_malloc}
    return Runtime(threads, wait_policy, malloc, reasons)


def choose_threads(
    parameters: int, machine: Machine, device: str, overrides: Overrides, slots: int = 1
) -> tuple[int, Decision]:
    asked: list[tuple[int | None, _Source, str]] = [
        (overrides.run, "run", "as in its first attempt: a deterministic run keeps its threads"),
        (overrides.spec, "spec", "pool.threads"),
        (_number(overrides.config.threads), "config", "runtime.threads"),
        (_number(overrides.environment.get("OMP_NUM_THREADS", "")), "environment", "OMP_NUM_THREADS"),
    ]
    for threads, source, text in asked:
        if threads is not None:
            short = (
                f"; only {machine.usable} can run at a time here: slower" if threads > machine.usable else ""
            )
            return threads, Decision(source, text + short)
    usable = machine.usable
    if device != "cpu":
        return min(_GPU_THREADS, usable), Decision("automatic", f"{device} computes")
    millions = f"{parameters / 1e6:,.{1 if parameters < 1e7 else 0}f} M parameters"
    if parameters < SMALL_MODEL:
        return 1, Decision(
            "automatic", f"{millions}: below {SMALL_MODEL / 1e6:.0f} M, decoding gains nothing from several"
        )
    idle = round(machine.all_cores - machine.load)
    shared = f" to {slots} slots" if slots > 1 else ""
    seen = f"{millions}, {usable} of {machine.all_cores} cores granted{shared}, load {machine.load:.1f}"
    return max(1, min(usable // slots, idle, parameters // PER_THREAD)), Decision("load", seen)


def _choose_wait_policy(threads: int, machine: Machine, overrides: Overrides) -> tuple[_WaitPolicy, Decision]:
    asked: list[tuple[str, _Source, str]] = [
        (overrides.config.wait_policy, "config", "runtime.wait_policy"),
        (overrides.environment.get("OMP_WAIT_POLICY", "").lower(), "environment", "OMP_WAIT_POLICY"),
    ]
    for policy, source, text in asked:
        if policy == "active" and (
            threads > machine.usable or machine.load + threads > machine.all_cores + 0.5
        ):
            busy = (
                f"{text} asks for active, but {threads} threads at load {machine.load:.1f} would spin on "
                "busy CPUs"
            )
            return "passive", Decision("automatic", busy)
        if policy in ("passive", "active"):
            return ("active" if policy == "active" else "passive"), Decision(source, text)
    return "passive", Decision("automatic", "threads that wait leave the CPU to others")


def _choose_malloc(machine: Machine, overrides: Overrides) -> tuple[dict[str, int], Decision]:
    """Return the variables to add; none where the user has set a threshold."""
    glibc = re.fullmatch(r"glibc (\d+)\.(\d+).*", machine.allocator)
    if not glibc:
        return {}, Decision("automatic", f"malloc is {machine.allocator}: MALLOC_* has no effect on it")
    if not overrides.config.tunes_malloc:
        return {}, Decision("config", "runtime.malloc is off")
    own = [name for name in _MALLOC if name in overrides.environment]
    if re.search(r"glibc\.malloc\.(mmap|trim)_threshold", overrides.environment.get("GLIBC_TUNABLES", "")):
        own.append("GLIBC_TUNABLES")
    if own:
        return {}, Decision("environment", ", ".join(own))
    keep = max(_LEAST_KEPT, min(_KEEP, 1 << (machine.memory // _KEEP_SHARE).bit_length() - 1))
    old = (int(glibc[1]), int(glibc[2])) < _OLD_GLIBC
    sizes = {_MALLOC[0]: min(keep, _OLD_GLIBC_LIMIT) if old else keep, _MALLOC[1]: keep}
    if _ARENAS not in overrides.environment:
        sizes[_ARENAS] = 1
    return sizes, Decision("automatic", f"{machine.allocator}, {machine.memory / 2**30:.1f} GiB of memory")


def _number(value: int | str) -> int | None:
    """Return the threads in a setting, the outer ones of `4,2`; None for `auto` and what is no count."""
    if isinstance(value, int):
        return value
    first = value.partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and int(first) > 0 else None
