"""The check of a spec: all that would be true of a run if it were started now."""

from typing import Any

from msgspec import Struct

from lorad.protocol.preflight import DataLook, Rate
from lorad.records.runs import KeptFiles


class Start(Struct, frozen=True):
    """Whether the run would start.

    state: now, waits, or never.
    why: what it waits for, or why it can never run; of `now`, who else has to agree.
    devices: where it would start.
    pool: the warm pool that it would join; "" where one would be made.
    stops: runs of lower priority that would make room for it.
    ahead: queued runs that are before it.
    starts_at: the Unix time at which it would start; None where that is not known.
    after: the run whose end would make room for it.
    """

    state: str
    why: str = ""
    devices: list[str] = []
    pool: str = ""
    stops: list[str] = []
    ahead: int = 0
    starts_at: float | None = None
    after: str = ""


class Check(Struct, frozen=True):
    """A spec that is sound, and what it comes to."""

    name: str
    spec: dict[str, Any] = {}  # with everything chosen that it leaves open
    model_path: str = ""
    model_dtype: str = ""
    parameters: int = 0
    adapter_parameters: int = 0
    modules: int = 0  # linears that the adapter changes
    algorithm: str = ""  # the parts that its name stands for, in words
    rate: Rate | None = None
    memory_needed: int = 0
    memory_parts: dict[str, int] = {}  # of what is needed, by what takes them
    memory_available: int | None = None
    memory_share: float = 1.0  # of what is available that a pool may take
    rows: int | None = None  # of the training data; None: they never end
    left_out: int = 0  # rows that are too long
    data_format: str = ""
    look: DataLook | None = None
    held_out: int = 0  # problems
    eval_scored: bool = False  # their completions are sampled and have a reward
    eval_likely: bool = False  # they have completions, whose likelihood is measured
    samples_per_step: int = 0
    files: KeptFiles = KeptFiles()
    start: Start = Start("now")
    warnings: list[str] = []


class Bundle(Struct, frozen=True):
    """Files that a client on another machine has sent along with a spec.

    sha256: The name of the bundle, which is its own sha256.
    received: How many bytes have come.
    directory: Where the files are; "" until all have come.
    """

    sha256: str
    received: int
    directory: str
