"""What can be asked of a pool. One connection carries many calls; each is answered by items (a stream), then a result.

Fencing. A call of a run carries (run, attempt, seq). A mutating verb has seq > 0, growing within an attempt: the same
(run, attempt, seq) again gets the recorded reply, or waits for the one that is under way; it is never done twice. A
call of an older attempt raises Fenced. The first call of a newer attempt aborts what the older one has in flight and
must be `open`, which starts the slot afresh.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from msgspec import Struct

from lorad.protocol.batch import Batch, Chunks, LossStats, PolicyLoss, PolicyTargets, Prompt, Sampling

CANARIES, CANARY_TOKENS = 8, 24  # unless a run asks for others


class Nothing(Struct, frozen=True):
    """No arguments, or no result."""


class PoolInfo(Struct, frozen=True):
    """Who a pool is.

    base_checksum: sha256 over the base's weights as the trainer holds them, when they were loaded: trainers that hold
    them otherwise (sharded, fused) have others. model_sha256: over the weight files, the same for all of them.
    parameters: of the base, 0 when not told.
    """

    pool: str
    pid: int
    model: str  # as in the spec
    model_path: str
    base_checksum: str
    trainer: str
    engine: str
    mode: str
    device: str
    dtype: str
    threads: int
    max_tokens: int
    versions: dict[str, str]  # of software: lorad, torch, the backends
    model_sha256: str = ""
    parameters: int = 0


class Open(Struct, frozen=True):
    """Open the run's slot: from a checkpoint directory (`resume_from`), a PEFT directory (`source`), or by `init`."""

    modules: tuple[str, ...]
    rank: int
    alpha: float
    dropout: float = 0.0
    rslora: bool = False
    lora_type: Literal["lora", "canonical_lora"] = "canonical_lora"
    init: str = "kaiming"
    seed: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    tokens_per_microbatch: int = 16384
    activation_checkpointing: bool = False
    source: str | None = None
    resume_from: str | None = None
    canaries: int = CANARIES
    canary_tokens: int = CANARY_TOKENS


class Opened(Struct, frozen=True):
    parameters: int
    tensors: int
    bytes: int


class Generate(Struct, frozen=True):
    """version: `run@number`, or `base`."""

    version: str
    prompts: list[Prompt]
    sampling: Sampling


class Generated(Struct, frozen=True):
    samples: int
    tokens: int
    seconds: float


class ForwardBackward(Struct, frozen=True):
    batch: Batch
    targets: PolicyTargets
    loss: PolicyLoss
    normaliser: float


class OptimStep(Struct, frozen=True):
    lr: float
    max_grad_norm: float


class Stepped(Struct, frozen=True):
    """tokens, seconds: of the forward and backward passes since the step before, prompts included, without waiting.

    mfu: see `lorad/pool/work.py`. memory, memory_peak: see `TrainerHealth`. None: not told.
    """

    grad_norm: float
    applied: bool
    tokens: int = 0
    seconds: float = 0.0
    mfu: float | None = None
    memory: int | None = None
    memory_peak: int | None = None


class Logprobs(Struct, frozen=True):
    """of: the run's slot, or the base (adapter off). Temperature as in sampling."""

    of: Literal["slot", "base"]
    batch: Batch
    temperature: float = 1.0


class LogprobsResult(Struct, frozen=True):
    logprobs: np.ndarray  # float32 [T]


class Publish(Struct, frozen=True):
    """Export the slot, load it into the engine as `run@number`, attest it; files go to `directory` meanwhile."""

    number: int
    step: int
    parent: str | None  # run@number before it in this lineage
    directory: str


class Attestation(Struct, frozen=True):
    """passed | inconclusive (delivery proved, too little signal to tell more) | failed. `facts`: the numbers."""

    verdict: Literal["passed", "inconclusive", "failed"]
    detail: str
    facts: dict[str, float] = {}


