"""`config.yaml` of a home: what holds for every run of a box. Frozen; unknown keys are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from lorad.errors import SpecError


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
    """How pools compute on this box; `auto` leaves it to `lorad/runtime.py`, which tells who else may decide."""

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


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """idle_timeout: seconds that a pool without runs stays warm."""

    storage: Path | None = None  # bulk files of runs; None: in the home itself
    idle_timeout: float = 600.0
    backends: dict[str, Backend] = {}
    runtime: RuntimeSettings = RuntimeSettings()
    gateway: GatewaySettings = GatewaySettings()


def load(path: Path) -> Config:
    """The configuration in `path`; the defaults when there is none. Raises SpecError."""
    import yaml

    if not path.exists():
        return Config()
    try:
        return msgspec.convert(yaml.safe_load(path.read_text()) or {}, Config, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise SpecError(f"{path}: {error}", hint="Mend or remove that key; the README lists them all.") from None
    except yaml.YAMLError as error:  # its own words quote the line, which may hold a secret
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise SpecError(
            f"{where}: not YAML: {problem}", hint="Check the indentation, quotes and colons there."
        ) from None


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str) and Path(value).expanduser().is_absolute():
        return Path(value).expanduser()
    raise ValueError(f"expected an absolute path, got {value!r}")
