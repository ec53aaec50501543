"""The answers of the daemon about runs, versions, aliases and sweeps, one Struct each; `box_shapes.py` has
the others.

Handlers build them, `Client` returns them decoded. Times are Unix seconds, sizes bytes, rates per second. A
client ignores fields that it does not know and has defaults for what an older daemon leaves out: only names
are required.
"""

from typing import Any

from msgspec import Struct

from lorad.client.check_shapes import Files
from lorad.client.queue_shapes import Queued
from lorad.envs.episode import EpisodeEnd, EpisodeTurn, Fork, Task
from lorad.protocol.evals import Expected, SetScore, figures
from lorad.protocol.inputs import RowCounts
from lorad.protocol.preflight import ErrorSaid, Rate
from lorad.protocol.traffic import Figures

_Number = int | float  # keeps its JSON type: a count stays an integer
Metrics = dict[str, _Number | None]  # None: it was no finite number


class Rates(Struct, frozen=True):
    tokens_per_second: float | None = None
    step_seconds: float | None = None


class Signals(Struct, frozen=True, omit_defaults=True):
    """What may call for a look, as far as it is known."""

    kl: _Number | None = None  # from here to skipped_updates_total: metrics of the last step
    entropy: _Number | None = None
    truncated: _Number | None = None
    logprob_difference: _Number | None = None
    explained_variance: _Number | None = None  # of a critic that is past its warm-up
    failed_rewards: _Number | None = None
    failed_rewards_total: _Number | None = None  # sum over the whole run
    skipped_updates: _Number | None = None
    skipped_updates_total: _Number | None = None  # sum over the whole run
    idle_steps_total: _Number | None = None  # steps of the whole run that changed no weight
    chosen_fall: _Number | None = None  # of dpo: chosen completions below the reference, nats per token
    loss: _Number | None = None  # of the last step, of a run that samples nothing
    pair_accuracy: _Number | None = None  # share of pairs that are the right way round
    reward_margin: _Number | None = None  # of dpo, chosen minus rejected, as rewards/margins of TRL
    on_request: _Number | None = None  # 1: its steps are made when a client asks for them
    not_finite: list[str] = []  # metrics of the last step that were no number
    zero_variance: _Number | None = None  # share of the last step's groups whose rewards are all the same
    at: float | None = None  # time of the last step
    attested: str | None = None  # verdict on the current version
    begun: float | None = None  # when the newest attempt began to work


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
    recent: list[_Number | None] = []  # mean rewards of the last 24 steps
    origin: str | None = None  # run@version or directory that it came from
    base: str = ""  # the model of its spec
    tags: list[str] = []
    note: str = ""
    group: str = ""  # of which so many runs work at a time
    sweep: str | None = None  # the sweep that started it
    values: dict[str, Any] = {}  # for the keys that were asked for, in a sweep for those of the grid


class Reference(Struct, frozen=True):
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


class Result(Struct, frozen=True):
    """What a version came to when somebody evaluated it."""

    run: str
    version: int
    sha256: str = ""
    at: float = 0.0
    by: str = ""
    suite: str = "data"  # or lm_eval, inspect
    data: str = ""  # the rows, or the task of the suite
    settings: dict[str, Any] = {}  # reward, sampling and the like
    metrics: dict[str, float] = {}
    problems: int = 0
    failed: int = 0


class RunDetails(Run, frozen=True):
    """A run as `lorad show` shows it."""

    directory: str = ""
    cwd: str | None = None  # where relative paths of its spec begin
    reference: Reference | None = None
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
    files: Files | None = None  # None where nobody counted its parameters


class Forked(Run, frozen=True):
    warnings: list[str] = []


class Resumed(Forked, frozen=True):
    changed_inputs: list[str] = []  # a sentence for each file that changed since the attempt before


class Removed(Struct, frozen=True):
    name: str
    removed: bool = True


