"""The spec: the YAML that a user writes, frozen and checked once; unknown keys are refused.

What a key means stands once, under `Attributes:` of its section: the TUI's form and docs/spec.md show it.

Every value is checked here as far as the value alone shows (types, ranges, names); what needs the disk
(model, data, reward) is checked by the preflight. Readers never see a key rewritten: derived values are
properties.
"""

from itertools import chain
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from lorad.errors import SpecError
from lorad.spec.algorithm import Algorithm
from lorad.spec.data import SIDES, Data, Side, labels_of, sources_with_own
from lorad.spec.env import VERIFIERS, EnvSpec
from lorad.spec.errors import advice, readable, without, without_unknown
from lorad.spec.kept import EXPECTATIONS, Checkpoint, Eval, Expectation
from lorad.spec.lora import Lora
from lorad.spec.notify import Notify
from lorad.spec.numbers import (
    COUNT_LIMIT,
    NAME,
    Loggers,
    NonNegative,
    Part,
    Positive,
    Seed,
    Tag,
)
from lorad.spec.reward import RewardSpec, rewards_of
from lorad.spec.trainer import Trainer

_Temperature = Annotated[float, Meta(ge=0.01)]  # below, scores divided by it overflow
TAGS = 32  # of a run at most
_MOST_ERRORS = 20  # that are found at once
_SHARED = {"workers": 1, "concurrency": 16}  # of an environment of verifiers
_CHANGES_BASE = ("pissa", "olora")
"""Values of PEFT's init_lora_weights that take what A and B begin with out of the base: PiSSA (Meng et al.,
2024, arXiv 2404.02948) and OLoRA (Büyükakyüz, 2024, arXiv 2406.01775)."""
_WHY_NO_CHANGE = (
    "It changes the base, which runs share; else it is a LoRA of twice the rank, half of it fixed."
)


class Model(Part, frozen=True):
    """The base model.

    Attributes:
        path: `builtin:tiny`, `builtin:tiny-moe`, a local Hugging Face directory, a name that `lorad models`
            lists, or a hub id, perhaps with `@revision`.
        dtype: type of the base's weights; auto is the checkpoint's own on a GPU, and float32 on a CPU, whose
            bfloat16 is slow.
        quantize: rounds the linears once, as they are loaded, to the numbers of a narrow format, for trainer
            and engine alike (not embeddings, head, norms and routers). nf4 is the 4-bit format of QLoRA with
            a scale for 64 numbers, fp8 is e4m3 with a scale for an output row. Needs the builtin or the fsdp
            trainer, and the builtin engine.
    """

    path: str = "builtin:tiny"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quantize: Literal["nf4", "fp8"] | None = None


