"""The spec: the YAML that a user writes, frozen and checked once; unknown keys are refused.

What a key means stands once, under `Attributes:` of its section: the form of the TUI and docs/spec.md show
it.

Every value is checked here as far as the value alone shows (types, ranges, names); what needs the disk
(model, data, reward) is checked by the preflight. Readers never see a key rewritten: derived values are
properties.
"""

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from lorad.errors import SpecError
from lorad.spec.algorithm import Algorithm
from lorad.spec.env import EnvSpec
from lorad.spec.errors import advice, readable, without, without_unknown
from lorad.spec.numbers import (
    COUNT_LIMIT,
    Loggers,
    NonNegative,
    NonNegativeFloat,
    Part,
    Positive,
    PositiveFloat,
    Seed,
)
from lorad.spec.user_code import EnvName, memory_bytes

_Probability = Annotated[float, Meta(ge=0, lt=1)]
_Temperature = Annotated[float, Meta(ge=0.01)]  # below, scores divided by it overflow
DataFormat = Literal["auto", "messages", "completion", "preference", "labels"]
_LABEL = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}\Z"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z"
_MOST_ERRORS = 20  # that are found at once


class Model(Part, frozen=True):
    """The base model.

    Attributes:
        path: `builtin:tiny`, a local Hugging Face directory, or a hub id, perhaps with `@revision`.
        dtype: type of the base's weights; auto is the checkpoint's own.
    """

    path: str = "builtin:tiny"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class Lora(Part, frozen=True):
    """The adapter. Its scale is alpha / rank, or alpha / sqrt(rank) with `rslora` (Kalajdzievski, 2023).

    Attributes:
        rank: rank of A and B.
        alpha: numerator of the scale.
        dropout: probability with which an input of A is dropped in training.
        target_modules: `all-linear`, or names in Hugging Face's or Megatron's words, as a list or with
            commas; wildcards with `*` are allowed.
        exclude_modules: names that are left out of the targets, written in the same way.
        init: how A starts; B starts at zero.
        rslora: true scales by alpha / sqrt(rank).
        type: Megatron's word for who has an A. With `lora` q, k and v share one, and gate and up; with
            `canonical_lora` each linear has its own. Where linears are not fused (builtin, fsdp) both mean
            the latter.
        adapter_path: a PEFT directory that the run starts from.
    """

    rank: Positive = 16
    alpha: PositiveFloat = 32
    dropout: _Probability = 0.0
    target_modules: str | list[str] = "all-linear"
    exclude_modules: str | list[str] = msgspec.field(default_factory=lambda: ["lm_head"])
    init: Literal["kaiming", "xavier", "normal", "zero"] = "kaiming"
    rslora: bool = False
    type: Literal["lora", "canonical_lora"] = "canonical_lora"
    adapter_path: str | None = None

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class Data(Part, frozen=True):
    """Where prompts come from, and completions where those are trained on.

    Attributes:
        train: a builtin task (`sort`, `reverse`, `lookup`), a file of rows (.jsonl,
            .parquet, .csv, .json), or a hub dataset.
        eval: held-out problems, named in the same way. null is the held-out split of a builtin task, and no
            evaluation for a file.
        prompts_per_step: prompts of a step; each is sampled algorithm.group_size times. With sft and dpo it
            is the number of rows of a step.
        format: what a row of sft or dpo is. messages is a chat, of which every assistant turn is trained;
            completion is a prompt and a completion, each as text or as messages. Of dpo: preference is a
            chosen and a rejected completion, with a prompt or as whole chats, whose common turns are the
            prompt then; labels is a prompt, a completion, and true or false. auto looks at the first row.
        prompt_key: column that holds the prompt; `a.b` is the key b of the column a, here and below.
        completion_key: column that holds the completion.
        messages_key: column that holds the chat.
        chosen_key: column that holds the chosen completion.
        rejected_key: column that holds the rejected completion.
        label_key: column that says whether a completion is desired.
        answer_key: column of the answer; by default also where rows for verl and SkyRL have it.
        max_prompt_tokens: longest prompt, in tokens; the default gives way where the model has less room.
        max_sample_tokens: longest sample of sft and dpo, prompt and completion together, in tokens; the
            default gives way where the model has less room.
        too_long: drop or truncate longer prompts; with sft and dpo, longer samples.
        chat_template: auto uses the tokenizer's chat template where it has one.
        chat_template_kwargs: further variables of the chat template, such as `{enable_thinking: false}`.
        system: system prompt of chats that do not bring their own.
        shuffle: shuffle the rows.
    """

    train: str = "sort"
    eval: str | None = None
    prompts_per_step: Positive = 16
    format: DataFormat = "auto"
    prompt_key: str = "prompt"
    completion_key: str = "completion"
    messages_key: str = "messages"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    label_key: str = "label"
    answer_key: str = "answer"
    max_prompt_tokens: Positive = 512
    max_sample_tokens: Positive = 2048
    too_long: Literal["drop", "truncate"] = "drop"
    chat_template: Literal["auto", "never"] = "auto"
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    system: str | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.chat_template == "never" and (self.chat_template_kwargs or self.system):
            raise ValueError(
                "system and chat_template_kwargs need the chat template, and chat_template is never"
            )


