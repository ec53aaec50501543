"""What is wanted of one H200 with a Qwen3-8B, and whether a day reached it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, Mapping[str, Any]]
"""Stage -> name -> value."""


@dataclass(frozen=True)
class Target:
    """figure: `stage:name`. wanted: in words; reached: of its value."""

    figure: str
    about: str
    wanted: str
    reached: Callable[[Any], bool]


def _most(figure: str, about: str, limit: float, unit: str) -> Target:
    return Target(figure, about, f"< {limit:g}{unit}", lambda value: value < limit)


def _least(figure: str, about: str, limit: float, unit: str) -> Target:
    return Target(figure, about, f">= {limit:g}{unit}", lambda value: value >= limit)


def _yes(figure: str, about: str) -> Target:
    return Target(figure, about, "yes", lambda value: value is True)


def _none(figure: str, about: str) -> Target:
    return Target(figure, about, "0", lambda value: value == 0)


TARGETS: Sequence[Target] = (
    _yes("facts:nobody_before_us", "lorad sees nobody on an idle GPU"),
    _yes("facts:sees_us", "lorad sees that we compute there"),
    _none("parity:failed", "tests of the suites that failed"),
    _none("run:versions_failed", "versions whose attestation failed"),
    _most("rollout:trainer_against_engine_nats", "trainer against engine, base", 0.06, " nats"),
    _least("rollout:rows_8.base_share_of_limit", "decoding 8 rows, share of the bandwidth's limit", 0.6, ""),
    _most("train:ragged_times_even", "a token of ragged samples, times one of even ones", 1.3, "x"),
    _most("publish:in_process_s", "publish", 1.0, " s"),
    _most("fsdp:offload_s", "the base of FSDP leaves the device", 2.0, " s"),
    _least("fsdp:offload_frees_gib", "memory that this frees", 15.0, " GiB"),
    _most("experts:experts.adapter_times_base", "adapters on experts, times the base", 1.3, "x"),
)


@dataclass(frozen=True)
class Judged:
    """A target beside what was found. is_reached: None where the day has no such figure."""

    target: Target
    value: Any
    is_reached: bool | None


def judge(figures: Figures) -> list[Judged]:
    found = []
    for target in TARGETS:
        stage, _, name = target.figure.partition(":")
        value = figures.get(stage, {}).get(name)
        found.append(Judged(target, value, None if value is None else target.reached(value)))
    return found
