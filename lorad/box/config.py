"""`config.yaml` of a home: what holds for every run of a box. Frozen; unknown keys are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from lorad.bounds import SPEC_BYTES
from lorad.errors import SpecError
from lorad.files import read_file

Variable = Annotated[str, Meta(pattern=r"^(?!LORAD_)[A-Za-z_][A-Za-z0-9_]*\Z")]
PositiveSeconds = Annotated[float, Meta(gt=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]


class AlarmLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """`alarms` of config.yaml: the values from which on something is an alarm; null: never.

    stall: seconds without a step, and not less than ten times what the last one took. kl: mean per token to the
    reference policy, nats. entropy: mean per token, nats, below which hardly anything is tried. truncated: share of
    completions cut at max_new_tokens. zero_variance: share of groups whose samples all have one reward, from which
    nothing is learnt. logprob_difference: mean per token between engine and trainer, nats. disk: free bytes where runs
    are, below which there is an alarm.
    """

    stall: Positive | None = 120.0
    kl: Positive | None = 0.5
    entropy: Positive | None = 0.005
    truncated: Share | None = 0.5
    zero_variance: Share | None = 0.8
    logprob_difference: Positive | None = 0.05
    disk: Annotated[int, Meta(gt=0)] | None = 5 << 30


class Backend(Struct, frozen=True, forbid_unknown_fields=True):
    """A backend of the user's: its classes as `module:Class`, and the directory that they are imported from.

    Or where a backend that lorad knows is installed. python: the interpreter of its virtual environment. env: added to
    the environment of its processes; values may be secrets, so they are neither logged nor kept in the database.
    """

    engine: str | None = None
    trainer: str | None = None
    pythonpath: str | None = None
    python: Path | None = None
    env: dict[str, str] = {}


class RuntimeSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How pools compute on this box; `auto` leaves it to `lorad/box/runtime.py`, which says who else may decide."""

    threads: Annotated[int, Meta(gt=0, le=4096)] | Literal["auto"] = "auto"
    wait_policy: Literal["auto", "passive", "active"] = "auto"
    malloc: Literal["auto", "off"] | bool = "auto"  # YAML reads a bare `off` as false

    @property
    def tunes_malloc(self) -> bool:
        return self.malloc in ("auto", True)


class GatewaySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the gateway listens beside its socket: on 127.0.0.1 alone, for who has a token.

    tokens: a YAML file, readable by its owner only, of owner -> token or list of tokens; a token may stand there as
    `sha256:` and its digest.
    """

    port: Annotated[int, Meta(gt=0, le=65535)] | None = None
    tokens: Path | None = None

    def __post_init__(self) -> None:
        if (self.port is None) != (self.tokens is None):
            raise ValueError("gateway: port and tokens go together")


class Supervision(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds after which a process counts as hung, and how large logs become.

    hang: without a heartbeat (a stopped process, a machine that swaps); stall: with heartbeats and work, and no
    progress. Of a log that is larger than log_bytes the older half goes.
    """

    hang: PositiveSeconds = 120.0
    stall: PositiveSeconds = 1800.0
    log_bytes: Annotated[int, Meta(ge=1 << 16)] = 64 << 20


class Limit(Struct, frozen=True, forbid_unknown_fields=True):
    """What one user may have at a time; None: as much as there is.

    runs: that work. disk: bytes of all their runs. priority: the highest that `resources.priority` of their runs may
    be in a daemon that several users share; its admins are not bound by it.
    """

    devices: Annotated[int, Meta(ge=0)] | None = None
    runs: Annotated[int, Meta(ge=0)] | None = None
    disk: Annotated[int, Meta(ge=0)] | None = None
    priority: int = 0


class Queue(Struct, frozen=True, forbid_unknown_fields=True):
    """preemption: a run may stop those of lower priority at their next step, they are queued again. limits: of every
    user; users: of some, by name. idle_timeout_wanted: seconds that an idle pool stays while another user waits for its
    device."""

    preemption: bool = True
    idle_timeout_wanted: PositiveSeconds = 10.0
    limits: Limit = Limit()
    users: dict[str, Limit] = {}

    def limit_of(self, user: str) -> Limit:
        return self.users.get(user, self.limits)


class Sharing(Struct, frozen=True, forbid_unknown_fields=True):
    """Of a daemon that several users share. read: who sees a run beside its owner; admins: names of those who may do
    everything."""

    read: Literal["all", "owner"] = "all"
    admins: list[str] = []


class Devices(Struct, frozen=True, forbid_unknown_fields=True):
    """cpu_slots: how many pools compute on the CPU at a time, where there is no GPU."""

    cpu_slots: Annotated[int, Meta(gt=0, le=64)] = 1


class Metrics(Struct, frozen=True, forbid_unknown_fields=True):
    """port: on 127.0.0.1, for Prometheus; what it tells there is open to every user of the machine."""

    port: Annotated[int, Meta(gt=0, le=65535)] | None = None


class Tui(Struct, frozen=True, forbid_unknown_fields=True):
    """How `lorad tui` looks and what it lets do. theme: dark, light, contrast, ansi, or one of Textual's. keymap: other
    keys by action id (the help screen lists both): `{run.kill: ctrl+k}`."""

    theme: str = "dark"
    keymap: dict[str, str] = {}
    readonly: bool = False


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """idle_timeout: seconds that a pool without runs stays warm. disk_budget: bytes of runs beyond which what can be
    deleted is, without being asked. environment: variables of the daemon that runs inherit where that is not all of
    them (a shared daemon); secrets: variable -> a file, readable by its owner only, that holds its value."""

    storage: Path | None = None  # bulk files of runs; None: in the home itself
    idle_timeout: float = 600.0
    disk_budget: Annotated[int, Meta(gt=0)] | None = None
    environment: list[Variable] = []
    secrets: dict[Variable, Path] = {}
    supervision: Supervision = Supervision()
    queue: Queue = Queue()
    sharing: Sharing = Sharing()
    devices: Devices = Devices()
    metrics: Metrics = Metrics()
    backends: dict[str, Backend] = {}
    runtime: RuntimeSettings = RuntimeSettings()
    gateway: GatewaySettings = GatewaySettings()
    alarms: AlarmLimits = AlarmLimits()
    tui: Tui = Tui()


def load(path: Path) -> Config:
    """The configuration in `path`; the defaults when there is none. Raises SpecError."""
    import yaml

    from lorad.spec.yaml import compose, refuse_doubles

    if not path.exists():
        return Config()
    try:
        text = read_file(path, SPEC_BYTES).decode()
        refuse_doubles(compose(text, str(path)), str(path))
        return msgspec.convert(yaml.safe_load(text) or {}, Config, dec_hook=_path)
    except (OSError, UnicodeDecodeError) as error:
        told = getattr(error, "strerror", None) or error
        raise SpecError(f"{path}: not readable: {told}", hint="It is a text file of YAML.") from None
    except msgspec.ValidationError as error:
        raise SpecError(f"{path}: {error}", hint="Mend or remove that key; the README lists them all.") from None
    except (yaml.YAMLError, ValueError):  # their own words quote the line, which may hold a secret
        raise SpecError(f"{path}: not YAML", hint="Check the tags, dates and numbers in it.") from None


def backends_of(plain: dict[str, Any]) -> dict[str, Backend]:
    """As one process tells them another."""
    return msgspec.convert(plain, dict[str, Backend], dec_hook=_path)


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str) and Path(value).expanduser().is_absolute():
        return Path(value).expanduser()
    raise ValueError(f"expected an absolute path, got {value!r}")
