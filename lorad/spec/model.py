"""The spec: the YAML that a user writes, frozen and checked once; unknown keys are refused.

Every value is checked here as far as the value alone tells (types, ranges, names); what needs the disk (model, data,
reward) is checked by the preflight. Readers never see a key rewritten: derived values are properties.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from lorad.errors import SpecError
from lorad.spec.errors import advice, readable, without, without_unknown

COUNT_LIMIT = 2**31 - 1
Positive = Annotated[int, Meta(gt=0, le=COUNT_LIMIT)]
NonNegative = Annotated[int, Meta(ge=0, le=COUNT_LIMIT)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Probability = Annotated[float, Meta(ge=0, lt=1)]
Temperature = Annotated[float, Meta(ge=0.01)]  # below, scores divided by it overflow
LEAST_MEMORY = 64 << 20  # bytes, of a process of user code
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z"
MOST_ERRORS = 20  # that are found at once


class Part(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A section of the spec."""


class Model(Part, frozen=True):
    """`path`: `builtin:tiny`, a local Hugging Face directory, or a hub id."""

    path: str = "builtin:tiny"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class Lora(Part, frozen=True):
    """Scale is alpha / rank, or alpha / sqrt(rank) with `rslora` (Kalajdzievski, 2023). type, in Megatron's words:
    with `lora` q, k and v share one A, and gate and up; where linears are not fused (builtin, fsdp) none do."""

    rank: Positive = 16
    alpha: PositiveFloat = 32
    dropout: Probability = 0.0
    target_modules: str | list[str] = "all-linear"
    exclude_modules: str | list[str] = msgspec.field(default_factory=lambda: ["lm_head"])
    init: Literal["kaiming", "xavier", "normal", "zero"] = "kaiming"
    rslora: bool = False
    type: Literal["lora", "canonical_lora"] = "canonical_lora"
    adapter_path: str | None = None

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class Kl(Part, frozen=True):
    """Penalty towards a reference; estimators k1, k2, k3 of Schulman, "Approximating KL divergence".

    reference: `start`, the adapter that the run starts from; `base` (adapter off); `run@number`; or a PEFT directory.
    None: start for a run with lora.adapter_path and for a fork, as in TRL; else base.
    """

    coef: NonNegativeFloat = 0.0
    type: Literal["k1", "k2", "k3"] = "k3"
    reference: Annotated[str, Meta(min_length=1)] | None = None


class Algorithm(Part, frozen=True):
    """GRPO (Shao et al., 2024, DeepSeekMath) with its usual switches."""

    name: Literal["grpo"] = "grpo"
    group_size: Annotated[int, Meta(ge=2)] = 8
    clip: tuple[NonNegativeFloat, NonNegativeFloat] = (0.2, 0.2)
    kl: Kl = Kl()
    epochs: Positive = 1
    minibatches: Positive = 1
    advantage: Literal["std", "mean"] = "std"  # std: (r - mean) / std; mean: r - mean (Dr. GRPO)
    loss_level: Literal["token", "sequence"] = "token"
    drop_zero_variance: bool = True
    skip_empty_updates: bool = True  # without a gradient nothing changes: not Adam's moments, weights nor the version
    importance_cap: PositiveFloat | None = None  # truncated importance sampling; None: off, 2 with max_staleness


class Data(Part, frozen=True):
    """Where prompts come from: a builtin task, a JSONL or Parquet file, or a hub dataset.

    `chat_template_kwargs` are further variables of the model's chat template (`{enable_thinking: false}`); `system` is
    the system prompt of chats that do not bring their own.
    """

    train: str = "sort"
    eval: str | None = None  # None: the held-out split of a builtin task; files: no eval
    prompts_per_step: Positive = 16
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    max_prompt_tokens: Positive = 512  # as the default: or as many as the model has room for
    too_long: Literal["drop", "truncate"] = "drop"
    chat_template: Literal["auto", "never"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    system: str | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.chat_template == "never" and (self.chat_template_kwargs or self.system):
            raise ValueError("system and chat_template_kwargs need the chat template, and chat_template is never")


class RewardSpec(Part, frozen=True):
    """`name` is a builtin (`exact_match`, `gsm8k`, `regex`) or `path/to/module.py:function`. env: variables that user
    code finds beside those that every program needs: no secret is there unless it is named. memory: bytes, or as in
    4GiB, for each process of user code; None: half of the machine's."""

    name: str = "exact_match"
    pattern: str | None = None  # for `regex`
    timeout: PositiveFloat = 10.0  # seconds for one sample
    retries: Annotated[int, Meta(ge=0, le=10)] = 1  # how often a sample whose reward failed is scored again
    max_failures: Annotated[float, Meta(ge=0, le=1)] = 0.3  # above this share of failed samples in a step the run ends

    env: list[Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]] = []
    memory: int | str | None = None

    def __post_init__(self) -> None:
        if self.pattern is not None and self.name != "regex":
            raise ValueError(f"pattern is for regex, not for {self.name}")
        if self.memory is not None and self.memory_bytes < LEAST_MEMORY:
            raise ValueError(f"memory is at least {LEAST_MEMORY >> 20}MiB: Python itself needs that")

    @property
    def memory_bytes(self) -> int:
        """0: it is not told. Raises ValueError."""
        return bytes_of(self.memory) if isinstance(self.memory, str) else self.memory or 0


