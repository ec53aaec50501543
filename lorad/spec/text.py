"""The YAML text of a spec, with `key=value` overrides, to a checked Spec; and the JSON of a stored one.

YAML as its 1.2 core schema reads it: `3e-5` is a number, `yes` and `1:30` are text. Keys come once, and
errors say the line. Nothing in a spec can run code or blow up in memory.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

import msgspec

from lorad.bounds import OVERRIDE_CHARACTERS, OVERRIDES, OVERRIDES_CHARACTERS, YAML_DEPTH
from lorad.errors import IntegrityError, SpecError
from lorad.spec.model import Spec, convert
from lorad.spec.secrets import refuse_secret_text, refuse_secrets
from lorad.spec.yaml import compose, lines, plain, refuse_large


def load_spec(text: str, *, source: str = "spec", overrides: Sequence[str] = ()) -> Spec:
    """Return the Spec of `text`, an empty one of defaults; `overrides` (`trainer.lr=3e-5`) win over it.

    Raises SpecError beginning with `source:line:` of the key to blame, or with the override; its `others`
    have the other errors.
    """
    data, origins = _read(text, source)
    return _overridden(data, overrides, origins, source)


def load_task(text: str, *, source: str = "spec", overrides: Sequence[str] = ()) -> Spec:
    """Load a spec to start it. Raises SpecError also when it does not say what to train on."""
    data = assigned(_read(text, source)[0], overrides)
    spec = load_spec(text, source=source, overrides=overrides)
    is_empty = not data.keys() - {"name"}
    reads_data = spec.algorithm.kind != "tinker" and not spec.env.package  # which has rows of its own
    is_demo = "path" not in (data.get("model") or {}) or spec.model.path.startswith("builtin:")  # task `sort`
    if is_empty or (reads_data and "train" not in (data.get("data") or {}) and not is_demo):
        missing = ["model.path", "data.train"] if is_empty else ["data.train"]
        raise SpecError(
            f"{source}: {' and '.join(missing)} {'are' if is_empty else 'is'} missing", hint=_MISSING
        )
    return spec


def places(section: str, text: str, source: str, overrides: Sequence[str]) -> dict[str, str]:
    """Return the dotted keys of a section that a text or an override gives, and where each stands."""
    data, origins = _read(text, source)
    origins = origins | {key_of_override(written): f"override {written}" for written in overrides}
    where: dict[str, str] = {}
    parts = {section: assigned(data, overrides).get(section)}
    while parts:
        key, value = parts.popitem()
        where[key] = _place(key, origins, source)
        parts |= {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {}
    return where


def mapping(text: str, *, source: str = "spec") -> dict[str, Any]:
    """Read a text before it is a Spec. Raises SpecError for what is no mapping, and for secrets."""
    return deepcopy(_read(text, source)[0])


@lru_cache(maxsize=4)  # all points of a sweep are of one text
def _read(text: str, source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the mapping, and where each key stands."""
    refuse_large(text, source)
    refuse_secret_text(text, source)
    node = compose(text, source)
    data = (None if node is None else plain(node, source)) or {}
    if not isinstance(data, dict):
        raise SpecError(f"{source}:1: a spec is a mapping of keys, not {type(data).__name__}", hint=_EXAMPLE)
    origins = {} if node is None else lines(node, source)
    refuse_secrets(data, origins, source)
    return data, origins


def override(spec: Spec, overrides: Sequence[str]) -> Spec:
    """Return the spec with some keys changed. Raises SpecError that begins with the override to blame."""
    return _overridden(msgspec.to_builtins(spec), overrides, {}, "spec")


def _overridden(data: Any, overrides: Sequence[str], origins: dict[str, str], source: str) -> Spec:
    """Convert plain data after the overrides; `origins` says where each of their keys stands."""
    data = assigned(data, overrides)
    origins = origins | {key_of_override(text): f"override {text}" for text in overrides}
    try:
        return convert(data)
    except SpecError as error:
        others = [
            other.at(_place(other.key, origins, source))
            for other in error.others
            if isinstance(other, SpecError)
        ]
        placed = error.at(_place(error.key, origins, source))
        placed.others = tuple(others)
        raise placed from None


