"""A spec that is being written: what stands in the fields of a form, the YAML that it makes, and what is
wrong with it.

Nothing is judged here: values are read by `lorad.spec.yaml`, checked by `lorad.spec.text`, and the words are
theirs.
"""

import functools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorad.errors import LoradError, SpecError
from lorad.spec.model import convert
from lorad.spec.text import assigned, load_spec
from lorad.tui.spec_fields import TOLD, entry, usual
from lorad.tui.spec_lines import DEFAULTS, Flat, differing, flat, nested, text_of, words

MORE = "settings"  # the field for any other key=value
_PATHS = (
    "model.path",
    "data.train",
    "data.eval",
    "lora.adapter_path",
    "rollout.key_file",
    "rollout.admin_key_file",
)
_FUNCTIONS = ("reward", "algorithm.loss", "algorithm.advantage")  # path/to/file.py:function
_Texts = dict[str, str]  # what was typed, by key; "" stands for the default


@dataclass(frozen=True)
class Source:
    """The start of a form.

    cwd: where its relative paths begin.
    command: the shell command, to which overrides are added; "" if there is no file for it.
    note: what else the user should know.
    """

    title: str
    given: Flat
    cwd: Path
    command: str = ""
    note: str = ""

    @property
    def keys(self) -> list[str]:
        """Return the keys of the fields: the usual ones and those that are given, in the spec's order."""
        return list(flat(nested(dict.fromkeys((*usual(), *differing(self.given))))))

    @property
    def texts(self) -> _Texts:
        """Return the initial texts of the fields."""
        return {key: _first_text(key, self.given[key]) if key in self.given else "" for key in self.keys}


def _first_text(key: str, value: Any) -> str:
    one = entry(key)
    text = "" if value is None else one.text(value)
    return "" if text == one.default and (one.choices or key not in TOLD) else text


@dataclass(frozen=True)
class Draft:
    """A spec as far as the fields can be read.

    values: what the fields say.
    wrong: messages by key; by MORE, or by "" if no field is to blame.
    """

    values: Flat
    wrong: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return text_of(self.values)


def draw_up(texts: Mapping[str, str], more: str = "") -> Draft:
    """Combine fields and further settings; settings win."""
    values, wrong = Flat(), dict[str, str]()
    for key, text in texts.items():
        if text.strip():
            values[key], fault = _read(key, text)
            wrong |= {key: fault} if fault else {}
    try:
        values = flat(assigned(nested(values), shlex.split(more)))
    except (SpecError, ValueError) as error:
        wrong[MORE] = _in_words(error)
    try:
        load_spec(text_of(values))
    except SpecError as error:
        key, fault = blamed(error)
        wrong.setdefault(
            key if texts.get(key) else MORE if more.strip() else "", named(key, fault, error.hint)
        )
    return Draft(values, wrong)


@functools.lru_cache(4096)
def _read(key: str, text: str) -> tuple[Any, str]:
    """(the value, or the text where that is none; what is wrong with it alone, or "")."""
    value: Any = text
    try:
        value = entry(key).value(text)
        convert(nested({key: value}))
    except SpecError as error:
        return value, named(key, blamed(error)[1], error.hint)
    return value, ""


def blamed(error: LoradError) -> tuple[str, str]:
    """The dotted key that an error blames and what is wrong with it; where it blames none, "" and its
    message.
    """
    return (error.key, error.problem) if isinstance(error, SpecError) and error.key else ("", error.message)


def named(key: str, fault: str, hint: str) -> str:
    return " ".join(part for part in (f"{key}: {fault}." if key else f"{fault}.", hint) if part)


def _in_words(error: SpecError | ValueError) -> str:
    if isinstance(error, SpecError):
        return error.in_full
    return "There is a quote that is not closed."


# -- the shell's way to it -----------------------------------------------------------------------------------
def command(source: Source, values: Flat, here: Path) -> str:
    """Return the command line that starts the same run."""
    if source.command:
        changed = [*words(overrides(source.given, values))]
        return " ".join([source.command, *map(shlex.quote, changed)])
    there = "" if source.cwd == here else f"cd {shlex.quote(str(source.cwd))} && "
    typed = ["lorad", "run", "-", *map(shlex.quote, words(differing(values))), "<", "/dev/null"]
    return f"{there}{' '.join(typed)}"


def overrides(before: Flat, after: Flat) -> Flat:
    """Return the overrides that turn `before` into `after`; a key that is gone becomes its default."""
    gone = {key: DEFAULTS.get(key) for key in before if key not in after and before[key] != DEFAULTS.get(key)}
    changed = {key: value for key, value in after.items() if before.get(key, DEFAULTS.get(key)) != value}
    return flat(nested({**gone, **changed}))


# -- relative paths ------------------------------------------------------------------------------------------
def relative(values: Flat) -> list[str]:
    """Keys whose values look like relative paths of files."""
    return [key for key in (*_PATHS, *_FUNCTIONS) if key in values and _looks_relative(values[key])]


def _looks_relative(value: Any) -> bool:
    path = str(value).partition(":")[0] if ".py:" in str(value) else str(value)
    return isinstance(value, str) and path.endswith((".jsonl", ".parquet", ".py")) and path[0] not in "/~"


def rebased(values: Flat, cwd: Path, other: Path) -> Flat:
    """The same where relative paths begin at `other`: those to something that is there become absolute."""
    if cwd == other:
        return values
    return {key: _rebased(key, value, cwd) for key, value in values.items()}


def _rebased(key: str, value: Any, cwd: Path) -> Any:
    if not isinstance(value, str) or key not in (*_PATHS, *_FUNCTIONS) or value[:1] in ("/", "~", ""):
        return value
    name, colon, function = value.rpartition(":") if key in _FUNCTIONS else (value, "", "")
    there = cwd / name
    return f"{there}{colon}{function}" if name and there.exists() else value


# -- settings in dialogs -------------------------------------------------------------------------------------
def wrong_settings(overriding: Sequence[str]) -> str:
    """Return what is wrong with some key=value on their own: an unknown key, a value that no spec has."""
    try:
        convert(assigned({}, overriding))
    except SpecError as error:
        key, fault = blamed(error)
        return (
            "" if key == "reward" else named(key, fault, error.hint)
        )  # the run's spec may define the reward
    return ""
