"""The name test of attestation: the published name gives what a copy of the same tensors under a fresh name
gives.

Bit for bit on an engine that repeats its bits, within the noise otherwise. It says what the published name
resolves to, and nothing about the loader, which both have gone through. A name and a copy that are the base's
or the previous version's log-probabilities too prove nothing.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from lorad.protocol.calls import Attestation

_NOISE_FACTOR = 4.0  # the most that two answers of an engine differ, rms in units of the noise

_Scores = Sequence[np.ndarray]
"""float64 [T] of each server."""


class Others(Struct, frozen=True):
    """What the first server says of the base and of the previous version. None: it is not known any more."""

    base: np.ndarray
    previous: np.ndarray | None = None


def same_bits(left: _Scores, right: _Scores) -> bool:
    return len(left) == len(right) and all(map(np.array_equal, left, right))


def judge_name(name: _Scores, copy: _Scores, others: Others, noise: float | None = None) -> Attestation:
    """Judge a version's name.

    Args:
        noise: What answers of this engine differ by, the root mean square in nats; None where they repeat bit
            for bit.
    """
    limit = _NOISE_FACTOR * (noise or 0.0)
    apart = max(map(rms_between, name, copy))
    if (noise is None and not same_bits(name, copy)) or not apart <= limit:
        detail = f"the engine does not answer to its name as to a fresh copy of it: rms {apart:.2g} nats"
        return Attestation("failed", detail)
    alike = ""
    if rms_between(name[0], others.base) <= limit:
        alike = "the base"
    elif others.previous is not None and rms_between(name[0], others.previous) <= limit:
        alike = "the previous version"
    if alike:
        how = f"exactly like {alike}" if noise is None else f"like {alike}, within the noise"
        return Attestation("inconclusive", f"its name and a copy of it both answer {how}")
    if noise is None:
        return Attestation("passed", "its name answers bit for bit like a fresh copy")
    detail = f"its name answers like a fresh copy: rms {apart:.2g} nats, noise {noise:.2g}"
    return Attestation("passed", detail)


def rms_between(left: np.ndarray, right: np.ndarray) -> float:
    return float(np.sqrt(np.mean((left - right) ** 2)))
