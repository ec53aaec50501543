"""YAML that somebody wrote, as its 1.2 core schema reads it: `3e-5` is a number, `yes` and `1:30` are text.

Keys come once, and errors say the line. Nothing in it can run code, or take more time or memory than its text
should: what it holds is counted before any of it is made.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from lorad.bounds import SPEC_BYTES, YAML_ALIASES, YAML_DEPTH, YAML_DIGITS, YAML_KEY, YAML_NODES
from lorad.errors import SpecError

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_PAGE = "Such a file is a page of YAML; data goes into files of its own."


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema, with few aliases, little depth, and so many nodes."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._aliases = self._depth = self._nodes = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        if self.check_event(yaml.AliasEvent):
            self._aliases += 1
            self._refuse(self._aliases > YAML_ALIASES, f"more than {YAML_ALIASES} aliases")
        self._depth += 1
        self._nodes += 1
        self._refuse(self._depth > YAML_DEPTH, f"nested more than {YAML_DEPTH} deep")
        self._refuse(self._nodes > YAML_NODES, f"more than {YAML_NODES} keys and values")
        node: Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _refuse(self, beyond: bool, what: str) -> None:
        if beyond:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=what, problem_mark=mark)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", re.compile(r"~|null|Null|NULL|"), [*"~nN", ""]),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), [*"tTfF"]),
    ("int", _INT, [*"-+0123456789"]),
    ("float", _FLOAT, [*"-+.0123456789"]),
):
    _whole = re.compile(f"^(?:{_pattern.pattern})$")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _whole, _first)


def compose(text: str, source: str) -> Node | None:
    """Return the nodes of a text; None of an empty one. Raises SpecError beginning with `source:line:`."""
    refuse_large(text, source)
    try:
        node: Node | None = _Loader(text).get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        hint = "Check the indentation, quotes and colons there."
        raise SpecError(f"{where}: not YAML: {problem}", hint=hint) from None  # no quote: it may be a secret
    return node


def refuse_large(text: str, source: str) -> None:
    """Raise SpecError for a text of more than SPEC_BYTES bytes."""
    if len(text) > SPEC_BYTES or len(text.encode("utf-8", "surrogatepass")) > SPEC_BYTES:
        raise SpecError(f"{source}: larger than {SPEC_BYTES >> 10} KiB", hint=_PAGE)


def plain(node: Node, source: str) -> Any:
    """Return a node's value. Raises SpecError for double keys, foreign tags and endless aliases."""
    return _Plain(source).value(node)


def refuse_doubles(node: Node | None, source: str) -> None:
    """Raise SpecError for a key that is there twice, wherever it stands."""
    todo = [node]
    seen = set[int]()
    while todo:
        if (node := todo.pop()) is None or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, SequenceNode):
            todo += node.value
        if isinstance(node, MappingNode):
            todo += [inner for pair in node.value for inner in pair]
            _refuse_twice(node, source)


def _refuse_twice(node: MappingNode, source: str) -> None:
    keys = set[str]()
    for key_node, _ in node.value:
        where = f"{source}:{key_node.start_mark.line + 1}"
        key = key_node.value
        if isinstance(key_node, ScalarNode) and key != "<<" and key in keys:
            raise SpecError(f"{where}: {key}: the key is there twice", hint="Keep one of them.")
        if isinstance(key_node, ScalarNode):
            keys.add(key)


def lines(node: Node, source: str, prefix: str = "") -> dict[str, str]:
    """Return where each dotted key stands, as `source:line`."""
    places: dict[str, str] = {}
    if isinstance(node, MappingNode):
        for key_node, value_node in node.value:
            key = f"{prefix}{key_node.value}"
            places[key] = f"{source}:{key_node.start_mark.line + 1}"
            places |= lines(value_node, source, f"{key}.")
    return places


@dataclass(eq=False)
class _Plain:
    """Makes values, and counts them: what aliases repeat counts each time."""

    _source: str
    _made: int = 0

    def value(self, node: Node, inside: tuple[Node, ...] = ()) -> Any:
        where = f"{self._source}:{node.start_mark.line + 1}"
        self._made += 1
        if self._made > YAML_NODES:
            raise SpecError(f"{where}: its aliases make more than {YAML_NODES} values of it", hint=_PAGE)
        if node in inside:
            raise SpecError(f"{where}: an alias that holds itself", hint="Write the value out.")
        if isinstance(node, SequenceNode) and node.tag.endswith(":seq"):
            return [self.value(item, (*inside, node)) for item in node.value]
        if isinstance(node, ScalarNode):
            return _scalar(node, where)
        if isinstance(node, MappingNode) and node.tag.endswith(":map"):
            _refuse_twice(node, self._source)
            mapping: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = key_node.value
                where = f"{self._source}:{key_node.start_mark.line + 1}"
                if not isinstance(key_node, ScalarNode) or key == "<<":
                    raise SpecError(f"{where}: keys are plain words", hint="Write every key out.")
                if len(key) > YAML_KEY:
                    raise SpecError(f"{where}: a key of more than {YAML_KEY} characters", hint=_PAGE)
                mapping[key] = self.value(value_node, (*inside, node))
            return mapping
        raise SpecError(f"{where}: {node.tag[:80]} has no place here", hint="Leave the tag out.")


def _scalar(node: ScalarNode, where: str) -> Any:
    """Return the value of a word. Raises SpecError, also for numbers that are not finite or only overflow."""
    kind = node.tag.rpartition(":")[2]
    text = node.value
    try:
        match kind:
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                if len(text) > YAML_DIGITS:
                    raise ValueError(f"a number of more than {YAML_DIGITS} digits")
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
            case "float":
                number = float(text.replace(".", "") if text[-1].isalpha() else text)
                if not math.isfinite(number):
                    raise ValueError("not a finite number")
                return number
            case "str":
                return text
    except ValueError as error:
        raise SpecError(f"{where}: {text[:40]!r}: {error}", hint="Quote it if it is text.") from None
    raise SpecError(f"{where}: {node.tag[:80]} has no place here", hint="Leave the tag out.")