class RewardSpec(Part, frozen=True):
    """How samples are scored; a name alone stands for `{name: …}`.

    Attributes:
        name: `exact_match`, `gsm8k`, `math`, `regex`, or `path/to/file.py:function`.
        label: name of its curve where there are several rewards; null is the function's name.
        weight: what it is multiplied with.
        pattern: the regular expression of `regex`.
        timeout: seconds for one call of the function: for a sample, or for all that a function of lists gets.
        retries: how often a sample whose reward failed is scored again.
        max_failures: share of failed samples in a step above which the run ends; 1 is never. Of several
            rewards, the least counts.
        workers: processes of user code at most; null is one for each core, up to 8.
        concurrency: calls under way in each process, of an `async def`.
        batch_size: samples that a function of lists gets at once, at least; always whole groups. null is one
            group.
        python: interpreter that runs user code, with packages of its own, from Python 3.10 on; null is
            lorad's.
        env: variables that user code finds beside those that every program needs; no secret is there unless
            named here.
        memory: limit of each process of user code, in bytes or as in `4GiB`; null is half of the machine's
            memory.
    """

    name: str = "exact_match"
    label: Annotated[str, Meta(pattern=_LABEL)] | None = None
    weight: float = 1.0
    pattern: str | None = None
    timeout: PositiveFloat = 10.0
    retries: Annotated[int, Meta(ge=0, le=10)] = 1
    max_failures: Annotated[float, Meta(ge=0, le=1)] = 0.3
    workers: Annotated[int, Meta(ge=1, le=256)] | None = None
    concurrency: Annotated[int, Meta(ge=1, le=4096)] = 64
    batch_size: Positive | None = None
    python: str | None = None
    env: list[EnvName] = msgspec.field(default_factory=list)
    memory: int | str | None = None

    def __post_init__(self) -> None:
        if self.pattern is not None and self.name != "regex":
            raise ValueError(f"pattern is for regex, not for {self.name}")
        if self.python is not None and ":" not in self.name and self.name != "math":
            raise ValueError(f"python is for math and for a function of a file, not for {self.name}")
        if not math.isfinite(self.weight):
            raise ValueError("weight is no number")
        memory_bytes(self.memory)

    @property
    def curve(self) -> str:
        """Return the name of its component where there are several rewards."""
        return self.label or self.name.rpartition(":")[2]

    @property
    def memory_bytes(self) -> int:
        """Return the limit of `memory`; 0 where none is given."""
        return memory_bytes(self.memory)


class Trainer(Part, frozen=True):
    """The trainer and its optimizer, AdamW (Loshchilov & Hutter, 2019).

    Attributes:
        backend: `builtin`, `fsdp`, `megatron`, or a name of config.yaml.
        lr: learning rate; null chooses one for the size of the model, its family and the algorithm when the
            run is made.
        schedule: how the learning rate falls after the warm-up.
        schedule_steps: horizon of linear and cosine, in steps; null is the `steps` of the first attempt.
        warmup_steps: steps over which the learning rate rises to lr.
        min_lr: learning rate where linear and cosine end.
        steps: steps of the run.
        betas: decay rates of Adam's two moments.
        eps: Adam's epsilon.
        weight_decay: decoupled weight decay.
        max_grad_norm: norm to which gradients are clipped; 0 does not clip.
        max_skipped_steps: steps in a row whose loss or gradient is not finite, after which the run ends.
        tokens_per_microbatch: tokens of one forward and backward pass.
        activation_checkpointing: recompute activations in the backward pass, for less memory and more time.
        tp: tensor-parallel ranks (megatron).
        pp: pipeline-parallel ranks (megatron).
        dp: data-parallel ranks (fsdp, megatron).
        cp: context-parallel ranks; more than one is not supported.
        ep: spreads experts over ranks that are there already (megatron).
        backend_args: settings of the backend itself, for those that have ranks (fsdp, megatron).
    """

    backend: str = "builtin"
    lr: NonNegativeFloat | None = None
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    schedule_steps: Positive | None = None
    warmup_steps: NonNegative = 0
    min_lr: NonNegativeFloat = 0.0
    steps: Positive = 60
    betas: tuple[_Probability, _Probability] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: NonNegativeFloat = 1.0
    max_skipped_steps: Positive = 3
    tokens_per_microbatch: Positive = 16384
    activation_checkpointing: bool = False
    tp: Positive = 1
    pp: Positive = 1
    dp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    backend_args: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


