"""A spec that is being written: the fields of a form, the YAML that they make, and what is wrong with it.

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
from lorad.tui.spec_fields import ALWAYS_WRITTEN, entry, usual
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
class DraftSource:
    """The start of a form.

    Attributes:
        cwd: The directory where its relative paths begin.
        command: The shell command, to which overrides are added; "" if there is no file for it.
        note: What else the user should know.
    """

    title: str
    values: Flat
    cwd: Path
    command: str = ""
    note: str = ""

    @property
    def keys(self) -> list[str]:
        """Return the keys of the fields: the usual ones and those of its values, in the spec's order."""
        return list(flat(nested(dict.fromkeys((*usual(), *differing(self.values))))))

    @property
    def texts(self) -> _Texts:
        """Return the initial texts of the fields."""
        texts = dict.fromkeys(self.keys, "")
        for key in texts:
            value = self.values.get(key)
            if value is not None:
                row = entry(key)
                text = row.text(value)
                is_usual = text == row.default and (row.choices or key not in ALWAYS_WRITTEN)
                texts[key] = "" if is_usual else text
        return texts


@dataclass(frozen=True)
class Draft:
    """A spec as far as the fields can be read.

    Attributes:
        wrong: What is wrong, by key; by MORE, or by "" if no field is to blame.
    """

    values: Flat
    wrong: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return text_of(self.values)


def draw_up(texts: Mapping[str, str], more: str = "") -> Draft:
    """Combine fields and further settings; settings win."""
    values = Flat()
    wrong = dict[str, str]()
    for key, text in texts.items():
        if text.strip():
            values[key], fault = _read(key, text)
            wrong |= {key: fault} if fault else {}
    try:
        values = flat(assigned(nested(values), shlex.split(more)))
    except (SpecError, ValueError) as error:
        no_quote = "There is a quote that is not closed."
        wrong[MORE] = error.in_full if isinstance(error, SpecError) else no_quote
    try:
        load_spec(text_of(values))
    except SpecError as error:
        key, fault = blamed(error)
        place = key if texts.get(key) else MORE if more.strip() else ""
        wrong.setdefault(place, named(key, fault, error.hint))
    return Draft(values, wrong)


@functools.lru_cache(4096)
def _read(key: str, text: str) -> tuple[Any, str]:
    """Return the value, or the text where that is none, and what is wrong with it alone, or ""."""
    value: Any = text
    try:
        value = entry(key).value(text)
        convert(nested({key: value}))
    except SpecError as error:
        return value, named(key, blamed(error)[1], error.hint)
    return value, ""


def blamed(error: LoradError) -> tuple[str, str]:
    """Return the dotted key that an error blames and what is wrong with it, or "" and its message."""
    return (error.key, error.problem) if isinstance(error, SpecError) and error.key else ("", error.message)


def named(key: str, fault: str, hint: str) -> str:
    return " ".join(part for part in (f"{key}: {fault}." if key else f"{fault}.", hint) if part)


# -- the shell's way to it -----------------------------------------------------------------------------------
def command(source: DraftSource, values: Flat, cwd: Path) -> str:
    """Return the command line that starts the same run."""
    if source.command:
        changed = [*words(overrides(source.values, values))]
        return " ".join([source.command, *map(shlex.quote, changed)])
    cd = "" if source.cwd == cwd else f"cd {shlex.quote(str(source.cwd))} && "
    typed = ["lorad", "run", "-", *map(shlex.quote, words(differing(values))), "<", "/dev/null"]
    return f"{cd}{' '.join(typed)}"


def overrides(before: Flat, after: Flat) -> Flat:
    """Return the overrides that turn `before` into `after`; a key that is gone becomes its default."""
    gone = {key: DEFAULTS.get(key) for key in before if key not in after and before[key] != DEFAULTS.get(key)}
    changed = {key: value for key, value in after.items() if before.get(key, DEFAULTS.get(key)) != value}
    return flat(nested({**gone, **changed}))


# -- relative paths ------------------------------------------------------------------------------------------
def relative(values: Flat) -> list[str]:
    """Return the keys whose values look like relative paths of files."""
    keys = []
    for key in (*_PATHS, *_FUNCTIONS):
        value = values.get(key)
        path = value.partition(":")[0] if isinstance(value, str) and ".py:" in value else value
        if isinstance(path, str) and path.endswith((".jsonl", ".parquet", ".py")) and path[0] not in "/~":
            keys.append(key)
    return keys


def rebased(values: Flat, cwd: Path, other: Path) -> Flat:
    """Return the values for where relative paths begin at `other`: paths of what exists become absolute."""
    if cwd == other:
        return values
    absolute = dict(values)
    for key in (*_PATHS, *_FUNCTIONS):
        value = values.get(key)
        if isinstance(value, str) and value[:1] not in ("/", "~", ""):
            name, colon, function = value.rpartition(":") if key in _FUNCTIONS else (value, "", "")
            if name and (cwd / name).exists():
                absolute[key] = f"{cwd / name}{colon}{function}"
    return absolute


# -- settings in dialogs -------------------------------------------------------------------------------------
def wrong_settings(overriding: Sequence[str]) -> str:
    """Return what is wrong with some key=value on their own: an unknown key, a value that no spec has."""
    try:
        convert(assigned({}, overriding))
    except SpecError as error:
        key, fault = blamed(error)
        if key != "reward":  # the run's spec may define the reward
            return named(key, fault, error.hint)
    return ""
