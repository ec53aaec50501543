"""What a pool is and does now, the answers to `hello` and `status`, and the file of who used it how much."""

import zlib
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from lorad.protocol.nodes import PlacedNode


class PoolInfo(Struct, frozen=True):
    """The parts of a pool, and what they can do.

    base_checksum: sha256 over the base's weights as the trainer held them after loading. Trainers that hold
        them differently (sharded, fused) have other checksums.
    model_sha256: sha256 over the weight files, the same for all trainers.
    parameters: number of parameters of the base; 0 where it is not known.
    experts: how many a layer of the base has; 0: it is no mixture.
    teacher, teacher_sha256: the model that is held beside it for its log-probabilities, and its weight files;
        "" for none.
    losses: what its trainer knows of `LOSSES` in lorad/protocol/batch.py.
    ranks: whether its engine gives log-probabilities of texts (`rank`).
    formats: whether its engine can follow a JSON schema.
    routes: whether its engine says the routes of tokens, and its trainer replays them.
    nodes: the machines of its ranks, in their order; none where all are on this one.
    products: which forms its products have, see `lorad/models/products/choices.py`; "" by the rule.
    """

    pool: str
    pid: int
    model: str  # the spec's name for it
    model_path: str
    base_checksum: str
    trainer: str
    engine: str
    mode: str
    device: str
    dtype: str
    threads: int
    max_tokens: int
    versions: dict[str, str]  # versions of software: lorad, torch, the backends
    model_sha256: str = ""
    parameters: int = 0
    experts: int = 0
    losses: tuple[str, ...] = ()
    teacher: str = ""
    teacher_sha256: str = ""
    ranks: bool = False
    formats: bool = False
    routes: bool = False
    nodes: tuple[PlacedNode, ...] = ()
    products: str = ""


class TenantStatus(Struct, frozen=True):
    """A run in a pool.

    phase: the verb in progress, or `idle`.
    bytes: size of its slot.
    waited: seconds that it has waited since it was opened, see `Stepped`.
    """

    run: str
    attempt: int
    phase: str
    parameters: int
    bytes: int = 0
    waited: float = 0.0


class Capacity(Struct, frozen=True):
    """What runs may still take of a pool. Bytes count slots (weights, gradients, Adam) and loaded versions.

    versions: how many are loaded or about to be, of at most max_versions.
    memory: bytes for slots and versions in all; 0 where it is not known.
    """

    max_versions: int
    versions: int
    max_rank: int
    memory: int = 0
    memory_used: int = 0


class EngineStatus(Struct, frozen=True):
    """The state of an engine; None stands for what it does not report.

    alive: False when the pool has to be restarted.
    running: how many samples are being decoded.
    slots: distinct versions in one batch, without the base.
    prefix_hits: the share of the last minute's prompt tokens whose keys and values were cached.
    cache_used: the share of the memory for keys and values that is in use.
    adapters_per_step: the median number of distinct versions in the last decode steps that had any.
    """

    alive: bool
    asleep: bool
    running: int
    waiting: int
    slots_used: int | None = None
    slots: int | None = None
    prefix_hits: float | None = None
    cache_used: float | None = None
    detail: str = ""
    adapters_per_step: float | None = None


class TrainerStatus(Struct, frozen=True):
    """The state of a trainer, see `TrainerHealth` in lorad/trainers/base.py.

    here: its base is on its devices, not in host memory.
    """

    alive: bool
    detail: str = ""
    here: bool = True
    memory: int | None = None
    memory_peak: int | None = None


class PoolStatus(Struct, frozen=True):
    """The present work of a pool. Rates cover the last seconds.

    engine, trainer: None until the pool reports them.
    kept: see `LoadVersion`.
    """

    info: PoolInfo
    tenants: list[TenantStatus]
    loaded: list[str]
    engine_tokens_per_second: float
    trainer_tokens_per_second: float
    rss_bytes: int
    idle_seconds: float  # since the last call of a run; 0 while one is under way
    engine: EngineStatus | None = None
    trainer: TrainerStatus | None = None
    kept: list[str] = []
    capacity: Capacity | None = None


USES = "usage.jsonl"
"""The file of a pool's life, beside its log: lines of a checksum (crc32, 8 hex digits), a space and a `Uses`.
Each line has what changed since the one before, so of several lines about an entry the last one counts.
"""
_Name = Annotated[str, Meta(max_length=256)]
_Entry = Annotated[int, Meta(ge=0, lt=1 << 20)]
_Hour = Annotated[int, Meta(ge=0, lt=4 * 10**9)]
_Count = Annotated[int, Meta(ge=0, lt=2**62)]
_Amount = Annotated[float, Meta(ge=0, lt=1e15)]


class Use(Struct):
    """What one payer (see `lorad/models/turns.py`) has used of a pool within an hour, so far.

    entry: its number in the life of the pool.
    hour: Unix time of its beginning.
    run: "" for nobody: the pool is warm and nobody has a slot, it starts, or works for itself.
    attempt: 0 for what others were served of a version of the run.
    step: the run's newest checkpoint, or where the attempt began; what comes later is lost with the attempt
        unless there is another checkpoint.
    held: device-seconds in which it was busy, and its equal part, among all who have a slot, of those in
        which nobody was.
    busy: device-seconds that its work took; where several overlap, an equal part.
    generated, served: tokens that were sampled for the run, and for others.
    trained: tokens with a target.
    prompts, cached: tokens of prompts, and those of them that were not computed again.
    joules: None where nothing measures them.
    memory: most bytes of its slot; of nobody, those of the pool.
    """

    entry: _Entry
    hour: _Hour
    run: _Name = ""
    attempt: _Count = 0
    step: _Count = 0
    alias: _Name = ""
    held: _Amount = 0.0
    busy: _Amount = 0.0
    generated: _Count = 0
    trained: _Count = 0
    served: _Count = 0
    prompts: _Count = 0
    cached: _Count = 0
    joules: _Amount | None = None
    memory: _Count = 0


class Uses(Struct, frozen=True):
    """A line of the file.

    life: a name that no other life of a pool has.
    device: the name of the devices, `cpu` where there is none.
    since: Unix time at which the life began.
    at: Unix time of the line.
    """

    life: _Name
    pool: _Name
    device: _Name
    devices: Annotated[int, Meta(ge=1, le=4096)]
    since: _Amount
    at: _Amount
    uses: list[Use]


def encode_uses(uses: Uses) -> bytes:
    """Encode a line of the file."""
    text = msgspec.json.encode(uses)
    return b"%08x %s\n" % (zlib.crc32(text), text)


def decode_uses(line: bytes) -> Uses | None:
    """Decode a line of the file; None when it is torn or damaged."""
    checksum, _, text = line.rpartition(b"\n")[0].partition(b" ")
    try:
        return msgspec.json.decode(text, type=Uses) if int(checksum, 16) == zlib.crc32(text) else None
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return None