class Published(Struct, frozen=True):
    version: str
    sha256: str
    bytes: int
    seconds: float  # export and load, without attestation
    attest_seconds: float
    attestation: Attestation


class Save(Struct, frozen=True):
    """Write the slot's state into `directory` (which exists); wait for the files of `version` to be on disk as well."""

    directory: str


class Saved(Struct, frozen=True):
    files: list[str]


class Unload(Struct, frozen=True):
    version: str


class LoadVersion(Struct, frozen=True):
    """Load a version from its directory, to serve it; nothing happens if it is loaded with that digest already."""

    version: str
    directory: str
    sha256: str


class Closed(Struct, frozen=True):
    """`base_checksum` as it is now: rule 7."""

    base_checksum: str


class Evict(Struct, frozen=True):
    """Close the slot of an attempt whose driver is gone; nothing happens if it is not open, or another attempt's."""

    run: str
    attempt: int


class Tenant(Struct, frozen=True):
    run: str
    attempt: int
    phase: str  # the verb under way, or "idle"
    parameters: int


class EngineStatus(Struct, frozen=True):
    """See `EngineHealth` in lorad/engines/base.py. None: it is not told."""

    alive: bool
    asleep: bool
    running: int
    waiting: int
    slots_used: int | None = None
    slots: int | None = None
    prefix_hits: float | None = None
    cache_used: float | None = None
    detail: str = ""


class TrainerStatus(Struct, frozen=True):
    """See `TrainerHealth` in lorad/trainers/base.py. here: its base is on its devices, not in host memory."""

    alive: bool
    detail: str = ""
    here: bool = True
    memory: int | None = None
    memory_peak: int | None = None


class PoolStatus(Struct, frozen=True):
    """What a pool does now. Rates are of the last seconds. engine, trainer: None from a pool that does not tell yet."""

    info: PoolInfo
    tenants: list[Tenant]
    loaded: list[str]
    engine_tokens_per_second: float
    trainer_tokens_per_second: float
    rss_bytes: int
    idle_seconds: float  # since the last call of a run; 0 while one is under way
    engine: EngineStatus | None = None
    trainer: TrainerStatus | None = None


class Verb(Struct, frozen=True):
    """args -> [item …] result. `mutates`: recorded and fenced by seq."""

    args: type
    result: type
    item: type | None = None
    mutates: bool = False
    of_run: bool = True


VERBS: dict[str, Verb] = {
    "open": Verb(Open, Opened, mutates=True),
    "generate": Verb(Generate, Generated, item=Chunks),
    "forward_backward": Verb(ForwardBackward, LossStats, mutates=True),
    "optim_step": Verb(OptimStep, Stepped, mutates=True),
    "discard_grads": Verb(Nothing, Nothing, mutates=True),
    "logprobs": Verb(Logprobs, LogprobsResult),
    "publish": Verb(Publish, Published, mutates=True),
    "save": Verb(Save, Saved, mutates=True),
    "unload": Verb(Unload, Nothing, mutates=True),
    "close": Verb(Nothing, Closed, mutates=True),
    "hello": Verb(Nothing, PoolInfo, of_run=False),
    "status": Verb(Nothing, PoolStatus, of_run=False),
    "load_version": Verb(LoadVersion, Nothing, of_run=False),
    "serve": Verb(Generate, Generated, item=Chunks, of_run=False),
    "evict": Verb(Evict, Nothing, of_run=False),
    "shutdown": Verb(Nothing, Nothing, of_run=False),
}


class Call(Struct, frozen=True):
    """`id` is the connection's; answers carry it."""

    id: int
    verb: str
    args: Any
    run: str = ""
    attempt: int = 0
    seq: int = 0


class Answer(Struct, frozen=True):
    """body: an item or result of the verb, or an error as of `lorad.errors.to_wire`."""

    id: int
    kind: Literal["item", "result", "error"]
    body: Any
