"""What a gateway tells of its requests: a small file beside it, replaced at most once a second while there are any."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

FILE = "traffic.json"
FILE_BYTES = 1 << 18  # more than it ever is
WINDOW = 60.0  # seconds
Count = Annotated[int, Meta(ge=0)]
Rate = Annotated[float, Meta(ge=0)]


class Figures(Struct, frozen=True):
    """Of one name. requests: that ended, without those that were refused for what they ask; failed: those of them that
    ended with an error of the serving side; tokens: that were generated. These three are since the gateway began.

    Rates and seconds are of the last `window` seconds, seconds of the newest 256 answers in it, or None where there is
    none. ttft: until the first token, of streams; p50, p95: until the end.
    """

    requests: Count = 0
    in_flight: Count = 0
    failed: Count = 0
    tokens: Count = 0
    requests_per_second: Rate = 0.0
    tokens_per_second: Rate = 0.0
    ttft_p50: Rate | None = None
    ttft_p95: Rate | None = None
    p50: Rate | None = None
    p95: Rate | None = None
    window: Rate = WINDOW


class Told(Struct, frozen=True):
    """names: aliases, versions and whatever else was asked for; since: Unix time at which counting began."""

    since: float
    names: dict[str, Figures]