class Trainer(Part, frozen=True):
    """AdamW (Loshchilov & Hutter, 2019). tp, pp, cp, dp: ranks along Megatron's axes; ep spreads experts over ranks
    that are there already. backend_args: settings of the backend itself, for those that have ranks (fsdp, megatron)."""

    backend: str = "builtin"
    lr: NonNegativeFloat = 1e-3
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    schedule_steps: Positive | None = None  # horizon of linear and cosine; None: `steps`
    warmup_steps: NonNegative = 0
    min_lr: NonNegativeFloat = 0.0
    steps: Positive = 60
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: NonNegativeFloat = 1.0  # 0: no clipping
    max_skipped_steps: Positive = 3  # in a row, for a loss or gradient that is not finite; then the run ends
    tokens_per_microbatch: Positive = 16384
    activation_checkpointing: bool = False  # recompute activations in the backward: less memory, more time
    tp: Positive = 1
    pp: Positive = 1
    dp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    backend_args: dict[str, Any] = {}

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


class Rollout(Part, frozen=True):
    """How completions are sampled. For backends that are servers (sglang, vllm), `servers` are started, each with the
    whole model on `tp` devices, and prompts are spread over them; `engine_args` are flags for them. Or `url` names
    servers that the user runs (`http://host:port` or `unix:/path`); `key_file` holds their API key, `admin_key_file` a
    second one for routes that change a server, where it has one."""

    backend: str = "builtin"
    max_new_tokens: Positive = 16
    temperature: Temperature = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0  # 0: all
    stop: list[Annotated[str, Meta(min_length=1)]] = []
    servers: Positive = 1
    tp: Positive = 1
    url: str | Annotated[list[str], Meta(min_length=1)] | None = None
    key_file: str | None = None
    admin_key_file: str | None = None
    engine_args: dict[str, Any] = {}
    max_staleness: Annotated[int, Meta(ge=0, le=16)] = 0  # steps that sampling may run ahead of training

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else tuple(self.url or ())


class Eval(Part, frozen=True):
    """Greedy evaluation on held-out problems, before training, every `every` steps and at the end (0: never)."""

    every: NonNegative = 10
    problems: Positive = 256


class Checkpoint(Part, frozen=True):
    """A checkpoint every `every` steps and at the end; the newest `keep` stay, with 0 all."""

    every: Positive = 10
    keep: NonNegative = 3
    keep_versions: NonNegative = 64  # files of the newest versions that stay though nothing refers to them; 0: all
    keep_samples: NonNegative = 1000  # steps whose samples stay; 0: all


class Pool(Part, frozen=True):
    """How trainer and engine share devices. fused: one process and one copy of the base, for the builtin backends.

    Else resident: both stay loaded; timesliced: a server sleeps while the trainer trains, and a trainer with ranks
    gives its memory back while the server works. auto: fused where that is possible; resident with the builtin engine,
    on a CPU, and for servers that the user runs; else timesliced.
    """

    mode: Literal["auto", "fused", "resident", "timesliced"] = "auto"
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.85
    threads: Positive | None = None  # compute threads on the CPU; None: chosen, see lorad/box/runtime.py


