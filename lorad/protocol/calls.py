"""What can be asked of a pool: each call of a connection is answered by items (a stream), then a result.

Fencing. A call of a run carries (run, attempt, seq). A mutating verb has seq > 0, growing within an attempt:
the same (run, attempt, seq) again gets the recorded reply, or waits for the one that is under way; it is
never done twice. A call of an older attempt raises Fenced. The first call of a newer attempt aborts what the
older one has in flight and must be `open`, which starts the slot afresh.
"""

from typing import Any, Generic, Literal, TypeVar

import numpy as np
from msgspec import Struct

from lorad.protocol.batch import (
    Batch,
    Chunks,
    Gradients,
    LossStats,
    Optimizer,
    PolicyLoss,
    PolicyTargets,
    Prompt,
    Ranked,
    Sampling,
    ValueLoss,
    ValueTargets,
)
from lorad.protocol.status import PoolInfo, PoolStatus

T = TypeVar("T")

CANARIES = 8  # unless a run asks for others
CANARY_TOKENS = 24  # of each canary, unless a run asks for others
CRITIC = "critic"  # where a checkpoint has a run's critic


class Nothing(Struct, frozen=True):
    """No arguments, or no result."""


class TrainerVerb(Struct, Generic[T], frozen=True, tag=True):
    """A verb of the trainer protocol with its arguments, as `lorad/trainers/base.py` states them.

    T is what a trainer answers, and the tag is the name of the method that does the verb. `slot` is a name of
    the trainer's: a driver leaves it out, and its pool fills in the slot of the run that calls.
    """


class OpenCritic(Struct, frozen=True):
    """A critic beside the run's slot, closed and saved with it. What is not said here is as of the run's.

    resume_from: its part of a checkpoint, see `Save`; None begins afresh.
    """

    rank: int
    alpha: float
    resume_from: str | None = None
    expert_rank: int | None = None


class Open(Struct, frozen=True):
    """Open the run's slot from a checkpoint directory (`resume_from`), a PEFT directory (`source`), or by
    `init`.

    reference: the adapter whose log-probabilities `Logprobs` gives as `reference`. It is attested like a
        version and held beside the slot, frozen.
    has_teacher: log-probabilities of the pool's teacher are asked for, and the reference is an adapter of
        that model: no engine holds it, and its log-probabilities are those of `teacher`.
    critic: the run's critic, which is never published.
    step: the optimizer steps that the run has done.
    priority: a run with one more gets twice the share of the pool's turns.
    kept: versions that stay loaded for the run, the current one among them.
    amplified_every: publishes between two amplified attestations, 0 for none but the first.
    tokens_per_microbatch, activation_checkpointing: 0 and None let the pool choose for samples of `longest`
        tokens.
    kept_tokens, lent_tokens: the pool's choice, see `SlotSpec`.
    expert_rank: the rank on linears of experts; None where it is `rank`.
    """

    modules: tuple[str, ...]
    rank: int
    alpha: float
    dropout: float = 0.0
    rslora: bool = False
    lora_type: Literal["lora", "canonical_lora"] = "canonical_lora"
    init: str = "kaiming"
    seed: int = 0
    optimizer: Optimizer = Optimizer()
    tokens_per_microbatch: int = 0
    activation_checkpointing: bool | None = None
    kept_tokens: int = 0
    lent_tokens: int = 0
    longest: int = 0
    source: str | None = None
    resume_from: str | None = None
    canaries: int = CANARIES
    canary_tokens: int = CANARY_TOKENS
    amplified_every: int = 10
    kept: int = 2
    priority: int = 0
    reference: "LoadVersion | None" = None
    critic: OpenCritic | None = None
    has_teacher: bool = False
    step: int = 0
    expert_rank: int | None = None
    dora: bool = False


class Opened(Struct, frozen=True):
    """The slot that was opened.

    bytes: size of everything that the trainer holds for the run.
    tokens_per_microbatch, activation_checkpointing, kept_tokens: as `Open` has them, or as the pool chose.
    reference: the verdict of its attestation; None where there is none.
    """

    parameters: int
    tensors: int
    bytes: int
    reference: "Attestation | None" = None
    tokens_per_microbatch: int = 16384
    activation_checkpointing: bool = False
    kept_tokens: int = 0