class Rollout(Part, frozen=True):
    """How completions are sampled.

    Attributes:
        backend: `builtin`, `sglang`, `vllm`, or a name of config.yaml.
        max_new_tokens: longest completion, in tokens.
        temperature: sampling temperature.
        top_p: smallest set of tokens with this probability that is sampled from; 1 is all.
        top_k: number of likeliest tokens that are sampled from; 0 is all.
        stop: texts that end a completion.
        servers: servers that are started (sglang, vllm), each with the whole model; prompts are spread over
            them.
        tp: devices of each server.
        url: a server that you run, or a list of several (`http://host:port` or `unix:/path`).
        key_file: file that holds the API key of those servers.
        admin_key_file: file that holds a second key, for routes that change a server, where it has one.
        engine_args: flags of the servers that lorad starts, without their dashes.
        max_staleness: steps that sampling may run ahead of training.
    """

    backend: str = "builtin"
    max_new_tokens: Positive = 16
    temperature: _Temperature = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    stop: list[Annotated[str, Meta(min_length=1)]] = msgspec.field(default_factory=list)
    servers: Positive = 1
    tp: Positive = 1
    url: str | Annotated[list[str], Meta(min_length=1)] | None = None
    key_file: str | None = None
    admin_key_file: str | None = None
    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    max_staleness: Annotated[int, Meta(ge=0, le=16)] = 0

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else tuple(self.url or ())


class Eval(Part, frozen=True):
    """Greedy evaluation on held-out problems, before training, during it and at the end.

    Attributes:
        every: steps between two evaluations; 0 is never.
        problems: how many problems are evaluated.
    """

    every: NonNegative = 10
    problems: Positive = 256


class Checkpoint(Part, frozen=True):
    """Checkpoints during the run and at its end, and what stays of its files.

    Attributes:
        every: steps between two checkpoints.
        keep: newest checkpoints that stay; 0 is all.
        keep_versions: newest versions whose files stay though nothing refers to them; 0 is all.
        keep_samples: newest steps whose samples stay; 0 is all.
    """

    every: Positive = 10
    keep: NonNegative = 3
    keep_versions: NonNegative = 64
    keep_samples: NonNegative = 1000


class Pool(Part, frozen=True):
    """How trainer and engine share devices.

    Attributes:
        mode: fused is one process and one copy of the base, for the builtin backends. resident keeps both
            loaded. timesliced puts a server to sleep while the trainer trains, and a trainer with ranks gives
            its memory back while the server works. auto is fused where that is possible; resident with the
            builtin engine, on a CPU, and for servers that you run; otherwise timesliced.
        memory_fraction: share of the device's memory that the pool may take.
        threads: compute threads on the CPU; null chooses them for the model and the machine.
    """

    mode: Literal["auto", "fused", "resident", "timesliced"] = "auto"
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.85
    threads: Positive | None = None


class Resources(Part, frozen=True):
    """What the run needs, and how it is treated.

    Attributes:
        devices: GPUs; null is as many as the backends need, one for each rank.
        priority: a run with a higher one waits less, in the queue and for turns in a pool.
        preemptible: runs of higher priority may stop it at a step and take its place; it continues when there
            is room.
        restart: on-failure resumes the run by itself, a few times.
        max_restarts: automatic restarts since the last start or resume by hand.
        exclusive: no other run is in its pool while it runs.
    """

    devices: Annotated[int, Meta(ge=1, le=64)] | None = None
    priority: Annotated[int, Meta(ge=-COUNT_LIMIT, le=COUNT_LIMIT)] = 0
    preemptible: bool = True
    restart: Literal["never", "on-failure"] = "never"
    max_restarts: NonNegative = 20
    exclusive: bool = False


class Attest(Part, frozen=True):
    """How the load of a version is attested.

    Attributes:
        canaries: short texts of the base on which engine and trainer are compared.
        tokens: tokens of each of these texts.
        amplified_every: publishes between two amplified attestations; 0 is none but the first.
    """

    canaries: Annotated[int, Meta(ge=4, le=256)] = 8
    tokens: Annotated[int, Meta(ge=8, le=256)] = 24
    amplified_every: NonNegative = 10