class Resources(Part, frozen=True):
    """What the run needs and how it is treated. devices: GPUs; None: as many as the backends need. priority: who waits
    less, in the queue and for turns in a pool. preemptible: runs of higher priority may stop it at a step and take its
    place. max_restarts: automatic ones in all. exclusive: no other run is in its pool while it works."""

    devices: Annotated[int, Meta(ge=1, le=64)] | None = None
    priority: Annotated[int, Meta(ge=-COUNT_LIMIT, le=COUNT_LIMIT)] = 0
    preemptible: bool = True
    restart: Literal["never", "on-failure"] = "never"
    max_restarts: NonNegative = 20
    exclusive: bool = False


class Attest(Part, frozen=True):
    """How a load is attested; amplified_every: see `Open` in lorad/protocol/calls.py."""

    canaries: Annotated[int, Meta(ge=4, le=256)] = 8
    tokens: Annotated[int, Meta(ge=8, le=256)] = 24
    amplified_every: NonNegative = 10


class Spec(Part, frozen=True):
    """One run, as the user wants it."""

    name: Annotated[str, Meta(pattern=NAME)] | None = None
    seed: Seed = 0
    deterministic: bool | None = None  # no batch is shared with other calls: bit for bit the same; None: on a CPU
    model: Model = Model()
    lora: Lora = Lora()
    algorithm: Algorithm = Algorithm()
    data: Data = Data()
    reward: str | RewardSpec = "exact_match"
    trainer: Trainer = Trainer()
    rollout: Rollout = Rollout()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    pool: Pool = Pool()
    resources: Resources = Resources()
    attest: Attest = Attest()

    @property
    def reward_spec(self) -> RewardSpec:
        return RewardSpec(name=self.reward) if isinstance(self.reward, str) else self.reward

    @property
    def gpus(self) -> int:
        """How many the run takes where there are any: trainer and engine share them."""
        return self.resources.devices or max(self.trainer.ranks, self.rollout.tp * self.rollout.servers)


def bytes_of(text: str) -> int:
    """`4GiB` or `4GB` -> 4 << 30. Raises ValueError."""
    found = re.fullmatch(r"([0-9]{1,15}) ?(?:([KMGT])i?B?)?", text.strip())
    if found is None:
        raise ValueError(f"memory is a number of bytes, or like 4GiB, not {text!r}")
    return int(found[1]) << 10 * (" KMGT".index(found[2]) if found[2] else 0)


def convert(data: Any) -> Spec:
    """The spec of a plain mapping.

    Raises SpecError that blames a key (`lora.rank: Expected int >= 1`), with all that is wrong besides in `others`; an
    unknown key comes with the nearest known one.
    """
    if not isinstance(data, dict):
        raise SpecError(f"a spec is a mapping of keys, not {type(data).__name__}", hint="See `lorad init` for one.")
    known, wrong = without_unknown(data, Spec)
    rest: dict[str, Any] | None = known
    while rest is not None and len(wrong) < MOST_ERRORS:
        try:
            spec = msgspec.convert(rest, Spec)
            break
        except msgspec.ValidationError as error:
            refused = readable(str(error))
            refused.hint = advice(Spec, refused.key)
            wrong.append(refused)
            rest = without(rest, refused.key.split("."))
    if wrong:
        wrong[0].others = tuple(wrong[1:])
        raise wrong[0]
    return spec


def fitted(spec: Spec, positions: int) -> Spec:
    """With prompts that a model of so many positions has room for: the default of data.max_prompt_tokens gives way.

    Raises SpecError when a prompt and its completion do not fit.
    """
    given, new = spec.data.max_prompt_tokens, spec.rollout.max_new_tokens
    if given + new <= positions:
        return spec
    if new >= positions:
        raise SpecError(
            f"{new} leaves no room for a prompt in the {positions} positions of the model",
            key="rollout.max_new_tokens",
            hint=f"Set it to {positions // 2} or less.",
        )
    if given != Data().max_prompt_tokens:
        raise SpecError(
            f"{given} with rollout.max_new_tokens {new} is {given + new} tokens, the model has {positions} positions",
            key="data.max_prompt_tokens",
            hint=f"Lower one of the two; without data.max_prompt_tokens it is {positions - new}.",
        )
    return replace(spec, data=replace(spec.data, max_prompt_tokens=positions - new))


def to_json(spec: Spec) -> bytes:
    """The resolved spec, canonical: equal specs give equal bytes."""
    return msgspec.json.encode(spec)
