"""Changes of `config.yaml` that commands make: where one backend is installed, and nothing else.

The text stays as it was written, with its comments. What cannot be changed so is refused with the lines to
write by hand.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import yaml
from yaml.nodes import MappingNode, Node

from lorad.bounds import SPEC_BYTES
from lorad.box.config import parse_config
from lorad.errors import SpecError
from lorad.files import read_file, write_whole
from lorad.spec.yaml import compose

_PLAIN = re.compile(r"[\w/][\w@%+=./~-]*")  # what YAML reads as text without quotes


def change_backend(
    path: Path, kind: str, python: str | None, env: Mapping[str, str] | None = None, *, dry_run: bool = False
) -> bool:
    """Name the interpreter of a backend in the file at `path`, and add to its environment what it lacks, or
    take the backend out where `python` is None. The old file is kept beside it, with `.1` at its end.

    dry_run: only see whether it can be done.

    Returns whether that changes anything. Raises SpecError for a file that is no configuration, or is written
    in a way that can only be changed by hand.
    """
    path = path.resolve()
    old = read_file(path, SPEC_BYTES).decode() if path.exists() else ""
    before = parse_config(old, str(path))
    env = env or {}
    entry = f"python: {_quoted(python or '')}"
    if env:
        entry += f", env: {{{', '.join(f'{name}: {_quoted(value)}' for name, value in env.items())}}}"
    by_hand = f"Write it by hand: {{{entry}}} as {kind} below backends." if python else "Do it by hand."
    refused = SpecError(f"{path}: backends.{kind} cannot be changed without touching more", hint=by_hand)
    tokens = (yaml.AnchorToken, yaml.AliasToken)
    if any(isinstance(token, tokens) for token in yaml.scan(old)):
        raise refused
    root = compose(old, str(path))
    new = _without(old, root, kind) if python is None else _with(old, root, kind, python, env)
    try:
        after = None if new is None else parse_config(new, str(path))
    except SpecError:
        after = None
    if new is None or after is None:
        raise refused
    was = before.backends.get(kind)
    expected = {name: backend for name, backend in before.backends.items() if name != kind}
    if python is not None:
        plain = {} if was is None else msgspec.to_builtins(was, enc_hook=str)
        changed = {**plain, "python": python, "env": {**plain.get("env", {}), **env}}
        expected[kind] = parse_config(json.dumps({"backends": {kind: changed}}), "").backends[kind]
    if after != msgspec.structs.replace(before, backends=expected):
        raise refused
    if new == old or dry_run:
        return new != old
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    if path.exists():
        write_whole(path.with_name(f"{path.name}.1"), old.encode(), mode=mode)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, new.encode(), mode=mode)
    return True


def _quoted(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _child(mapping: Node | None, name: str) -> Node | None:
    pairs = mapping.value if isinstance(mapping, MappingNode) else []
    return next((value for key, value in pairs if key.value == name), None)


def _with(text: str, root: Node | None, kind: str, python: str, env: Mapping[str, str]) -> str | None:
    """Return the text with a backend named; None where only a person can write it."""
    variables = f"{{{', '.join(f'{name}: {_quoted(value)}' for name, value in env.items())}}}"
    whole = f"{kind}: {{python: {_quoted(python)}{f', env: {variables}' if env else ''}}}"
    backends = _child(root, "backends")
    entry = _child(backends, kind)
    if entry is None and backends is not None:
        return _put_in(text, backends, whole)
    if entry is None:
        is_flow = isinstance(root, MappingNode) and root.flow_style
        end = "" if not text or text.endswith("\n") else "\n"
        return None if is_flow else f"{text}{end}backends:\n  {whole}\n"
    variables_of = _child(entry, "env")
    names = {name: value for name, value in env.items() if _value(variables_of, name) != value}
    if names and variables_of is not None:
        return None
    changed: str | None = text
    if names:
        changed = _put_in(text, entry, f"env: {variables}")
    if changed is None:
        return None
    place = _child(_child(_child(compose(changed, ""), "backends"), kind), "python")
    if place is None:
        return _put_in(changed, entry, f"python: {_quoted(python)}")
    if str(Path(place.value).expanduser()) == python:
        return changed
    return changed[: place.start_mark.index] + _quoted(python) + changed[place.end_mark.index :]


def _value(mapping: Node | None, name: str) -> str | None:
    node = _child(mapping, name)
    return None if node is None else str(node.value)


def _put_in(text: str, mapping: Node, line: str) -> str | None:
    """Return the text with a line before the first key of a mapping in block style; None for another."""
    if not isinstance(mapping, MappingNode) or mapping.flow_style or not mapping.value:
        return None
    mark = mapping.value[0][0].start_mark
    return f"{text[: mark.index]}{line}\n{' ' * mark.column}{text[mark.index :]}"


def _without(text: str, root: Node | None, kind: str) -> str | None:
    """Return the text without a backend; None where only a person can take it out."""
    mapping = _child(root, "backends")
    if _child(mapping, kind) is None:
        return text
    name = kind
    if isinstance(mapping, MappingNode) and len(mapping.value) == 1:  # nothing would be left below it
        mapping = root
        name = "backends"
    if not isinstance(mapping, MappingNode) or mapping.flow_style:
        return None
    key, last = next(pair for pair in mapping.value if pair[0].value == name)
    while isinstance(last, MappingNode) and not last.flow_style:  # whose own end is behind its comments
        last = last.value[-1][1]
    first = text.rfind("\n", 0, key.start_mark.index) + 1
    end = text.find("\n", last.end_mark.index)
    return text[:first] + ("" if end < 0 else text[end + 1 :])
