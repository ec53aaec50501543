"""Describe the keys of sections for people, from the sections: default, unit, values and meaning."""

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Struct
from msgspec import inspect as kinds

from lorad.spec.numbers import COUNT_LIMIT

_UNITS = {
    "tokens": """max_prompt_tokens max_sample_tokens max_new_tokens tokens_per_microbatch env.max_tokens
        reward.max_tokens overlong.buffer attest.tokens""",
    "steps": """trainer.steps schedule_steps warmup_steps eval.every sets.NAME.every checkpoint.every
        kl.reset_every max_staleness max_skipped_steps keep_samples""",
    "samples": "kl.horizon",
    "seconds": "reward.timeout env.timeout env.episode_timeout env.start_timeout user_code.timeout",
    "minutes": "checkpoint.minutes",
    "bytes": "reward.memory env.memory user_code.memory",
    "publishes": "attest.amplified_every",
    "evaluations": "eval.stop.patience checkpoint.keep_evals",
    "processes": "reward.workers env.workers",
    "GPUs": "resources.devices rollout.tp",
    "ranks": "trainer.tp trainer.pp trainer.dp trainer.cp",
    "threads": "pool.threads",
}
_UNIT_OF = {key: unit for unit, keys in _UNITS.items() for key in keys.split()}


class Key(NamedTuple):
    """A key as people read about it.

    name: dotted; NAME stands for any name of a mapping of sections, [N] for a place in a list of them.
    default: as plain data; msgspec.NODEFAULT where it has to be given.
    values: what it may be, in words.
    unit: what its number counts; "" where it counts nothing.
    """

    name: str
    default: Any
    values: str
    unit: str
    meaning: str


class _Section(NamedTuple):
    """A section: its dotted name, what it is for, and its own keys."""

    name: str
    about: str
    keys: list[Key]


def sections_of(part: type[Struct], name: str = "") -> Iterator[_Section]:
    """Yield a section, and then those inside, in the order in which they are declared."""
    means = meanings(part)
    inside = []
    keys = []
    for field in msgspec.structs.fields(part):
        path = f"{name}.{field.name}".lstrip(".")
        if section := struct_in(field.type):
            arguments = get_args(field.type)
            is_direct = any(isinstance(form, type) and issubclass(form, Struct) for form in arguments)
            is_list = any(get_origin(form) is list for form in (field.type, *arguments))
            # what stands between a key and the keys of its section: a name, or the place in a list
            below = "[N]" if is_list and (get_origin(field.type) is list or not is_direct) else ""
            below = ".NAME" if get_origin(field.type) is dict else below
            inside.append((section, f"{path}{below}"))
        if section is None or not isinstance(field.type, type):
            default = field.default
            if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            if isinstance(default, tuple):
                default = list(default)
            values = in_words(field.type).replace("or none", "or null")
            ends = (path.split(".", skipped)[-1] for skipped in range(path.count(".") + 1))
            unit = next((_UNIT_OF[end] for end in ends if end in _UNIT_OF), "")
            keys.append(Key(path, default, values, unit, means[field.name]))
    about = " ".join((part.__doc__ or "").partition("Attributes:")[0].split())
    yield _Section(name, about, keys)
    for section, path in inside:
        yield from sections_of(section, path)


def struct_in(kind: Any) -> type[Struct] | None:
    """Return the section below a key: its value, the values of its names, or its longer form."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return kind
    direct = [arg for arg in get_args(kind) if isinstance(arg, type)]
    lists = [arg for arg in get_args(kind) if get_origin(arg) is list]
    sections = (struct_in(arg) for arg in (*direct, *lists))
    return next((section for section in sections if section is not None), None)


def meanings(owner: type[msgspec.Struct]) -> dict[str, str]:
    """Return what each field means, by the lines under `Attributes:` of the docstring."""
    _, _, lines = (inspect.getdoc(owner) or "").partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", lines, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


# -- types in words ------------------------------------------------------------------------------------------
def in_words(kind: Any) -> str:
    return _in_words(kinds.type_info(kind))


def _in_words(kind: kinds.Type) -> str:
    match kind:
        case kinds.UnionType(types=types):
            return " or ".join(_in_words(one) for one in types)
        case kinds.IntType():
            return f"a whole number{_bounds(kind)}"
        case kinds.FloatType():
            return f"a number{_bounds(kind)}"
        case kinds.LiteralType(values=values):
            return " | ".join(map(str, values))
        case kinds.ListType(item_type=item):
            return f"[{_in_words(item)}, …]"
        case kinds.TupleType(item_types=items):
            return f"[{', '.join(_in_words(one) for one in items)}]"
        case kinds.DictType():
            return "{key: value, …}"
        case kinds.StructType(fields=fields):
            return f"{{{', '.join(field.name for field in fields)}}}"
    plain_words: dict[type[Any], str] = {
        kinds.BoolType: "true | false",
        kinds.NoneType: "none",
        kinds.StrType: "text",
        kinds.CustomType: "an absolute path",
    }
    return plain_words.get(type(kind), "any value")


def _bounds(kind: kinds.IntType | kinds.FloatType) -> str:
    limits = {">": kind.gt, "≥": kind.ge, "<": kind.lt, "≤": kind.le}
    parts = [
        f"{sign} {limit}" for sign, limit in limits.items() if limit is not None and abs(limit) < COUNT_LIMIT
    ]
    return f" {' and '.join(parts)}" if parts else ""
