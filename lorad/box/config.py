"""Reads `config.yaml` of a home, which holds for every run of a box. It is frozen; unknown keys are refused.

What a key means stands once, under `Attributes:` of its section; docs/configuration.md shows it.
"""

import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from lorad.bounds import SPEC_BYTES
from lorad.box.cluster import Cluster
from lorad.box.models import MODELS
from lorad.box.paths import Home
from lorad.box.quiet import parse
from lorad.errors import SpecError
from lorad.files import read_file
from lorad.spec.notify import Notify
from lorad.spec.numbers import BUILTIN_MODELS, HUB_ID, Loggers
from lorad.text import seconds_of

T = TypeVar("T")
_Variable = Annotated[str, msgspec.Meta(pattern=r"^(?!LORAD_)[A-Za-z_][A-Za-z0-9_]*\Z")]
_DeviceName = Annotated[str, msgspec.Meta(pattern=r"^(cuda:\d+|cpu(:\d+)?)\Z")]
_PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Price = Annotated[float, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class AlarmLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When an alarm is raised (`alarms` of config.yaml); null is never.

    Attributes:
        stall: seconds without a step, and at least ten times what the last step took.
        kl: mean KL per token to the reference policy, in nats.
        entropy: mean entropy per token, in nats, below which hardly anything is tried.
        truncated: share of completions cut at rollout.max_new_tokens.
        zero_variance: share of groups whose samples all have the same reward, from which nothing is learnt.
        logprob_difference: mean difference per token between engine and trainer, in nats.
        explained_variance: share of the variance of the returns that a critic explains. Below 0 it is worse
            than a constant; the limit leaves room for the noise of one step.
        chosen_fall: how far chosen completions of dpo may fall below the reference, in nats per token.
        disk: free bytes on the disk of the runs, below which the alarm is raised.
    """

    stall: _Positive | None = 120.0
    kl: _Positive | None = 0.5
    entropy: _Positive | None = 0.005
    truncated: _Share | None = 0.5
    zero_variance: _Share | None = 0.8
    logprob_difference: _Positive | None = 0.05
    explained_variance: Annotated[float, msgspec.Meta(le=1)] | None = -0.25
    chosen_fall: _Positive | None = 1.0
    disk: Annotated[int, msgspec.Meta(gt=0)] | None = 5 << 30


class Backend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a backend that lorad knows is installed, or a backend of the user's own.

    Attributes:
        engine: `module:Class` of an engine of your own.
        trainer: `module:Class` of a trainer of your own.
        pythonpath: directory that these classes are imported from.
        python: interpreter of the virtual environment in which the backend is installed.
        env: variables added to the environment of its processes; they may be secrets, so they are neither
            logged nor kept in the database. In a daemon that several users share all of these can read them.
    """

    engine: str | None = None
    trainer: str | None = None
    pythonpath: str | None = None
    python: Path | None = None
    env: dict[str, str] = {}


class RuntimeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How pools compute on this box; auto chooses for the model's size and the machine's load.

    Attributes:
        threads: compute threads of a pool on the CPU.
        wait_policy: how OpenMP's threads wait: passive ones sleep, active ones spin.
        malloc: auto lets malloc keep what a step frees; off leaves it as it is.
    """

    threads: Annotated[int, msgspec.Meta(gt=0, le=4096)] | Literal["auto"] = "auto"
    wait_policy: Literal["auto", "passive", "active"] = "auto"
    malloc: Literal["auto", "off"] | bool = "auto"  # YAML reads a bare `off` as false

    @property
    def tunes_malloc(self) -> bool:
        return self.malloc in ("auto", True)


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the gateway listens beside its socket.

    Attributes:
        port: port on 127.0.0.1, for whoever has a token or the key of the home's owner; a number goes with
            `tokens`. auto is a free one, which stays the same, and none in a daemon that several users share.
            null is none.
        tokens: YAML file, readable by its owner only, of `owner: token` or a list of tokens; a token may
            stand there as `sha256:` and its digest.
    """

    port: Annotated[int, msgspec.Meta(gt=0, le=65535)] | Literal["auto"] | None = "auto"
    tokens: Path | None = None

    def __post_init__(self) -> None:
        if (self.fixed_port is None) != (self.tokens is None):
            raise ValueError("gateway: tokens and a number for port go together")

    @property
    def fixed_port(self) -> int | None:
        return self.port if isinstance(self.port, int) else None


DOOR_SETTINGS = "LORAD_DOOR_SETTINGS"
"""In the environment of a user's tinker door: what it has of `tinker`, as they cannot read config.yaml."""


class TinkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The door for the official `tinker` client.

    Attributes:
        port: port on 127.0.0.1; null is no door.
        keys: YAML file, readable by its owner only, of `owner: key` or a list of keys, which begin with
            `tml-`; a key may stand there as `sha256:` and its digest. null is tinker/keys.yaml in the home.
        bases: each base by the name that clients give, such as `Qwen/Qwen3-8B`: an absolute directory, or
            what else `model.path` of a spec may be. A hub id that is not in the cache is downloaded when the
            door starts.
        ranks: ranks that a model may have; empty is any that the engine takes.
        overrides: `key=value` of the spec that all models have, such as `trainer.backend=fsdp` and
            `rollout.backend=vllm`.
        context: tokens of a prompt and its completion, or of a datum, that there is room for, as far as the
            base goes.
        park_after: seconds without a sign of life of a client, after which the runs of its models are paused;
            the next request resumes them.
        log_bytes: bytes of requests without a result that one user may have on disk; who has as many is asked
            to come again.
    """

    port: Annotated[int, msgspec.Meta(gt=0, le=65535)] | None = None
    keys: Path | None = None
    bases: dict[str, str] = {}
    ranks: list[Annotated[int, msgspec.Meta(gt=0)]] = []
    overrides: list[str] = []
    context: Annotated[int, msgspec.Meta(ge=8)] = 8192
    park_after: _PositiveSeconds = 300.0
    log_bytes: Annotated[int, msgspec.Meta(gt=0)] = 8 << 30

    def __post_init__(self) -> None:
        for name, base in self.bases.items():
            is_hub_id = re.fullmatch(HUB_ID, base) is not None
            names = (*BUILTIN_MODELS, *MODELS)
            if base not in names and not is_hub_id and not Path(base).expanduser().is_absolute():
                choices = ", ".join(names)
                raise ValueError(
                    f"bases: {name}: expected an absolute directory, a hub id or one of {choices}, "
                    f"got {base!r}"
                )


class Supervision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a process counts as hung, and how large logs become.

    Attributes:
        hang: seconds without a heartbeat (a stopped process, a machine that swaps) after which a process is
            killed.
        stall: seconds with heartbeats and work, and without progress, after which a process is killed.
        log_bytes: size in bytes above which the older half of a log is removed.
    """

    hang: _PositiveSeconds = 120.0
    stall: _PositiveSeconds = 1800.0
    log_bytes: Annotated[int, msgspec.Meta(ge=1 << 16)] = 64 << 20


class DeviceHours(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much of the devices the runs of one user may use; two devices for an hour are two device-hours.

    Attributes:
        most: device-hours; when a user's runs have used as many, their next ones wait, and those at work
            continue.
        per: the time in which they count, up to now: hours, days or weeks (36h, 7d, 2w).
    """

    most: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    per: str = "7d"

    def __post_init__(self) -> None:
        if re.fullmatch(r"[1-9][0-9]{0,3}[hdw]", self.per) is None:
            raise ValueError(f"per is {self.per!r}; give hours, days or weeks: 36h, 7d, 2w")

    @property
    def seconds(self) -> float:
        return seconds_of(self.per)


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one user may have at a time; null is no limit.

    Attributes:
        devices: devices that their runs hold.
        runs: their runs under way.
        disk: bytes of all their runs.
        priority: highest `resources.priority` of their runs in a daemon that several users share; admins are
            exempt.
        device_hours: what their runs may use in a span of time that ends now.
        reserve: longest time in seconds for which they may reserve a device in a daemon that several users
            share; admins are exempt.
    """

    devices: Annotated[int, msgspec.Meta(ge=0)] | None = None
    runs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    disk: Annotated[int, msgspec.Meta(ge=0)] | None = None
    priority: int = 0
    device_hours: DeviceHours | None = None
    reserve: _PositiveSeconds | None = 86400.0


class Queue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who runs next, and how much each user may have.

    Attributes:
        preemption: a run may stop those of lower priority at their next step; these are queued again.
        idle_timeout_wanted: seconds that an idle pool stays while another user waits for its device.
        half_life: seconds after which use of devices counts half. Of runs of equal priority those come first
            whose user has used the least; null or 0: users take turns of eight runs each.
        foreign_after: seconds that a process outside of lorad has to be on a GPU before runs with
            `resources.yield_to: foreign` give it back.
        foreign_settle: seconds that a GPU has to be without such a process before these runs return.
        quiet_hours: times of the week, by this machine's clock, such as `mon-fri 09:00-18:00`, in which no
            run starts on `quiet_devices`, and runs there stop at their next step and are queued again.
        quiet_devices: names of devices, such as `cuda:0`; none are all.
        limits: limits of every user who is not named in `users`.
        users: limits of some users, by name.
    """

    preemption: bool = True
    idle_timeout_wanted: _PositiveSeconds = 10.0
    half_life: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = 86400.0
    foreign_after: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    foreign_settle: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    quiet_hours: list[str] = []
    quiet_devices: list[_DeviceName] = []
    limits: Limit = Limit()
    users: dict[str, Limit] = {}

    def __post_init__(self) -> None:
        for text in self.quiet_hours:
            try:
                parse(text)
            except ValueError as error:
                raise ValueError(f"quiet_hours: {error}") from None

    def limit_of(self, user: str) -> Limit:
        return self.users.get(user, self.limits)


class Sharing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may do what in a daemon that several users share.

    Attributes:
        read: who sees a run and what belongs to it: all, or its owner alone; for others it does not exist.
        admins: names of users who may do everything.
    """

    read: Literal["all", "owner"] = "all"
    admins: list[str] = []


class DevicesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The devices of a machine without a GPU.

    Attributes:
        cpu_slots: how many pools compute on the CPU at a time.
    """

    cpu_slots: Annotated[int, msgspec.Meta(gt=0, le=64)] = 1


class MetricsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures for Prometheus.

    Attributes:
        port: port on 127.0.0.1; every user of the machine can read what is served there.
    """

    port: Annotated[int, msgspec.Meta(gt=0, le=65535)] | None = None


class _Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a device costs by the hour, for `lorad bill`; null is no price.

    Attributes:
        gpu_hour: price of an hour of a GPU.
        cpu_hour: price of an hour of the CPU, or of a slot of it (`devices.cpu_slots`).
        gpu_hours: prices of some GPUs by a part of their name, such as `{H100: 4.0}`; the longest part that
            fits counts.
        currency: what prices are in.
    """

    gpu_hour: _Price | None = None
    cpu_hour: _Price | None = None
    gpu_hours: dict[str, _Price] = {}
    currency: str = "EUR"

    def of(self, device: str) -> float | None:
        """Return the price of an hour of a device, by its name; None: it has none."""
        if device == "cpu":
            return self.cpu_hour
        fitting = [part for part in self.gpu_hours if part.lower() in device.lower()]
        return self.gpu_hours[max(fitting, key=len)] if fitting else self.gpu_hour


class UserCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command of your own on a key of the TUI, run on this machine without a shell.

    Attributes:
        run: the command and its arguments; `$RUN`, `$VERSION` and `$DIR` are of the chosen run.
        ask: ask before it is run.
    """

    run: str
    ask: bool = True

    def __post_init__(self) -> None:
        try:
            words = shlex.split(self.run)
        except ValueError:
            raise ValueError("run has a quote that is not closed") from None
        if not words:
            raise ValueError("run is empty; give a command, such as `rsync -a $DIR backup:`")
        for name in re.findall(r"\$\{?(\w*)", self.run):
            if name not in ("RUN", "VERSION", "DIR"):
                raise ValueError(f"run has ${name}; there are $RUN, $VERSION and $DIR")


class Tui(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How `lorad tui` looks and what it allows.

    Attributes:
        theme: `dark`, `light`, `contrast`, `ansi`, or a theme of Textual's.
        keymap: other keys by the ids that the help screen (`?`) lists, such as `{run.kill: ctrl+k}`.
        readonly: only look; nothing can be started, stopped or removed.
        commands: commands of your own by function key, `F2` to `F24`, such as
            `{F5: {run: "rsync -a $DIR backup:"}}`.
    """

    theme: str = "dark"
    keymap: dict[str, str] = {}
    readonly: bool = False
    commands: dict[str, UserCommand] = {}

    def __post_init__(self) -> None:
        for key in self.commands:
            if re.fullmatch(r"[Ff]([2-9]|1[0-9]|2[0-4])", key) is None:
                raise ValueError(f"commands: {key} is no key for a command; take F2 to F24")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What holds for every run of a box.

    Attributes:
        storage: directory for bulk files of runs; null is the home itself.
        idle_timeout: seconds that a pool without runs stays warm, with or without a daemon.
        disk_budget: bytes of runs above which leftovers, and then samples and versions of ended runs to which
            nothing refers, are deleted without being asked for; null never deletes. A version stays that has
            a pin or an alias, was imported, exported or forked, or is named in a spec.
        environment: variables that runs inherit from the daemon where they do not inherit all (a shared
            daemon, whose users all can read them).
        secrets: a file for each variable, readable by its owner only, that holds its value. It is read just
            before a process starts, and written nowhere. A daemon that several users share takes none: each
            user has files of their own, see docs/shared-box.md.
        backends: where backends are installed, by name.
        loggers: loggers of runs whose spec names none, see docs/loggers.md.
        notify: who hears of runs whose spec names nobody, see docs/notify.md.
        cluster: where runs get devices beyond this machine, see docs/cluster.md; null is this machine alone.
    """

    storage: Path | None = None
    idle_timeout: float = 600.0
    disk_budget: Annotated[int, msgspec.Meta(gt=0)] | None = None
    environment: list[_Variable] = []
    secrets: dict[_Variable, Path] = {}
    supervision: Supervision = Supervision()
    queue: Queue = Queue()
    sharing: Sharing = Sharing()
    devices: DevicesConfig = DevicesConfig()
    metrics: MetricsConfig = MetricsConfig()
    backends: dict[str, Backend] = {}
    loggers: Loggers = []
    notify: list[Notify] = []
    runtime: RuntimeSettings = RuntimeSettings()
    gateway: GatewaySettings = GatewaySettings()
    tinker: TinkerSettings = TinkerSettings()
    prices: _Prices = _Prices()
    alarms: AlarmLimits = AlarmLimits()
    tui: Tui = Tui()
    cluster: Cluster | None = None


def load(path: Path) -> Config:
    """Return the configuration in `path`; the defaults when there is none. Raises SpecError."""
    if not path.exists():
        return Config()
    try:
        return parse_config(read_file(path, SPEC_BYTES).decode(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SpecError(f"{path}: not readable: {why}", hint="It is a text file of YAML.") from None


def parse_config(text: str, where: str) -> Config:
    """Return the configuration that a text is; `where` names its file, for errors. Raises SpecError."""
    import yaml

    from lorad.spec.yaml import compose, refuse_doubles

    try:
        refuse_doubles(compose(text, where), where)
        return msgspec.convert(yaml.safe_load(text) or {}, Config, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise SpecError(
            f"{where}: {error}", hint="Mend or remove that key; docs/configuration.md has them all."
        ) from None
    except (yaml.YAMLError, ValueError):  # their own words quote the line, which may hold a secret
        raise SpecError(f"{where}: not YAML", hint="Check the tags, dates and numbers in it.") from None


def door_settings() -> TinkerSettings:
    """Return the settings that the daemon gave to this process, the tinker door of a user."""
    settings = os.environ.get(DOOR_SETTINGS, "{}")
    return msgspec.json.decode(settings, type=TinkerSettings, dec_hook=_path)


def config_of(home: Home) -> Config:
    """Return a home's configuration; the defaults for another user's unreadable one. Raises SpecError."""
    if home.shared_by is not None and home.config.exists() and not os.access(home.config, os.R_OK):
        return Config()
    return load(home.config)


def from_plain(plain: dict[str, Any], kind: type[T]) -> T:
    """Return a part of the configuration as one process passes it to another."""
    return msgspec.convert(plain, kind, dec_hook=_path)


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str) and Path(value).expanduser().is_absolute():
        return Path(value).expanduser()
    raise ValueError(f"expected an absolute path, got {value!r}")
