"""The body of each request: `Client` encodes it, and the handler in `lorad/daemon/api/verbs` decodes it.

A daemon ignores fields that it does not know, except those of `Sampling`, and has defaults for what an older
client leaves out.
"""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct, field

from lorad import bounds
from lorad.selection import Selection
from lorad.spec.numbers import COUNT_LIMIT, NonNegative, NonNegativeFloat, Positive, Seed, Tag

Name = Annotated[str, Meta(max_length=bounds.NAME_CHARACTERS)]
_Path = Annotated[str, Meta(max_length=bounds.PATH_CHARACTERS)]
_Override = Annotated[str, Meta(max_length=bounds.OVERRIDE_CHARACTERS)]
Overrides = Annotated[list[_Override], Meta(max_length=bounds.OVERRIDES)]  # `key=value`
_Column = Annotated[str, Meta(max_length=128)]
_Whole = Annotated[int, Meta(ge=-COUNT_LIMIT, le=COUNT_LIMIT)]
_Text = Annotated[str, Meta(max_length=1000)]
_Stop = Annotated[str, Meta(max_length=1000)]

# plain JSON of little depth
_Scalar = _Text | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | float | bool | None
_FEW = Meta(max_length=64)
_Key = Annotated[str, Meta(max_length=128)]
_Plain1 = _Scalar | Annotated[list[_Scalar], _FEW] | Annotated[dict[_Key, _Scalar], _FEW]
_Plain2 = _Scalar | Annotated[list[_Plain1], _FEW] | Annotated[dict[_Key, _Plain1], _FEW]
_Plain3 = _Scalar | Annotated[list[_Plain2], _FEW] | Annotated[dict[_Key, _Plain2], _FEW]
_Settings = Annotated[
    dict[_Key, _Scalar | Annotated[list[_Plain3], _FEW] | Annotated[dict[_Key, _Plain3], _FEW]], _FEW
]


class RequestBody(Struct, frozen=True):
    """The body of a request; each of its texts, lists and tables has a bound, and so has its JSON."""

    MOST_BYTES: ClassVar[int] = bounds.SMALL_BODY_BYTES


class ShutdownRequest(RequestBody, frozen=True):
    gateway: bool = False  # end the gateway, too
    pools: bool = False  # end the pools that have no active run, too


class _SpecRequest(RequestBody, frozen=True):
    MOST_BYTES: ClassVar[int] = bounds.SPEC_BODY_BYTES

    spec: Annotated[str, Meta(max_length=bounds.SPEC_BYTES)]  # the text of the file
    source: _Path  # the file's name for messages
    cwd: _Path  # where relative paths of the spec begin
    overrides: Overrides = []


class RunRequest(_SpecRequest, frozen=True):
    name: Name | None = None
    suffix: bool = False  # take NAME-2 or the like where the name is in use
    replace: bool = False  # remove the run of that name first, which has to be over


class BundleRequest(RequestBody, frozen=True):
    """A part of a bundle: files that a client on another machine sends along with a spec."""

    MOST_BYTES: ClassVar[int] = bounds.BODY_BYTES

    size: Annotated[int, Meta(ge=1, le=bounds.BUNDLE_BYTES)]  # bytes of the whole bundle
    offset: Annotated[int, Meta(ge=0, le=bounds.BUNDLE_BYTES)] = 0  # where in it the part stands
    data: Annotated[bytes, Meta(max_length=bounds.BUNDLE_PART)] = b""  # b"" asks how much has come


_Moment = Annotated[float, Meta(gt=0, le=1e11)]  # seconds, of which calendars know a date


class ReserveRequest(RequestBody, frozen=True):
    """Keep a device from lorad; with neither `seconds` nor `until` that lasts until it is released."""

    seconds: _Moment | None = None  # from when it is free
    until: _Moment | None = None  # Unix time
    why: Annotated[str, Meta(max_length=200)] = ""
    now: bool = False  # runs there stop at their next step


class SelectRequest(RequestBody, frozen=True):
    """Which runs to list, in which order, with which of their figures."""

    MOST_BYTES: ClassVar[int] = 2 * bounds.SMALL_BODY_BYTES

    selection: Selection = Selection()
    recent: bool = False  # without those that ended over a day ago
    keys: Annotated[
        list[_Column], Meta(max_length=64)
    ] = []  # dotted keys of the spec, and metrics of the last step
    sort: Annotated[
        list[_Column], Meta(max_length=16)
    ] = []  # columns or keys; `-` before one: the largest first
    limit: NonNegative = 0  # how many runs; 0: all


class TrialRequest(_SpecRequest, frozen=True):
    n: Annotated[int, Meta(ge=1, le=bounds.TRIAL_SAMPLES)] = 4


