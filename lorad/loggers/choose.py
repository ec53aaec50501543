"""Reads `loggers` of a spec or of config.yaml: names, or mappings of one name and its settings."""

import importlib
import importlib.metadata
import importlib.util
import zlib
from difflib import get_close_matches
from typing import Any

import msgspec
from msgspec import Struct

from lorad.box.private import read_key
from lorad.errors import SpecError
from lorad.files import whole
from lorad.loggers.logger import LoggedRun, Logger, Settings

GROUP = "lorad.loggers"
_BUILTIN = {
    "tensorboard": "lorad.loggers.builtin.tensorboard:TensorBoard",
    "wandb": "lorad.loggers.builtin.wandb:Wandb",
    "mlflow": "lorad.loggers.builtin.mlflow:MLflow",
}


class LoggerChoice(Struct, frozen=True):
    """One entry of `loggers`."""

    name: str
    settings: dict[str, Any] = {}

    @property
    def id(self) -> str:
        """Return the name of its cursor, which differs with the settings: all is written to another place."""
        return f"{self.name}-{zlib.crc32(msgspec.json.encode(self.settings, order='sorted')):08x}"


def choices(loggers: list[Any]) -> list[LoggerChoice]:
    """Read `loggers`. Raises SpecError for an entry that is neither a name nor a mapping of one."""
    read = []
    for number, entry in enumerate(loggers):
        if isinstance(entry, str):
            entry = {entry: {}}
        if not (isinstance(entry, dict) and len(entry) == 1):
            raise SpecError(
                "it is a name, or one name with its settings",
                key=f"loggers[{number}]",
                hint="For example `loggers: [tensorboard, {mlflow: {uri: …}}]`.",
            )
        ((name, settings),) = entry.items()
        read.append(LoggerChoice(name, settings or {}))
    return read


def refuse_unfit(loggers: list[Any]) -> None:
    """Raise SpecError, by key, for a logger that is unknown, not installed, or has wrong settings or keys."""
    for number, choice in enumerate(choices(loggers)):
        try:
            kind = type_of(choice.name)
            settings = _settings(kind, choice)
            for field in msgspec.structs.fields(settings):
                path = getattr(settings, field.name)
                is_key = field.name.endswith("key_file")
                if path is not None and (is_key or field.name == "dir"):
                    whole(path)
                if path is not None and is_key:
                    read_key(path)
        except SpecError as error:
            key = f"loggers[{number}]"
            raise SpecError(f"{choice.name}: {error.problem}", key=key, hint=error.hint) from None


def make(choice: LoggerChoice, run: LoggedRun) -> Logger:
    """Make the logger of a run. Raises SpecError."""
    kind = type_of(choice.name)
    return kind(run, _settings(kind, choice))


def names() -> list[str]:
    """List the names of all loggers."""
    return sorted({*_BUILTIN, *(point.name for point in importlib.metadata.entry_points(group=GROUP))})


def type_of(name: str) -> type[Logger]:
    """Return the class of a logger. Raises SpecError unless it can be used on this machine."""
    if place := _BUILTIN.get(name):
        module, _, attribute = place.partition(":")
        kind = getattr(importlib.import_module(module), attribute)
    else:
        points = [*importlib.metadata.entry_points(group=GROUP, name=name)]
        if not points:
            near = get_close_matches(name, names()) or names()
            raise SpecError("there is no such logger", hint=f"There is {', '.join(near)}.")
        try:
            kind = points[0].load()
        except Exception as error:  # the code of another package
            raise SpecError(
                f"its package cannot be imported: {type(error).__name__}: {error}", hint="Install it again."
            ) from error
        if not (isinstance(kind, type) and issubclass(kind, Logger)):
            problem = f"{points[0].value} is no lorad.loggers.logger.Logger"
            raise SpecError(problem, hint="Derive it from that.")
    if missing := [module for module in kind.modules if importlib.util.find_spec(module) is None]:
        what = f'"lorad[{kind.extra}]"' if kind.extra else " ".join(missing)
        raise SpecError(f"{', '.join(missing)} is not installed", hint=f"`pip install {what}`.")
    return kind  # type: ignore[no-any-return]


def _settings(kind: type[Logger], choice: LoggerChoice) -> Settings:
    try:
        return msgspec.convert(choice.settings, kind.settings_type)
    except msgspec.ValidationError as error:
        keys = ", ".join(field.name for field in msgspec.structs.fields(kind.settings_type)) or "none"
        raise SpecError(str(error), hint=f"Its settings are {keys}.") from None
