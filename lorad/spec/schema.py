"""The spec as a JSON Schema (draft 2020-12), for editors: keys with what they mean, choices and bounds."""

import re
from typing import Any, get_args

import msgspec
from msgspec import Struct

from lorad.spec.algorithm import Algorithm
from lorad.spec.keys import meanings, struct_in
from lorad.spec.model import Spec

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_Schema = dict[str, Any]


def schema() -> _Schema:
    """Return the schema. What only several values together or the disk can show is left to `lorad check`."""
    (root,), parts = msgspec.json.schema_components([Spec], ref_template="#/$defs/{name}")
    for part in _parts(Spec, {}):
        means = meanings(part)
        of_part = parts[part.__name__]
        of_part["description"] = " ".join(of_part.get("description", "").partition("Attributes:")[0].split())
        for key, value in of_part["properties"].items():
            if key in means:
                value["description"] = means[key]
    # what `convert` allows beside the types: a name alone for algorithm and env, and no env
    keys = parts["Spec"]["properties"]
    names = parts[Algorithm.__name__]["properties"]["name"]
    short = {key: value for key, value in names.items() if key in ("enum", "type")}
    for key, more in (("algorithm", [short]), ("env", [{"type": "string"}, {"type": "null"}])):
        section = {name: value for name, value in keys[key].items() if name == "$ref"}
        others = {name: value for name, value in keys[key].items() if name not in ("$ref", "default")}
        keys[key] = {"anyOf": [*more, section], **others}
    spec = parts.pop(root["$ref"].rpartition("/")[2])
    document = {"$schema": _DIALECT, **spec, "title": "A spec of lorad", "$defs": parts}
    cleaned: _Schema = _for_editors(document)
    return cleaned


def _parts(part: type[Struct], seen: dict[type[Struct], None]) -> dict[type[Struct], None]:
    """Find a section and all inside it."""
    if part not in seen:
        seen[part] = None
        for field in msgspec.structs.fields(part):
            for inside in _structs(field.type):
                _parts(inside, seen)
    return seen


def _structs(kind: Any) -> list[type[Struct]]:
    if (direct := struct_in(kind)) is not None:
        return [direct]
    return [section for arg in get_args(kind) for section in _structs(arg)]


def _for_editors(value: Any) -> Any:
    """Write Python's `\\Z` as `$`, and leave out defaults of whole sections, which editors would insert."""
    if isinstance(value, list):
        return [_for_editors(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {
        key: _for_editors(one)
        for key, one in value.items()
        if not (key == "default" and isinstance(one, dict) and "$ref" in value)
    }
    if isinstance(pattern := kept.get("pattern"), str):
        kept["pattern"] = re.sub(r"\\Z$", "$", pattern)
    return kept