class Step(Struct, frozen=True):
    """A step of the surviving lineage.

    Metrics of every step: lr, updates, response_length, truncated, zero_variance_groups, failed_rewards,
    failed_rewards_total, skipped_updates, skipped_updates_total, idle_steps_total, tokens, trained_tokens,
    tokens_per_second, seconds, seconds_sample, seconds_score, seconds_weigh, seconds_train. Where they were
    measured: reward, reward_std (over samples with a reward), loss, kl, entropy, ratio, clip_fraction (over
    what was trained on), of a critic explained_variance, value, value_loss, value_clip_fraction,
    critic_grad_norm, grad_norm, importance_capped, importance_max, rejected (of the weights against the
    engine), kl_coef (where it adapts), prompts_sampled, prompts_used (with dynamic sampling),
    logprob_difference, logprob_difference_max, staleness_difference, routes_differ, routes_unknown (where
    routes are replayed), those of `lorad/driver/sampling/spread.py`, seconds_publish, seconds_attest,
    trainer_tokens_per_second, trainer_memory, trainer_memory_peak (bytes), mfu, host_cpu, host_memory,
    device_utilization, device_memory, device_power (watts). A step of sft or dpo has no rewards, groups and
    ratios; sft has perplexity and token_accuracy, dpo has pair_accuracy, chosen_reward,
    rejected_reward and reward_margin, the difference of these (beta * (logprob - reference) of completions),
    chosen_shift and rejected_shift (logprob - reference, nats per token); with an evaluation each comes with
    held_out_ before it.
    """

    step: int
    attempt: int = 0
    at: float = 0.0
    version: int = 0
    samples: str = ""  # the file of its samples, relative to the run's directory
    metrics: Metrics = {}


class Evaluation(Struct, frozen=True):
    step: int
    attempt: int = 0
    at: float = 0.0
    version: int = 0
    score: float | None = None  # mean over the problems whose reward did not fail
    problems: int = 0
    failed: int = 0
    nll: float | None = None  # of the held-out completions, nats per token
    perplexity: float | None = None  # exp(nll)
    accuracy: float | None = None  # share of held-out pairs that are the right way round
    token_accuracy: float | None = None  # share of their tokens than which no other was more likely
    sets: dict[str, SetScore] = {}  # of eval.sets, by name

    @property
    def figures(self) -> dict[str, float]:
        """Return what was measured, by name: eval, eval/NAME, eval/NAME/pass@4, nll, accuracy."""
        return figures(self.score, self.nll, self.accuracy, self.sets)


class Sample(Struct, frozen=True):
    step: int
    version: str | int = ""  # run@number
    prompt_id: str = ""
    index: int = 0  # within its group
    prompt: str = ""
    completion: str = ""
    answer: str | None = None
    reward: _Number | None = None
    advantage: _Number | None = None
    finish: str | None = None
    error: str | None = None  # why its reward failed
    rewards: dict[str, _Number | None] = {}  # components by name
    tokens: list[int] = []  # behind the prompt
    logprobs: list[_Number | None] = []  # of the tokens that the model sampled
    widths: list[int] = []  # characters that each of these made: of the completion, or of its turn
    length: int | None = None  # tokens that the model sampled, where `tokens` are left out
    logprob: float | None = None  # mean of `logprobs`, where these are left out
    task: Task | None = None  # of an episode
    turns: list[EpisodeTurn] = []
    end: EpisodeEnd | None = None
    rows: int = 1  # in which it is trained: one more for each time that the history was replaced
    forks: list[Fork] = []
    set: str = ""  # of an evaluation: the set of problems
    problem: int | None = None  # of an evaluation: its number in the set, from 1

    @property
    def ending(self) -> str:
        """Return why it ended: of an episode its end, else why the engine stopped."""
        return str(self.end or self.finish or "")

    @property
    def size(self) -> int:
        """Return how many tokens the model sampled."""
        if self.length is not None:
            return self.length
        return sum(turn.tokens for turn in self.turns) if self.turns else len(self.tokens)

    @property
    def turn_count(self) -> int:
        return len(self.turns) or 1

    @property
    def searched(self) -> list[str]:
        """Return the texts that a search looks in."""
        spoken = [text for turn in self.turns for text in (turn.text, turn.observation)]
        return [self.prompt, *(spoken or [self.completion])]