class Rollout(Part, frozen=True):
    """How completions are sampled.

    Attributes:
        backend: `builtin`, `transformers`, `sglang`, `vllm`, or a name of config.yaml.
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
        routes: how a mixture of experts is trained. record has the engine say which experts it sends each
            token to, and the trainer send it to the same ones (rollout routing replay, R3). auto is record
            where the base is a mixture in bfloat16 and both can.
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
    routes: Literal["auto", "record", "off"] = "auto"

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else tuple(self.url or ())


class Pool(Part, frozen=True):
    """How trainer and engine share devices.

    Attributes:
        mode: fused is one process and one copy of the base, for the builtin backends and for one rank of fsdp
            with the engine over transformers. resident keeps both loaded. timesliced puts a server to sleep
            while the trainer trains, and a trainer with ranks gives its memory back while the server works.
            split gives servers devices of their own, so that some runs sample while others train:
            resources.rollout_devices of this machine, or resources.rollout_nodes of a cluster. auto is split
            with either of them; fused where that is possible; resident with the builtin engine, on a CPU, and
            for servers that you run; otherwise timesliced.
        memory_fraction: share of the device's memory that the pool may take.
        threads: compute threads on the CPU; null chooses them for the model and the machine.
    """

    mode: Literal["auto", "fused", "resident", "timesliced", "split"] = "auto"
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.85
    threads: Positive | None = None


class Resources(Part, frozen=True):
    """What the run needs, and how it is treated.

    Attributes:
        devices: GPUs on all nodes together; null is as many as the backends need, one for each rank.
        rollout_devices: GPUs of this machine besides those, which have servers and no ranks (pool.mode
            split); 0 is as many as the servers need where pool.mode is split. A CPU gives a slot for each
            (`devices.cpu_slots` in config.yaml), and one for the trainer.
        nodes: machines that they are on, as many on each; more than one needs `cluster` in config.yaml.
        rollout_nodes: how many of these nodes have servers and no ranks (pool.mode split).
        where: local is this machine, cluster is `cluster` of config.yaml. any is whichever has room first,
            this machine before the cluster. auto is the cluster for several nodes, and for more GPUs than
            this machine has; otherwise this machine.
        priority: a run with a higher one waits less, in the queue and for turns in a pool.
        preemptible: runs of higher priority may stop it at a step and take its place; it continues when there
            is room.
        yield_to: foreign gives its GPUs back at a step while a process outside of lorad computes on one, and
            continues when they stayed free for a while (`queue.foreign_settle` in config.yaml).
        restart: on-failure resumes the run by itself, a few times.
        max_restarts: automatic restarts since the last start or resume by hand.
        exclusive: no other run is in its pool while it runs.
        group: a name; `lorad groups NAME --limit 2` lets so many of your runs with it work at a time.
    """

    devices: Annotated[int, Meta(ge=1, le=4096)] | None = None
    rollout_devices: Annotated[int, Meta(ge=0, le=4096)] = 0
    nodes: Annotated[int, Meta(ge=1, le=1024)] = 1
    rollout_nodes: Annotated[int, Meta(ge=0, le=1023)] = 0
    where: Literal["auto", "local", "cluster", "any"] = "auto"
    priority: Annotated[int, Meta(ge=-COUNT_LIMIT, le=COUNT_LIMIT)] = 0
    preemptible: bool = True
    yield_to: Literal["foreign"] | None = None
    restart: Literal["never", "on-failure"] = "never"
    max_restarts: NonNegative = 20
    exclusive: bool = False
    group: Annotated[str, Meta(pattern=NAME)] | None = None


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
            run gives the same bits; on a GPU torch is held to kernels that do, in the builtin trainer and
            engine alone (docs/reliability.md). null is true on a CPU. It is false where `env.name` is
            `verifiers:ID` and nothing else is said: such an episode cannot be made again.
        algorithm: what is trained on: the name of an algorithm, or a mapping with name and settings.
        reward: how samples are scored: the name of a reward, or a mapping with name and settings; or a list
            of these, whose weighted sum it is.
        env: the environment that samples are played in: its name, or a mapping with name and settings.
        loggers: where its figures are written: `tensorboard`, `wandb`, `mlflow` or a plug-in, by name or with
            settings (docs/loggers.md); null is `loggers` of config.yaml.
        tags: words of yours to find the run by; `lorad tag` changes them at any time.
        notify: who hears of its start, end, failure and alarms (docs/notify.md); null is `notify` of
            config.yaml.
        expect: figures that it should come to, each with its source; `lorad show` and the end of `lorad run`
            say which were met (docs/evaluation.md).
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
    tags: Annotated[list[Tag], Meta(max_length=TAGS)] = msgspec.field(default_factory=list)
    notify: list[Notify] | None = None
    expect: Annotated[list[Expectation], Meta(max_length=EXPECTATIONS)] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        curves = [reward.curve for reward in self.rewards]
        if twice := sorted({curve for curve in curves if curves.count(curve) > 1}):
            raise ValueError(f"two rewards are called {twice[0]}: give one of them another label")

    @property
    def rewards(self) -> list[RewardSpec]:
        return rewards_of(self.reward)

    @property
    def max_failures(self) -> float:
        """Return the share of samples that may be without a reward, the least of all rewards."""
        sources = [own for own in self.of_sources.values() if own.env.name is None]
        rewards = chain(self.rewards, *(own.rewards for own in sources))
        return min(reward.max_failures for reward in rewards)

    @property
    def of_sources(self) -> "dict[tuple[Side, str], Spec]":
        """Return the spec of each source with an environment or a reward of its own, as it holds for its
        rows.

        Keys are the side of the data, and the label of the rows.
        """
        specs = dict[tuple[Side, str], Spec]()
        for side in SIDES:
            sources = getattr(self.data, side)
            for name, own in sources_with_own(sources).items():
                plain = replace(self.data, train=name, eval=None, args={}, python=None)
                reward = own.reward or "exact_match"
                spec = replace(self, data=plain, env=own.played, reward=reward)
                specs[side, labels_of(sources)[name]] = spec
        return specs

    @property
    def planned_steps(self) -> int:
        """Return after how many optimizer steps the run is over; 0 where its client decides."""
        return 0 if self.algorithm.kind == "tinker" else self.trainer.steps

    @property
    def longest_row(self) -> int:
        """Return the tokens of the longest sample that is trained on, its prompt included."""
        if self.algorithm.kind != "rl":
            return self.data.max_sample_tokens
        envs = [self.env, *(own.env for own in self.of_sources.values())]
        limits = [env.max_tokens for env in envs if env.name is not None and env.max_tokens is not None]
        own = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        return max(limits) if len(limits) == len(envs) else max([own, *limits])

    @property
    def gpus(self) -> int:
        """Return how many GPUs the run takes, which trainer and engine may share."""
        resources = self.resources
        ranks = self.trainer.ranks
        if self.server_devices:
            return (resources.devices or ranks) + self.server_devices
        if resources.devices is not None:
            return resources.devices
        if resources.rollout_nodes:
            return ranks * resources.nodes // max(1, resources.nodes - resources.rollout_nodes)
        return max(ranks, self.rollout.tp * self.rollout.servers)

    @property
    def server_devices(self) -> int:
        """Return how many devices of one machine servers have for themselves; 0 without any of their own."""
        resources = self.resources
        mode = self.pool.mode
        if resources.rollout_nodes or mode not in ("auto", "split"):
            return 0
        return resources.rollout_devices or (self.rollout.tp * self.rollout.servers) * (mode == "split")


def convert(data: Any) -> Spec:
    """Return the spec of a plain mapping.

    Raises SpecError that blames a key (`lora.rank: Expected int >= 1`), with all other errors in `others`; an
    unknown key comes with the nearest known one.
    """
    if not isinstance(data, dict):
        raise SpecError(
            f"a spec is a mapping of keys, not {type(data).__name__}", hint="See `lorad init` for one."
        )
    names = {key: {"name": data[key]} for key in ("algorithm", "env") if isinstance(data.get(key), str)}
    data = _with_own_rows({**data, **names} | ({"env": {}} if data.get("env", {}) is None else {}))
    accepted, wrong = without_unknown(data, Spec)
    rest: dict[str, Any] | None = accepted
    while rest is not None and len(wrong) < _MOST_ERRORS:
        try:
            spec = msgspec.convert(rest, Spec)
            break
        except msgspec.ValidationError as error:
            refused = readable(str(error))
            refused.hint = advice(Spec, refused.key)
            if refused.key == "lora.init" and str(rest["lora"]["init"]).lower().startswith(_CHANGES_BASE):
                refused.hint = f"{_WHY_NO_CHANGE} {refused.hint}"
            wrong.append(refused)
            rest = without(rest, refused.key.split("."))
    if wrong:
        wrong[0].others = tuple(wrong[1:])
        raise wrong[0]
    return spec


def _with_own_rows(data: dict[str, Any]) -> dict[str, Any]:
    """Add what an environment of verifiers implies where nothing else is said.

    It has rows of its own, its episodes cannot be made again, and a process that takes 250 MB to play one
    plays others beside it.
    """
    env = data.get("env")
    rows = data.get("data", {})
    if not isinstance(rows, dict):
        return data
    for side in SIDES:
        sources = rows.get(side)
        for name, share in sources.items() if isinstance(sources, dict) else ():
            settings = share if isinstance(share, dict) else {"weight": share}
            own = settings.get("env", {})
            if str(name).startswith(VERIFIERS) and isinstance(own, dict):
                settings = settings | {"env": {**_SHARED, "name": name, **own}}
                rows = rows | {side: rows[side] | {name: settings}}
                data = {"deterministic": False, **data, "data": rows}
    if not (isinstance(env, dict) and str(env.get("name")).startswith(VERIFIERS)):
        return data
    return {
        "deterministic": False,
        **data,
        "env": {**_SHARED, **env},
        "data": {"train": env["name"]} | rows,
    }


def fitted(spec: Spec, positions: int) -> Spec:
    """Lower the default lengths of prompts and samples so that they fit a model of so many positions.

    Raises SpecError when a prompt and its completion do not fit.
    """
    spec = replace(spec, env=_fitted_env(spec.env, positions, "env"))
    for side in SIDES:
        sources = getattr(spec.data, side)
        for name, own in sources_with_own(sources).items():
            env = _fitted_env(own.played, positions, f"data.{side}: {name}: env")
            sources = sources | ({name: replace(own, env=env)} if own.env is not None else {})
        spec = replace(spec, data=replace(spec.data, **{side: sources}))
    if spec.data.max_sample_tokens > positions:
        if spec.data.max_sample_tokens != Data().max_sample_tokens:
            raise SpecError(
                f"{spec.data.max_sample_tokens} is more than the {positions} positions of the model",
                key="data.max_sample_tokens",
                hint=f"Set it to {positions} or less.",
            )
        spec = replace(spec, data=replace(spec.data, max_sample_tokens=positions))
    prompt = spec.data.max_prompt_tokens
    longest = {"rollout.max_new_tokens": spec.rollout.max_new_tokens}
    sets = spec.eval.sets.items()
    longest |= {f"eval.sets.{name}.max_new_tokens": each.max_new_tokens or 0 for name, each in sets}
    key, new = max(longest.items(), key=lambda entry: entry[1])
    if prompt + new <= positions:
        return spec
    if new >= positions:
        raise SpecError(
            f"{new} leaves no room for a prompt in the {positions} positions of the model",
            key=key,
            hint=f"Set it to {positions // 2} or less.",
        )
    if prompt != Data().max_prompt_tokens:
        raise SpecError(
            f"{prompt} with {key} {new} is {prompt + new} tokens, the model has {positions} positions",
            key="data.max_prompt_tokens",
            hint=f"Lower one of the two; without data.max_prompt_tokens it is {positions - new}.",
        )
    return replace(spec, data=replace(spec.data, max_prompt_tokens=positions - new))


def _fitted_env(env: EnvSpec, positions: int, key: str) -> EnvSpec:
    """Give episodes a limit that fits a model of so many positions. Raises SpecError."""
    if (most := env.max_tokens or positions) > positions:
        raise SpecError(
            f"{most} is more than the {positions} positions of the model",
            key=f"{key}.max_tokens",
            hint=f"Set it to {positions} or less.",
        )
    return replace(env, max_tokens=most) if env.name else env


def to_json(spec: Spec) -> bytes:
    """Return the resolved spec, canonical: equal specs give equal bytes."""
    return msgspec.json.encode(spec)
