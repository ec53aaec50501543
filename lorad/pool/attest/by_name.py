"""The name test of attestation: the published name gives what a copy of the same tensors under a fresh name
gives.

Bit for bit on an engine that repeats its bits, within the noise otherwise. It says what the published name
resolves to, and nothing about the loader, which both have gone through. A name and a copy that are the base's
or the previous version's log-probabilities too prove nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from lorad.protocol.calls import Attestation

_NOISE_FACTOR = 4.0  # the most that two answers of an engine differ, rms in units of the noise

_Test = Callable[[np.ndarray], bool]
_Scores = Sequence[np.ndarray]
"""float64 [T] of each server."""


class Others(Struct, frozen=True):
    """What the first server says of the base and of the previous version. None: it is not known any more."""

    base: np.ndarray
    previous: np.ndarray | None = None


def same_bits(left: _Scores, right: _Scores) -> bool:
    return len(left) == len(right) and all(map(np.array_equal, left, right))


def judge_bits(name: _Scores, copy: _Scores, others: Others) -> Attestation:
    """Judge a version's name on an engine whose answers repeat bit for bit."""
    if not same_bits(name, copy):
        return _failed(name, copy)
    alike = _alike(others, lambda other: np.array_equal(name[0], other))
    if alike:
        return Attestation("inconclusive", f"its name and a copy of it both answer exactly like {alike}")
    return Attestation("passed", "its name answers bit for bit like a fresh copy")


def judge_within(name: _Scores, copy: _Scores, others: Others, noise: float) -> Attestation:
    """Judge a version's name on an engine whose answers do not repeat, and differ from the right ones by
    `noise`, the root mean square in nats.
    """
    limit = _NOISE_FACTOR * noise
    apart = max(map(rms_between, name, copy))
    if not apart <= limit:
        return _failed(name, copy)
    alike = _alike(others, lambda other: rms_between(name[0], other) <= limit)
    if alike:
        return Attestation(
            "inconclusive", f"its name and a copy of it both answer like {alike}, within the noise"
        )
    return Attestation(
        "passed", f"its name answers like a fresh copy: rms {apart:.2g} nats, noise {noise:.2g}"
    )


def rms_between(left: np.ndarray, right: np.ndarray) -> float:
    return float(np.sqrt(np.mean((left - right) ** 2)))


def _alike(others: Others, is_same: _Test) -> str:
    if is_same(others.base):
        return "the base"
    return "the previous version" if others.previous is not None and is_same(others.previous) else ""


def _failed(name: _Scores, copy: _Scores) -> Attestation:
    apart = max(map(rms_between, name, copy))
    return Attestation(
        "failed", f"the engine does not answer to its name as to a fresh copy of it: rms {apart:.2g} nats"
    )