class TrialEvent(Struct, frozen=True):
    """What happens in a trial of a spec.

    kind: `phase`, `sample`, `idle` when nothing happens, `end`.
    text: of a phase.
    seconds: at the end: that the pool took.
    error: why it ended, where it did not end well.
    """

    kind: str
    text: str = ""
    sample: Sample | None = None
    seconds: float = 0.0
    error: ErrorSaid | None = None


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


# -- versions and what serves --------------------------------------------------------------------------------


class Version(Struct, frozen=True):
    run: str
    version: int
    step: int = 0
    sha256: str = ""
    path: str | None = None  # None while, or after, there are no files
    rank: int = 0
    alpha: float = 0.0
    parent: int | None = None
    created_at: float = 0.0
    pinned: bool = False
    aliases: list[str] = []
    attested: str = ""
    attestation: str = ""
    bytes: int = 0
    loaded: bool = False
    results: list[Result] = []


class Checkpoint(Struct, frozen=True):
    run: str
    step: int
    attempt: int = 0
    version: int = 0
    path: str = ""
    bytes: int = 0
    created_at: float = 0.0


class Exported(Struct, frozen=True):
    version: str  # run@number
    path: str
    sha256: str = ""  # of the adapter
    url: str = ""  # of the upload, where the command made one


class Alias(Struct, frozen=True):
    alias: str
    run: str
    version: int
    updated_at: float = 0.0
    owner_uid: int = -1  # who made it
    sha256: str = ""
    attested: str = ""
    by: str | None = None  # who moved it last


class ServedAlias(Alias, frozen=True):
    owner: str = ""  # owner of the alias
    step: int | None = None  # the step that made the version
    traffic: Figures | None = None  # None while no gateway is up
    previous: str | None = None  # run@version that a rollback leads to
    loaded: bool | None = None  # by the pool's last status; else the next request loads it


class Verdict(Struct, frozen=True):
    verdict: str
    detail: str = ""


class Swapped(Alias, frozen=True):
    previous: str | None = None  # run@version
    attestation: Verdict = Verdict("unknown")
    seconds: float = 0.0
    gateway: str | None = None  # its socket; None where it does not come up
    url: str | None = None
    key_file: str | None = None  # that holds the key for `url`
    chat: bool = False  # it expects the chat template


class Move(Struct, frozen=True):
    """A move of an alias."""

    alias: str
    run: str | None = None
    version: int | None = None  # None: the alias was removed
    at: float = 0.0
    by: str = ""


class RemovedAlias(Struct, frozen=True):
    alias: str
    removed: bool = True


class Served(Struct, frozen=True):
    pool: str
    aliases: list[Alias] = []
    gateway: str | None = None
    url: str | None = None
    key_file: str | None = None  # that holds the key for `url`
    chat: bool = False  # it expects the chat template


class StoppedServing(Struct, frozen=True):
    model: str
    runs: list[str] = []


class Serving(Struct, frozen=True):
    """What a gateway needs to serve a model, which is loaded."""

    model: str
    run: str
    version: int
    sha256: str
    socket: str
    model_path: str
    chat_template: bool


class Completion(Struct, frozen=True):
    text: str
    tokens: list[int] = []
    finish: str | None = None


class Generated(Struct, frozen=True):
    version: str
    completions: list[Completion] = []


# -- sweeps --------------------------------------------------------------------------------------------------

LOWER_IS_BETTER = ("nll", "loss")  # metrics of halving


class Halving(Struct, frozen=True):
    eta: _Number
    rungs: list[int]
    metric: str  # eval | nll | reward | loss
    asha: bool = False  # each run is decided about as it reaches a rung


class Rung(Struct, frozen=True):
    step: int
    kept: list[str] = []
    stopped: list[str] = []
    scores: dict[str, _Number | None] = {}
    at: float = 0.0


class SweepRun(Run, frozen=True):
    eval_best: float | None = None
    reward_mean: float | None = None  # of the last five steps
    loss_mean: float | None = None  # likewise


class Sweep(Struct, frozen=True):
    sweep: str
    owner: str = ""
    owner_uid: int = -1
    created_at: float = 0.0
    grid: dict[str, list[str]] = {}
    halving: Halving | None = None
    rungs: list[Rung] = []
    runs: list[SweepRun] = []


class StartedSweep(Sweep, frozen=True):
    warnings: list[str] = []
