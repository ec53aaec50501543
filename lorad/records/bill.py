"""A bill: who used how much."""

from msgspec import Struct


class BillLine(Struct, frozen=True, kw_only=True):
    """What one run, user, sweep, alias or pool used, or everybody on one day.

    key: its name; "" for what is nobody's: a pool was warm, started, or worked for itself.
    owner: the user; "" where there are several.
    held, busy: device-seconds, see `Use` in lorad/protocol/status.py.
    wasted: the part of `held` that a later attempt threw away.
    sampled, trained: tokens of the steps of runs; by alias and pool, all that pools sampled and trained.
    generated: tokens that pools sampled for runs, evaluations and steps that never ended included.
    served: tokens for whoever asked the gateway.
    wasted_tokens: the part of `sampled` that a later attempt threw away.
    prompts: tokens of prompts.
    cached: the part of `prompts` that was not computed again.
    joules: None where nothing measures them.
    memory: bytes of the largest slot; on a line that is nobody's, of the pool.
    disk: bytes that the runs take now; None on a line that is not about runs.
    cost: None where a device has no price.
    """

    key: str = ""
    owner: str = ""
    held: float = 0.0
    busy: float = 0.0
    wasted: float = 0.0
    sampled: int = 0
    trained: int = 0
    generated: int = 0
    served: int = 0
    wasted_tokens: int = 0
    prompts: int = 0
    cached: int = 0
    joules: float | None = None
    memory: int = 0
    disk: int | None = None
    cost: float | None = None


class Quota(Struct, frozen=True):
    """How much a user has used of the device-hours that they may use in a span of time up to now.

    per: the span, like 7d.
    again: the earliest Unix time at which hours are left again; None where some are left, or never will be.
    """

    user: str
    used: float = 0.0
    most: float = 0.0
    per: str = ""
    again: float | None = None


class Bill(Struct, frozen=True):
    """Who used how much, the greatest first.

    since, until: Unix times of whole hours; None for the first hour, and for now.
    """

    by: str
    rows: list[BillLine]
    total: BillLine
    currency: str = ""
    since: float | None = None
    until: float | None = None
    quotas: list[Quota] = []  # of users who have one and used devices in its span
