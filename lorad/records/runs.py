"""A run, and what `lorad show` has of it.

Times are Unix seconds, sizes bytes, rates per second.
"""

from typing import Any

from msgspec import Struct

from lorad.protocol.evals import Expected, SetScore
from lorad.protocol.inputs import RowCounts
from lorad.protocol.preflight import Rate
from lorad.records.measured import Number, Result


class Rates(Struct, frozen=True):
    tokens_per_second: float | None = None
    step_seconds: float | None = None


class Signals(Struct, frozen=True, omit_defaults=True):
    """What may call for a look, as far as it is known."""

    kl: Number | None = None  # from here to skipped_updates_total: metrics of the last step
    entropy: Number | None = None
    truncated: Number | None = None
    logprob_difference: Number | None = None
    explained_variance: Number | None = None  # of a critic that is past its warm-up
    failed_rewards: Number | None = None
    failed_rewards_total: Number | None = None  # sum over the whole run
    skipped_updates: Number | None = None
    skipped_updates_total: Number | None = None  # sum over the whole run
    idle_steps_total: Number | None = None  # steps of the whole run that changed no weight
    chosen_fall: Number | None = None  # of dpo: chosen completions below the reference, nats per token
    loss: Number | None = None  # of the last step, of a run that samples nothing
    pair_accuracy: Number | None = None  # share of pairs that are the right way round
    reward_margin: Number | None = None  # of dpo, chosen minus rejected, as rewards/margins of TRL
    on_request: Number | None = None  # 1: its steps are made when a client asks for them
    not_finite: list[str] = []  # metrics of the last step that were no number
    zero_variance: Number | None = None  # share of the last step's groups whose rewards are all the same
    at: float | None = None  # time of the last step
    attested: str | None = None  # verdict on the current version
    begun: float | None = None  # when the newest attempt began to work


class Queued(Struct, frozen=True):
    """Where a run stands in the queue.

    place: 1 is next.
    of: how many runs wait.
    behind: why the runs before it come first; "" where nobody else is before it.
    starts_at: the Unix time at which it will start, as far as can be known; None: not known.
    after: the run whose end makes room for it.
    """

    place: int
    of: int = 0
    behind: str = ""
    starts_at: float | None = None
    after: str = ""


class Run(Struct, frozen=True):
    name: str
    state: str  # lorad.states.RunState
    reason: str | None = None  # lorad.states.EndReason, once it ended
    detail: str = ""  # why it ended
    waiting: str = ""  # why it is queued
    queue: Queued | None = None  # while it is queued
    wanted: str | None = None  # while it is stopping: pause, stop or kill
    doing: str = ""  # in words, of a few seconds ago: "sampling 41 of 64"
    step: int = 0
    steps: int = 0  # that are planned; 0: its client decides, or it is an adapter that was imported
    reward: float | None = None  # mean of the last step
    eval_first: float | None = None
    eval_last: float | None = None
    nll_first: float | None = None  # of held-out completions, nats per token
    nll_last: float | None = None
    accuracy_last: float | None = None  # of held-out pairs
    token_accuracy_last: float | None = None  # of held-out completions
    version: int | None = None  # the current one
    owner: str = ""
    pool: str | None = None
    created_at: float = 0.0
    started_at: float | None = None  # when it was first placed
    ended_at: float | None = None
    attempt: int = 0
    priority: int = 0
    preempted: str | None = None  # the run that it makes, or made, room for
    rates: Rates = Rates()
    signals: Signals = Signals()
    recent: list[Number | None] = []  # mean rewards of the last 24 steps
    origin: str | None = None  # run@version or directory that it came from
    base: str = ""  # the model of its spec
    tags: list[str] = []
    note: str = ""
    group: str = ""  # of which so many runs work at a time
    sweep: str | None = None  # the sweep that started it
    values: dict[str, Any] = {}  # for the keys that were asked for, in a sweep for those of the grid


class KlReference(Struct, frozen=True):
    """What KL is measured against, unless that is the base."""

    name: str
    sha256: str = ""


