"""Keys of the spec as fields of a form, with choices, default and meaning, all from `lorad.spec.model`."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import inspect as kinds

from lorad.spec.keys import in_words, meanings
from lorad.spec.model import Spec
from lorad.spec.yaml import compose, plain
from lorad.tui.spec_lines import DEFAULTS, quoted, value_text

# What people change first, by section; "": keys of the spec itself.
_USUAL: dict[str, tuple[str, ...]] = {
    "": ("name", "seed"),
    "model": ("path", "dtype"),
    "lora": ("rank", "alpha", "target_modules", "dropout", "type"),
    "algorithm": ("name", "group_size", "clip", "kl.coef", "scale", "level"),
    "data": ("train", "eval", "prompts_per_step", "max_prompt_tokens"),
    "reward": ("",),
    "trainer": (
        "backend",
        "lr",
        "steps",
        "schedule",
        "warmup_steps",
        "tp",
        "pp",
        "dp",
        "activation_checkpointing",
    ),
    "rollout": ("backend", "max_new_tokens", "temperature", "servers", "tp", "max_staleness"),
    "eval": ("every", "problems"),
    "checkpoint": ("every", "keep"),
    "pool": ("mode", "memory_fraction"),
    "resources": ("devices", "priority", "preemptible", "restart"),
}
# These keys stand in the YAML though they have their defaults: they say what a run is.
ALWAYS_WRITTEN = (
    *("model.path", "lora.rank", "lora.alpha", "lora.target_modules", "algorithm.group_size", "data.train"),
    *("data.prompts_per_step", "reward", "trainer.steps", "rollout.max_new_tokens"),
)


@dataclass(frozen=True)
class Entry:
    """A key as a field of the form.

    Attributes:
        says: what it may be, and what it means.
        choices: all values, where they are a few words.
        is_text: what is typed is taken as it is, not as YAML.
    """

    key: str
    section: str
    label: str
    says: str
    default: str
    choices: tuple[str, ...] = ()
    is_text: bool = False

    def value(self, text: str) -> Any:
        """Read what was typed as YAML. Raises SpecError."""
        text = text.strip()
        if self.is_text and text[:1] not in ("[", "{", '"', "'"):
            return text
        node = compose(text, self.key)
        return None if node is None else plain(node, self.key)

    def text(self, value: Any) -> str:
        """Return the text to type for a value."""
        if isinstance(value, str) and self.is_text:
            return quoted(value) if value[:1] in ("[", "{", '"', "'") or value != value.strip() else value
        return value_text(value)


def usual() -> Iterator[str]:
    """Yield the keys that are always in the form, in order."""
    for section, names in _USUAL.items():
        yield from (".".join(part for part in (section, name) if part) for name in names)


@functools.cache
def entry(key: str) -> Entry:
    """Return the form's field for a key of the spec; for an unknown key it is plain text."""
    section, _, label = key.rpartition(".") if key.count(".") < 2 else key.partition(".")
    kind: Any = Spec
    owner: type[msgspec.Struct] | None = None  # the part of the spec that declares it
    for name in key.split("."):
        is_part = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        fields = {field.name: field.type for field in msgspec.structs.fields(kind)} if is_part else {}
        owner = kind if name in fields else None
        kind = fields.get(name, str)
    default = DEFAULTS.get(key)
    values = get_args(kind) if get_origin(kind) is Literal else ()
    choices = ("true", "false") if kind is bool else tuple(map(str, values))
    info = kinds.type_info(kind)
    types = info.types if isinstance(info, kinds.UnionType) else (info,)
    is_text = any(isinstance(part, kinds.StrType) for part in types)
    may_be = " | ".join(choices) or in_words(kind)
    meaning = meanings(owner).get(key.rpartition(".")[2], "") if owner else ""
    about = "; ".join(filter(None, (may_be, meaning.replace("`", "")))) if owner else "not a key of the spec"
    return Entry(
        key,
        section or ("reward" if key == "reward" else ""),
        label,
        about,
        "none" if default is None else value_text(default),
        choices,
        is_text and not choices,
    )