def assigned(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a mapping with some keys set, not checked as a Spec. Raises SpecError with the override."""
    refuse_many(overrides)
    data = dict(data)
    for text in overrides:
        key, value = _split(text)
        refuse_secrets({key: value}, {}, "override")
        data = _set(data, key.split("."), value, text)
    return data


def merged(before: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Add overrides to those of a run: the newest of each key, and none within a section that is set whole
    later.

    Raises SpecError where these are too many or too long.
    """
    kept: dict[str, str] = {}
    for text in reversed([*before, *overrides]):
        parts = key_of_override(text).split(".")
        if not any(".".join(parts[:place]) in kept for place in range(1, len(parts) + 1)):
            kept[".".join(parts)] = text
    refuse_many([*kept.values()])
    return [*reversed(kept.values())]


def refuse_many(overrides: Sequence[str]) -> None:
    """Raise SpecError for more than OVERRIDES, or OVERRIDES_CHARACTERS characters of them together."""
    hint = "Put them into the spec."
    if len(overrides) > OVERRIDES:
        raise SpecError(f"{len(overrides)} overrides are more than {OVERRIDES}", hint=hint)
    if (size := sum(map(len, overrides))) > OVERRIDES_CHARACTERS:
        raise SpecError(f"overrides of {size} characters are more than {OVERRIDES_CHARACTERS}", hint=hint)


def refuse_long(override: str) -> None:
    """Raise SpecError for an override of more than OVERRIDE_CHARACTERS characters."""
    if (size := len(override)) > OVERRIDE_CHARACTERS:
        problem = f"override {override[:60]}…: it has {size} characters, more than {OVERRIDE_CHARACTERS}"
        raise SpecError(problem, hint="Put what is long into the spec.")


def key_of_override(text: str) -> str:
    """Return the key of an override, whose value is not looked at. Raises SpecError."""
    refuse_long(text)
    key, equals, _ = text.partition("=")
    parts = key.strip().split(".", YAML_DEPTH)
    if not equals or not all(parts) or len(parts) > YAML_DEPTH:
        raise SpecError(
            f"override {text[:200]}: not of the form key=value", hint="For example trainer.lr=3e-5."
        )
    return key.strip()


class _SpecOfAnotherLorad(IntegrityError, msgspec.ValidationError):
    """A stored spec has keys or values that this lorad does not know."""


def from_json(data: bytes) -> Spec:
    """Read a stored spec (`to_json`). Raises an IntegrityError that is a msgspec.ValidationError as well."""
    try:
        return msgspec.json.decode(data, type=Spec)
    except msgspec.MsgspecError as error:
        raise _SpecOfAnotherLorad(
            f"the run's spec is of another lorad: {error}",
            hint="Its figures, samples and versions can still be read and exported. Go on with the lorad "
            "that began it, or begin anew: `lorad run` with its spec.yaml.",
        ) from None


_MISSING = (
    "Say what to train on: data.train is a file of rows (.jsonl), a hub dataset or a builtin task (sort, "
    "reverse), and reward is what scores a completion. `lorad init` writes a spec to start from."
)
_EXAMPLE = "Write `key: value` lines; `lorad init` makes a spec to begin with."


@lru_cache(maxsize=OVERRIDES)  # a request looks at each several times, and so do the points of a sweep
def _split(override: str) -> tuple[str, Any]:
    """Return the key of an override and its value, which nobody changes. Raises SpecError."""
    key = key_of_override(override)
    text = override.partition("=")[2]
    refuse_secret_text(text, "override")
    node = compose(text, f"override {override}")
    return key, None if node is None else plain(node, f"override {override}")


def _set(data: Mapping[str, Any], path: Sequence[str], value: Any, override: str) -> dict[str, Any]:
    """Return a copy of `data` with `value` at `path`."""
    first = path[0]
    rest = path[1:]
    if not rest:
        return {**data, first: value}
    inner = data.get(first)
    if first in ("reward", "algorithm", "env") and isinstance(inner, str):
        inner = {"name": inner}
    if inner is not None and not isinstance(inner, dict):
        raise SpecError(
            f"override {override}: {first} is {inner!r}, it has no keys", hint=f"Set {first} itself."
        )
    return {**data, first: _set(inner or {}, rest, value, override)}


def _place(key: str, origins: Mapping[str, str], source: str) -> str:
    """Return the line of a key, else that of the section around it."""
    while key and key not in origins:
        key = key.rpartition(".")[0]
    return origins.get(key, source)
