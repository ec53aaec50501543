"""Which server takes a sample: one that has its prompt's keys and values already, unless it has too much to
do.

Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup and Zadimoghaddam,
2016): equal prompts prefer the same server, a server that comes or goes moves no other prompt, and none gets
more than its share.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

SURPLUS = 1.25  # times the average load


def pick(prompt: np.ndarray, loads: Sequence[tuple[int, int]]) -> int:
    """Return the identity of a server. loads: (identity, samples in flight) of each one that serves; at least
    one.
    """
    limit = math.ceil(SURPLUS * (sum(load for _, load in loads) + 1) / len(loads))
    below = [identity for identity, load in loads if load + 1 <= limit]
    return max(
        below or [min(loads, key=lambda entry: entry[1])[0]], key=lambda identity: _weight(prompt, identity)
    )


def _weight(prompt: np.ndarray, identity: int) -> bytes:
    return hashlib.blake2b(prompt.tobytes(), digest_size=8, salt=identity.to_bytes(8, "little")).digest()
