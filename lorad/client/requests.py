"""The bodies of requests: `Client` encodes them, and the handlers in `lorad/daemon/api/verbs` decode them.

A daemon ignores fields that it does not know, except those of `Sampling`, and has defaults for what an older
client leaves out.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from lorad.bounds import TRIAL_SAMPLES
from lorad.selection import Selection
from lorad.spec.numbers import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Seed


class ShutdownRequest(Struct, frozen=True):
    gateway: bool = False  # end the gateway, too
    pools: bool = False  # end the pools that have no active run, too


class RunRequest(Struct, frozen=True):
    spec: str  # the text of the file
    source: str  # the file's name for messages
    cwd: str  # where relative paths of the spec begin
    overrides: list[str] = []  # `key=value`
    name: str | None = None
    suffix: bool = False  # take NAME-2 or the like where the name is in use
    replace: bool = False  # remove the run of that name first, which has to be over


class ReserveRequest(Struct, frozen=True):
    """Keep a device from lorad; with neither `seconds` nor `until` that lasts until it is released."""

    seconds: PositiveFloat | None = None  # from when it is free
    until: PositiveFloat | None = None  # Unix time
    why: Annotated[str, Meta(max_length=200)] = ""
    now: bool = False  # runs there stop at their next step


class SelectRequest(Struct, frozen=True):
    """Which runs to list, in which order, with which of their figures."""

    selection: Selection = Selection()
    recent: bool = False  # without those that ended over a day ago
    keys: list[str] = []  # dotted keys of the spec, and metrics of the last step
    sort: list[str] = []  # columns or keys; `-` before one: the largest first
    limit: NonNegative = 0  # how many runs; 0: all


class TrialRequest(Struct, frozen=True):
    spec: str  # the text of the file
    source: str  # the file's name for messages
    cwd: str  # where relative paths of the spec begin
    overrides: list[str] = []  # `key=value`
    n: Annotated[int, Meta(ge=1, le=TRIAL_SAMPLES)] = 4


class HalvingRequest(Struct, frozen=True):
    """How to halve a sweep; lorad chooses what is None."""

    eta: float | None = None
    rungs: list[int] | None = None
    metric: str | None = None
    asha: bool = False  # decide for each run as it reaches a rung, without waiting for the others
    min_steps: Positive | None = None  # the first rung; the others follow by eta


class PointsRequest(Struct, frozen=True):
    """Which points a sweep has: `random` that are drawn, or those that are `listed`; else all of a grid."""

    random: int | None = None
    seed: Seed = 0  # of the draws
    listed: list[list[str]] = []  # overrides of each point


class SweepRequest(RunRequest, frozen=True):
    halving: HalvingRequest | None = None  # None: every run makes all its steps
    points: PointsRequest = PointsRequest()


class ResumeRequest(Struct, frozen=True):
    step: int | None = None  # of the checkpoint; None: the newest
    steps: Positive | None = None  # that the run makes in all; None: as many as before
    overrides: list[str] = []  # keys of the spec that change from this attempt on


class ForkRequest(Struct, frozen=True):
    overrides: list[str] = []
    name: str | None = None
    steps: Positive | None = None
    fresh: bool = False  # without the state of the optimizer


class ExportRequest(Struct, frozen=True):
    directory: str


class SwapRequest(Struct, frozen=True):
    version: str | None = None
    rollback: bool = False  # instead of `version`, take the one that the alias served before this one


class CollectRequest(Struct, frozen=True):
    dry_run: bool = False


class AdapterRequest(Struct, frozen=True):
    """A PEFT directory, and the alias under which it is served."""

    name: str
    directory: str


class ServeRequest(Struct, frozen=True):
    model: str
    cwd: str  # where relative paths begin
    adapters: list[AdapterRequest] = []
    overrides: list[str] = []


class DoorRequest(Struct, frozen=True):
    """A request of the front of the tinker doors.

    owner: login name, or number, of the user whose key was given to it.
    """

    owner: str


class ModelRequest(Struct, frozen=True):
    """A request about what is served.

    model: an alias, run@number, or a run's name; where serving is to end, a base as well.
    """

    model: str


class Sampling(Struct, frozen=True, forbid_unknown_fields=True):
    """How to sample; the defaults are those of a quick look."""

    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    max_new_tokens: Positive = 64
    seed: Seed = 0
    stop: list[str] = []


class GenerateRequest(Struct, frozen=True):
    """A prompt to complete, or several of them as tokens.

    seeds: of the completions of each of `prompts`; none: they follow from `sampling.seed`.
    """

    version: str
    prompt: str = ""
    sampling: Sampling = Sampling()
    prompts: list[list[Annotated[int, Meta(ge=0, lt=2**31)]]] = []
    seeds: list[list[Annotated[int, Meta(ge=0)]]] = []


class ResultRequest(Struct, frozen=True):
    """What a version came to, to be kept with it; the fields are those of `Result`."""

    data: str
    suite: Literal["data", "lm_eval", "inspect"] = "data"
    settings: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    problems: NonNegative = 0
    failed: NonNegative = 0