class HalvingRequest(Struct, frozen=True):
    """How to halve a sweep; lorad chooses what is None."""

    eta: float | None = None
    rungs: Annotated[list[_Whole], Meta(max_length=bounds.POINTS)] | None = None
    metric: Name | None = None
    asha: bool = False  # decide for each run as it reaches a rung, without waiting for the others
    min_steps: Positive | None = None  # the first rung; the others follow by eta


class PointsRequest(Struct, frozen=True):
    """Which points a sweep has: `random` that are drawn, or those that are `listed`; else all of a grid."""

    random: _Whole | None = None
    seed: Seed = 0  # of the draws
    listed: Annotated[list[Overrides], Meta(max_length=bounds.POINTS)] = []  # overrides of each point


class SweepRequest(RunRequest, frozen=True):
    halving: HalvingRequest | None = None  # None: every run makes all its steps
    points: PointsRequest = PointsRequest()


class ResumeRequest(RequestBody, frozen=True):
    step: NonNegative | None = None  # of the checkpoint; None: the newest
    steps: Positive | None = None  # that the run makes in all; None: as many as before
    overrides: Overrides = []  # keys of the spec that change from this attempt on


class ForkRequest(RequestBody, frozen=True):
    overrides: Overrides = []
    name: Name | None = None
    steps: Positive | None = None
    fresh: bool = False  # without the state of the optimizer


class ExportRequest(RequestBody, frozen=True):
    directory: _Path


class SwapRequest(RequestBody, frozen=True):
    version: Name | None = None
    rollback: bool = False  # instead of `version`, take the one that the alias served before this one


_NOTE_CHARACTERS = 4000
_MANY = Meta(max_length=256)


class LabelRequest(RequestBody, frozen=True):
    add: Annotated[list[Tag], _MANY] = field(default_factory=list)
    remove: Annotated[list[Tag], _MANY] = field(default_factory=list)
    note: Annotated[str, Meta(max_length=_NOTE_CHARACTERS)] | None = None  # None: as it is


class EditRequest(RequestBody, frozen=True):
    overrides: Overrides


class RenameRequest(RequestBody, frozen=True):
    name: Name  # the run's new one


class GroupRequest(RequestBody, frozen=True):
    limit: NonNegative | None = None  # None: no limit


class CollectRequest(RequestBody, frozen=True):
    dry_run: bool = False


class AdapterRequest(Struct, frozen=True):
    """A PEFT directory, and the alias under which it is served."""

    name: Name
    directory: _Path


class ServeRequest(RequestBody, frozen=True):
    model: _Path
    cwd: _Path  # where relative paths begin
    adapters: Annotated[list[AdapterRequest], Meta(max_length=64)] = []
    overrides: Overrides = []


class DoorRequest(RequestBody, frozen=True):
    """A request of the front of the tinker doors.

    owner: the login name, or number, of the user whose key was given to it.
    """

    owner: Name


class ModelRequest(RequestBody, frozen=True):
    """A request about what is served.

    model: an alias, run@number, or a run's name; where serving is to end, a base as well.
    """

    model: _Path


class OwnerRequest(RequestBody, frozen=True):
    """A request of the front of the gateways for the owner of a model.

    asker: the login name, or number, of the user whom the front answers, and who must be allowed to see the
        model; "" for the front itself.
    """

    model: _Path
    asker: Name = ""


class Sampling(Struct, frozen=True, forbid_unknown_fields=True):
    """How to sample; the defaults are those of a quick look."""

    n: Annotated[int, Meta(ge=1, le=1024)] = 1
    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    max_new_tokens: Positive = 64
    seed: Seed = 0
    stop: Annotated[list[_Stop], Meta(max_length=64)] = []


_Tokens = Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=bounds.BODY_BYTES)]
_Seeds = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=1024)]


class GenerateRequest(RequestBody, frozen=True):
    """Ask for completions of one prompt, or of several that are given as tokens.

    seeds: a list for each of `prompts`, with a seed for each completion; else they follow from
        `sampling.seed`.
    """

    MOST_BYTES: ClassVar[int] = bounds.BODY_BYTES

    version: Name
    prompt: Annotated[str, Meta(max_length=bounds.BODY_BYTES)] = ""
    sampling: Sampling = Sampling()
    prompts: Annotated[list[_Tokens], Meta(max_length=bounds.PROMPTS)] = []
    seeds: Annotated[list[_Seeds], Meta(max_length=bounds.PROMPTS)] = []


class ResultRequest(RequestBody, frozen=True):
    """What a version came to, to be kept with it; the fields are those of `Result`."""

    data: _Text
    suite: Literal["data", "lm_eval", "inspect"] = "data"
    settings: _Settings = {}
    metrics: Annotated[
        dict[Annotated[str, Meta(max_length=bounds.METRIC_NAME)], float], Meta(max_length=bounds.METRICS)
    ] = {}
    problems: NonNegative = 0
    failed: NonNegative = 0
