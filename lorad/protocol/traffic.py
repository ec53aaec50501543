"""What a gateway reports of its requests, in a file that it replaces at most once a second."""

from typing import Annotated

from msgspec import Meta, Struct

FILE = "traffic.json"
FILE_BYTES = 1 << 18  # more than it ever is
WINDOW = 60.0  # seconds
_Count = Annotated[int, Meta(ge=0)]
_Rate = Annotated[float, Meta(ge=0)]


class Figures(Struct, frozen=True):
    """The traffic of one name. Rates cover the last `window` seconds.

    requests: requests that ended since the gateway began, without those that were refused as invalid.
    failed: how many of them ended with an error of the serving side.
    tokens: tokens generated since the gateway began.
    ttft_p50, ttft_p95: seconds until the first token, of the newest 256 streams in the window; None without
        any.
    p50, p95: seconds until the end, of the newest 256 answers in the window.
    """

    requests: _Count = 0
    in_flight: _Count = 0
    failed: _Count = 0
    tokens: _Count = 0
    requests_per_second: _Rate = 0.0
    tokens_per_second: _Rate = 0.0
    ttft_p50: _Rate | None = None
    ttft_p95: _Rate | None = None
    p50: _Rate | None = None
    p95: _Rate | None = None
    window: _Rate = WINDOW


class Report(Struct, frozen=True):
    """All that a gateway reports.

    since: Unix time at which counting began.
    names: figures of each alias, version or other name that was asked for.
    """

    since: float
    names: dict[str, Figures]