class Spec(Part, frozen=True):
    """One run, as the user wants it.

    Attributes:
        name: the run's name; null makes one up.
        seed: where all random numbers of the run begin.
        deterministic: no batch is shared with other calls, and shapes and threads are fixed, so that the same
            run gives the same bits. null is true on a CPU.
        algorithm: what is trained on: the name of an algorithm, or a mapping with name and settings.
        reward: how samples are scored: the name of a reward, or a mapping with name and settings; or a list
            of these, whose weighted sum it is.
        env: the environment that samples are played in: its name, or a mapping with name and settings.
        loggers: where its figures are written: `tensorboard`, `wandb`, `mlflow` or a plug-in, by name or with
            settings (docs/loggers.md); null is `loggers` of config.yaml.
    """

    name: Annotated[str, Meta(pattern=NAME)] | None = None
    seed: Seed = 0
    deterministic: bool | None = None
    model: Model = Model()
    lora: Lora = Lora()
    algorithm: Algorithm = Algorithm()
    data: Data = Data()
    reward: str | RewardSpec | Annotated[list[str | RewardSpec], Meta(min_length=1)] = "exact_match"
    env: EnvSpec = EnvSpec()
    trainer: Trainer = Trainer()
    rollout: Rollout = Rollout()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    pool: Pool = Pool()
    resources: Resources = Resources()
    attest: Attest = Attest()
    loggers: Loggers | None = None

    def __post_init__(self) -> None:
        curves = [reward.curve for reward in self.rewards]
        if twice := sorted({curve for curve in curves if curves.count(curve) > 1}):
            raise ValueError(f"two rewards are called {twice[0]}: give one of them another label")

    @property
    def rewards(self) -> list[RewardSpec]:
        given = self.reward if isinstance(self.reward, list) else [self.reward]
        return [RewardSpec(name=one) if isinstance(one, str) else one for one in given]

    @property
    def max_failures(self) -> float:
        """Return the share of samples that may be without a reward."""
        return min(reward.max_failures for reward in self.rewards)

    @property
    def gpus(self) -> int:
        """Return how many GPUs the run takes where there are any: trainer and engine share them."""
        return self.resources.devices or max(self.trainer.ranks, self.rollout.tp * self.rollout.servers)


def convert(data: Any) -> Spec:
    """Return the spec of a plain mapping.

    Raises SpecError that blames a key (`lora.rank: Expected int >= 1`), with all that is wrong besides in
    `others`; an unknown key comes with the nearest known one.
    """
    if not isinstance(data, dict):
        raise SpecError(
            f"a spec is a mapping of keys, not {type(data).__name__}", hint="See `lorad init` for one."
        )
    names = {key: {"name": data[key]} for key in ("algorithm", "env") if isinstance(data.get(key), str)}
    data = {**data, **names} | ({"env": {}} if data.get("env", {}) is None else {})
    known, wrong = without_unknown(data, Spec)
    rest: dict[str, Any] | None = known
    while rest is not None and len(wrong) < _MOST_ERRORS:
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
    """Lower the defaults of data.max_prompt_tokens and max_sample_tokens so that prompts and samples fit a
    model of so many positions.

    Raises SpecError when a prompt and its completion do not fit.
    """
    if (most := spec.env.max_tokens or positions) > positions:
        raise SpecError(
            f"{most} is more than the {positions} positions of the model",
            key="env.max_tokens",
            hint=f"Set it to {positions} or less.",
        )
    spec = replace(spec, env=replace(spec.env, max_tokens=most)) if spec.env.name else spec
    if spec.data.max_sample_tokens > positions:
        if spec.data.max_sample_tokens != Data().max_sample_tokens:
            raise SpecError(
                f"{spec.data.max_sample_tokens} is more than the {positions} positions of the model",
                key="data.max_sample_tokens",
                hint=f"Set it to {positions} or less.",
            )
        spec = replace(spec, data=replace(spec.data, max_sample_tokens=positions))
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
            f"{given} with rollout.max_new_tokens {new} is {given + new} tokens, the model has {positions} "
            "positions",
            key="data.max_prompt_tokens",
            hint=f"Lower one of the two; without data.max_prompt_tokens it is {positions - new}.",
        )
    return replace(spec, data=replace(spec.data, max_prompt_tokens=positions - new))


def to_json(spec: Spec) -> bytes:
    """Return the resolved spec, canonical: equal specs give equal bytes."""
    return msgspec.json.encode(spec)