class Generate(Struct, frozen=True):
    """Sample completions of prompts.

    version: `run@number`, or `base`.
    alias: the name under which it was asked for; "" where that is the version's own.
    """

    version: str
    prompts: list[Prompt]
    sampling: Sampling
    alias: str = ""


class Generated(Struct, frozen=True):
    """The end of a sampling call; of its `seconds`, none of its samples had a turn while it `waited`."""

    samples: int
    tokens: int
    seconds: float
    waited: float = 0.0

    def joined_with(self, other: "Generated") -> "Generated":
        """Return the sums with a call of the same time, and the longer of both waits."""
        return Generated(
            self.samples + other.samples,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            max(self.waited, other.waited),
        )


class Rank(Struct, frozen=True):
    """Compute log-probabilities of the tokens of texts, and of the `most` most likely in their places.

    version: as in `Generate`.
    texts: int32 arrays.
    starts: for each, the first token that is wanted, at least 1.
    """

    version: str
    texts: list[np.ndarray]
    starts: list[int]
    most: int


class ForwardBackward(TrainerVerb[Gradients], frozen=True, tag="forward_backward"):
    batch: Batch
    targets: PolicyTargets
    loss: PolicyLoss
    normaliser: float
    slot: str = ""


class StepResult(Struct, frozen=True):
    """The result of an optimizer step.

    grad_norm: the L2 norm of all gradients of the adapter before clipping.
    applied: False when that was not finite, and the step was left out.
    """

    grad_norm: float
    applied: bool


class OptimStep(TrainerVerb[StepResult], frozen=True, tag="optim_step"):
    """Take a step.

    optimizer: the settings of this step; None leaves those that the slot was opened with.
    of: the slot of the driver's run, or its critic.
    """

    lr: float
    max_grad_norm: float
    of: Literal["slot", "critic"] = "slot"
    optimizer: Optimizer | None = None
    slot: str = ""


class MachineUse(Struct, frozen=True):
    """What the machine did since a slot's last optimizer step, programs outside of lorad included; None:
    unknown.

    cpu: the share of all cores that was busy.
    memory: bytes in use on the machine.
    device_utilization: mean over the pool's devices.
    device_power: watts of all of them.
    device_memory: bytes in use on all of them.
    """

    seconds: float = 0.0
    cpu: float | None = None
    memory: int | None = None
    device_utilization: float | None = None
    device_memory: int | None = None
    device_power: float | None = None


class Stepped(StepResult, frozen=True):
    """The result of an optimizer step, and what was computed for it.

    tokens, seconds: what the slot's forward and backward passes took since the step before, prompts included,
        waiting excluded.
    mfu: see `lorad/pool/work.py`; None where it is not known.
    memory, memory_peak: see `TrainerHealth`; None where it is not known.
    waited: seconds that the run's work on its slot waited for its turn since the step before.
    """

    tokens: int = 0
    seconds: float = 0.0
    mfu: float | None = None
    memory: int | None = None
    memory_peak: int | None = None
    waited: float = 0.0
    machine: MachineUse = MachineUse()


LogprobsOf = Literal["slot", "base", "reference", "teacher"]


class Logprobs(Struct, frozen=True):
    """Compute log-probabilities of the targets of a batch, with the temperature of the sampling.

    of: the run's slot, the base (adapter off), the slot's reference, or the pool's teacher.
    """

    of: LogprobsOf
    batch: Batch
    temperature: float = 1.0


class LogprobsResult(Struct, frozen=True):
    """The answer to `Logprobs`, see `Predictions`; an older lorad does not say what is correct."""

    logprobs: np.ndarray
    correct: np.ndarray | None = None


class Values(TrainerVerb[np.ndarray], frozen=True, tag="values"):
    """Compute the values of a batch by the run's critic."""

    batch: Batch
    slot: str = ""


class ValuesResult(Struct, frozen=True):
    values: np.ndarray  # float32 [M]


class ValueBackward(TrainerVerb[LossStats], frozen=True, tag="value_backward"):
    """Add to the gradient of the run's critic."""

    batch: Batch
    targets: ValueTargets
    loss: ValueLoss
    normaliser: float
    slot: str = ""


class Publish(Struct, frozen=True):
    """Export the slot, load it into the engine as `run@number` and attest it; files go to `directory`."""

    number: int
    step: int
    parent: str | None  # run@number before it in this lineage
    directory: str