class RunProcess(Struct, frozen=True):
    """A process that works for an active run, or the shim of one."""

    role: str
    pid: int | None = None


class Attempt(Struct, frozen=True):
    attempt: int
    started_at: float = 0.0
    ended_at: float | None = None
    resumed_from: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None
    detail: str = ""
    changed: dict[str, Any] = {}  # dotted keys of the spec that the attempt before had otherwise
    before: dict[str, Any] = {}  # what it had for them


class Beginning(Struct, frozen=True):
    """What the newest attempt of a run began with."""

    attempt: int = 0
    trainer: str = ""
    engine: str = ""
    data_sha256: str = ""  # of the rows; "" for a task
    model_sha256: str = ""  # of the files of its weights
    inputs: dict[str, str] = {}  # sha256 of each file of user code and of the model's, by what it is
    software: dict[str, str] = {}  # versions of what the pool ran on, by package; empty where not kept
    routes: str = "off"  # what rollout.routes came to
    rows: RowCounts = RowCounts()  # what its data are made of


class Trainable(Struct, frozen=True):
    """How many parameters learn."""

    parameters: int = 0
    base: int | None = None  # parameters of the base
    share: float | None = None  # share of all parameters


class Best(Struct, frozen=True):
    """The version that RUN@best names."""

    version: int
    step: int = 0
    metric: str = ""
    value: float = 0.0


class KeptFiles(Struct, frozen=True):
    """What a run keeps on disk, and what is there now. Sizes are bytes; free: on that disk, None where not
    known.

    A version that is pinned, aliased or loaded stays besides.
    """

    versions: int = 0  # that stay
    versions_at_once: int = 0  # at most, just before a checkpoint
    version_bytes: int = 0  # of one
    checkpoints: int = 0
    checkpoint_bytes: int = 0  # of one
    total: int = 0  # at most, with `versions_at_once`
    free: int | None = None
    present_versions: int = 0  # from here on nothing before there is a run
    present_checkpoints: int = 0
    present: int = 0


class RunDetails(Run, frozen=True):
    """A run as `lorad show` shows it."""

    directory: str = ""
    cwd: str | None = None  # where relative paths of its spec begin
    reference: KlReference | None = None
    serving: bool = False
    spec: dict[str, Any] = {}  # the whole spec as JSON, see lorad/spec/model.py
    data_format: str = ""  # what the rows of its data are, where completions are trained on
    processes: list[RunProcess] = []
    attempts: list[Attempt] = []
    trainable: Trainable | None = None  # as the newest attempt has it
    warnings: list[str] = []
    rate: Rate | None = None  # what trainer.lr is where it is not given
    best: Best | None = None  # None before the first evaluation
    sets: dict[str, list[SetScore]] = {}  # of eval.sets, the first and the last evaluation of each
    results: list[Result] = []  # what its versions came to when somebody evaluated them
    expected: list[Expected] = []  # what became of the expectations of its spec
    begun: Beginning | None = None  # None before its first attempt began to work
    files: KeptFiles | None = None  # None where nobody counted its parameters


class Forked(Run, frozen=True):
    warnings: list[str] = []


class Resumed(Forked, frozen=True):
    changed_inputs: list[str] = []  # a sentence for each file that changed since the attempt before


class Removed(Struct, frozen=True):
    name: str
    removed: bool = True


class RunGroup(Struct, frozen=True):
    """Runs of one owner with the same `resources.group`."""

    name: str
    owner: str = ""
    limit: int | None = None  # how many may work at a time; None: any number
    working: int = 0
    queued: int = 0


class LogPart(Struct, frozen=True):
    text: str
    offset: int = 0  # where to continue
    size: int = 0


class Event(Struct, frozen=True):
    """An event.

    kind: `state`, a journal kind (step, eval, version, checkpoint, end, …), or `idle` when nothing happens.
    """

    id: int
    at: float
    run: str | None
    kind: str
    data: dict[str, Any] = {}  # differs by kind
