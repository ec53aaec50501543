"""The YAML text of a spec, with `key=value` overrides, to a checked Spec; and the JSON of a stored one.

YAML as its 1.2 core schema reads it: `3e-5` is a number, `yes` and `1:30` are text. Keys come once, and errors say
the line. Nothing in a spec can run code or blow up in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from lorad.errors import SpecError
from lorad.specs import Spec, convert

SIZE_LIMIT = 1 << 20  # bytes
ALIAS_LIMIT = 20
DEPTH_LIMIT = 32
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def load_spec(text: str, *, source: str = "spec", overrides: Sequence[str] = ()) -> Spec:
    """The Spec of `text`; `overrides` (`trainer.lr=3e-5`) win over it. An empty text is a spec of defaults.

    Raises SpecError beginning with `source:line:` of the key to blame, or with the override.
    """
    node = _compose(text, source)
    data = (None if node is None else _plain(node, source)) or {}
    if not isinstance(data, dict):
        raise SpecError(f"{source}:1: a spec is a mapping of keys, not {type(data).__name__}", hint=_EXAMPLE)
    return _overridden(data, overrides, {} if node is None else _lines(node, source), source)


def override(spec: Spec, overrides: Sequence[str]) -> Spec:
    """`spec` with some keys changed. Raises SpecError that begins with the override to blame."""
    return _overridden(msgspec.to_builtins(spec), overrides, {}, "spec")


def _overridden(data: Any, overrides: Sequence[str], origins: dict[str, str], source: str) -> Spec:
    """origins: where each key of `data` stands."""
    for text in overrides:
        key, value = _split(text)
        data = _set(data, key.split("."), value, text)
        origins[key] = f"override {text}"
    try:
        return convert(data)
    except SpecError as error:
        raise SpecError(_located(error.message, origins, source), hint=error.hint) from None


def overridden(text: str) -> str:
    """The key of an override. Raises SpecError."""
    return _split(text)[0]


def from_json(data: bytes) -> Spec:
    """A stored spec (`lorad.specs.to_json`), also of the release before `trainer.cp`, whose defaults were others.

    There `lora` and one device were in every spec, and meant what `canonical_lora` and none mean now. Raises
    msgspec.ValidationError.
    """
    spec = msgspec.json.decode(data, type=Spec)
    if "cp" in msgspec.json.decode(data, type=dict[str, Any]).get("trainer", {}):
        return spec
    lora = msgspec.structs.replace(spec.lora, type="canonical_lora")
    if spec.rollout.tp * spec.rollout.servers > 1:  # servers that share the device
        return msgspec.structs.replace(spec, lora=lora)
    return msgspec.structs.replace(spec, lora=lora, resources=msgspec.structs.replace(spec.resources, devices=None))


_EXAMPLE = "Write `key: value` lines; `lorad init` makes a spec to begin with."


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema, with few aliases and little depth."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._aliases = 0
        self._depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        if self.check_event(yaml.AliasEvent):
            self._aliases += 1
            if self._aliases > ALIAS_LIMIT:
                raise yaml.YAMLError(f"more than {ALIAS_LIMIT} aliases")
        self._depth += 1
        if self._depth > DEPTH_LIMIT:
            raise yaml.YAMLError(f"nested more than {DEPTH_LIMIT} deep")
        node: Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", re.compile(r"~|null|Null|NULL|"), [*"~nN", ""]),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), [*"tTfF"]),
    ("int", _INT, [*"-+0123456789"]),
    ("float", _FLOAT, [*"-+.0123456789"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern.pattern})$"), _first)


def _compose(text: str, source: str) -> Node | None:
    if len(text.encode("utf-8", "surrogatepass")) > SIZE_LIMIT:
        raise SpecError(f"{source}: larger than 1 MiB", hint="A spec is a page of YAML; data goes into its own files.")
    try:
        loader = _Loader(text)
        node: Node | None = loader.get_single_node()
    except yaml.YAMLError as error:
        raise _not_yaml(error, source) from None
    return node


def _not_yaml(error: yaml.YAMLError, source: str) -> SpecError:
    mark = getattr(error, "problem_mark", None)
    where = f"{source}:{mark.line + 1}" if mark else source
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return SpecError(f"{where}: not YAML: {problem}", hint="Check the indentation, quotes and colons there.")


def _plain(node: Node, source: str, inside: tuple[Node, ...] = ()) -> Any:
    """The value of a node. Raises SpecError with the line for doubled keys, foreign tags and endless aliases."""
    where = f"{source}:{node.start_mark.line + 1}"
    if node in inside:
        raise SpecError(f"{where}: an alias that holds itself", hint="Write the value out.")
    if isinstance(node, SequenceNode) and node.tag.endswith(":seq"):
        return [_plain(item, source, (*inside, node)) for item in node.value]
    if isinstance(node, MappingNode) and node.tag.endswith(":map"):
        return _mapping(node, source, inside)
    if isinstance(node, ScalarNode):
        return _scalar(node, where)
    raise SpecError(f"{where}: {node.tag} has no place in a spec", hint="Leave the tag out.")


def _mapping(node: MappingNode, source: str, inside: tuple[Node, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, line = key_node.value, key_node.start_mark.line + 1
        if not isinstance(key_node, ScalarNode) or key == "<<":
            raise SpecError(f"{source}:{line}: keys are plain words", hint="Write every key out.")
        if key in found:
            raise SpecError(f"{source}:{line}: {key}: the key is there twice", hint="Keep one of them.")
        found[key] = _plain(value_node, source, (*inside, node))
    return found


def _scalar(node: ScalarNode, where: str) -> Any:
    kind, text = node.tag.rpartition(":")[2], node.value
    try:
        match kind:
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
            case "float":
                return _finite(text)
            case "str":
                return text
    except ValueError as error:
        raise SpecError(f"{where}: {text[:40]!r}: {error}", hint="Quote it if it is text.") from None
    raise SpecError(f"{where}: {node.tag} has no place in a spec", hint="Leave the tag out.")


def _finite(text: str) -> float:
    """Raises ValueError for infinities and NaN, also for those that only overflow: no key takes them."""
    number = float(text.replace(".", "") if text[-1].isalpha() else text)
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


def _lines(node: Node, source: str, prefix: str = "") -> dict[str, str]:
    """Dotted key -> `source:line`."""
    found: dict[str, str] = {}
    if isinstance(node, MappingNode):
        for key_node, value_node in node.value:
            key = f"{prefix}{key_node.value}"
            found[key] = f"{source}:{key_node.start_mark.line + 1}"
            found |= _lines(value_node, source, f"{key}.")
    return found


def _split(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise SpecError(f"override {override}: not of the form key=value", hint="For example trainer.lr=3e-5.")
    node = _compose(text, f"override {override}")
    return key.strip(), None if node is None else _plain(node, f"override {override}")


def _set(data: Mapping[str, Any], path: Sequence[str], value: Any, override: str) -> dict[str, Any]:
    """A copy of `data` with `value` at `path`."""
    first, rest = path[0], path[1:]
    if not rest:
        return {**data, first: value}
    inner = data.get(first)
    if first == "reward" and isinstance(inner, str):
        inner = {"name": inner}
    if inner is not None and not isinstance(inner, dict):
        raise SpecError(f"override {override}: {first} is {inner!r}, it has no keys", hint=f"Set {first} itself.")
    return {**data, first: _set(inner or {}, rest, value, override)}


def _located(message: str, origins: Mapping[str, str], source: str) -> str:
    """`message` begins with a dotted key; its line, else that of the section around it, goes before."""
    key = re.match(r"[^:\s\[]*", message)
    path = key.group() if key else ""
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return f"{origins.get(path, source)}: {message}"