class Attestation(Struct, frozen=True):
    """The result of an attestation.

    verdict: inconclusive means that delivery is proved, but the signal is too small to prove more.
    delivered_sha256: digest of the file that servers read the version from; "" where memory serves it.
    """

    verdict: Literal["passed", "inconclusive", "failed"]
    detail: str
    facts: dict[str, float] = {}
    delivered_sha256: str = ""


class Published(Struct, frozen=True):
    """Describes the version that was published.

    seconds: export and load, without attestation.
    norm: norm of the adapter, see `Adapter.norm`; None from a pool of an older lorad.
    """

    version: str
    sha256: str
    bytes: int
    seconds: float
    attest_seconds: float
    attestation: Attestation
    norm: float | None = None


class Save(Struct, frozen=True):
    """Write the slot's state into `directory`, which exists, a critic's into CRITIC below it.

    It ends when the files of the last version are on disk as well.

    step: the optimizer steps that are done.
    """

    directory: str
    step: int = 0


class Saved(Struct, frozen=True):
    files: list[str]


class Unload(Struct, frozen=True):
    version: str


class LoadVersion(Struct, frozen=True):
    """Load a version from its directory and attest it, to serve it; one with that digest stays as it is.

    keep: it stays until `let_go`, whatever else is loaded; else it goes when others are asked for.
    """

    version: str
    directory: str
    sha256: str
    keep: bool = False


class Loaded(Struct, frozen=True):
    """The version is loaded, with the verdict of its attestation now or when it was loaded."""

    attestation: Attestation


class LetGo(Struct, frozen=True):
    """End the `keep` of a version, if it has one, once requests in flight on it have ended."""

    version: str


class SlotClosed(Struct, frozen=True):
    """The slot is closed; the checksum of the base as it is now must not have changed (rule 7)."""

    base_checksum: str


class Evict(Struct, frozen=True):
    """Close the slot of an attempt whose driver is gone, if it is that attempt's."""

    run: str
    attempt: int


class Verb(Struct, frozen=True):
    """The types of a verb: args -> [item …] result; one that mutates is recorded and fenced by seq."""

    args: type
    result: type
    item: type | None = None
    mutates: bool = False
    of_run: bool = True


VERBS: dict[str, Verb] = {
    "open": Verb(Open, Opened, mutates=True),
    "generate": Verb(Generate, Generated, item=Chunks),
    "forward_backward": Verb(ForwardBackward, Gradients, mutates=True),
    "optim_step": Verb(OptimStep, Stepped, mutates=True),
    "discard_grads": Verb(Nothing, Nothing, mutates=True),
    "logprobs": Verb(Logprobs, LogprobsResult),
    "values": Verb(Values, ValuesResult),
    "value_backward": Verb(ValueBackward, LossStats, mutates=True),
    "set_reference": Verb(LoadVersion, Nothing, mutates=True),
    "publish": Verb(Publish, Published, mutates=True),
    "save": Verb(Save, Saved, mutates=True),
    "unload": Verb(Unload, Nothing, mutates=True),
    "close": Verb(Nothing, SlotClosed, mutates=True),
    "hello": Verb(Nothing, PoolInfo, of_run=False),
    "status": Verb(Nothing, PoolStatus, of_run=False),
    "write_uses": Verb(Nothing, Nothing, of_run=False),
    "load_version": Verb(LoadVersion, Loaded, of_run=False),
    "attest_again": Verb(LoadVersion, Loaded, of_run=False),
    "let_go": Verb(LetGo, Nothing, of_run=False),
    "serve": Verb(Generate, Generated, item=Chunks, of_run=False),
    "rank": Verb(Rank, Ranked, of_run=False),
    "evict": Verb(Evict, Nothing, of_run=False),
    "shutdown": Verb(Nothing, Nothing, of_run=False),
}
CANCEL = "cancel"
"""Ends the call of the same connection whose id is `args`; it has no answer."""


class Call(Struct, frozen=True):
    """One call. Its `id` is unique in the connection, and answers carry it."""

    id: int
    verb: str
    args: Any
    run: str = ""
    attempt: int = 0
    seq: int = 0


class Answer(Struct, frozen=True):
    """An answer to a call: an item or result of the verb, or an error as `lorad.errors.to_wire` makes it."""

    id: int
    kind: Literal["item", "result", "error"]
    body: Any
