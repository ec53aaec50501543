"""Name a backend in `config.yaml`, whose other lines and comments stay as they were written."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from yaml.nodes import MappingNode

from lorad.box.config import load, parse_config
from lorad.errors import SpecError
from lorad.files import write_whole
from lorad.spec.yaml import compose

_PLAIN = re.compile(r"[\w/][\w@%+=./~-]*")  # what YAML reads as text without quotes, also in braces


def name_backend(
    path: Path, kind: str, python: Path, env: Mapping[str, str], *, dry_run: bool = False
) -> bool:
    """Write where a backend is installed into the file at `path`; the old file becomes `.1` beside it.

    env: variables that the backend needs; others of the file stay.
    dry_run: only see whether it can be written.

    Returns whether that changes anything. Raises SpecError for a file that is no configuration, and, with the
    lines to write by hand, for one in flow style or with an anchor in the way.
    """
    path = path.resolve()
    before = load(path)
    old = path.read_bytes().decode() if path.exists() else ""
    plain = yaml.safe_load(old) or {}
    backends = plain.get("backends", {})
    entry = {**backends.get(kind, {}), "python": str(python)}
    if env:
        entry["env"] = {**entry.get("env", {}), **env}
    expected = {**plain, "backends": {**backends, kind: entry}}
    after = parse_config(yaml.safe_dump(expected), str(path))
    if after == before:
        return False
    new = old
    try:
        for keys, text in [*((("env", name), env[name]) for name in env), (("python",), str(python))]:
            new = _with(new, ("backends", kind, *keys), text if _PLAIN.fullmatch(text) else json.dumps(text))
        is_right = parse_config(new, str(path)) == after
    except SpecError:
        is_right = False
    if not is_right:
        lines = yaml.safe_dump({"backends": {kind: entry}}, sort_keys=False)
        raise SpecError(
            f"{path}: flow style or an anchor stands where backends.{kind} has to be written",
            hint=f"Write it by hand:\n{lines}",
        )
    if not dry_run:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        if path.exists():
            write_whole(path.with_name(f"{path.name}.1"), old.encode(), mode=mode)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, new.encode(), mode=mode)
    return True


def _with(text: str, keys: Sequence[str], value: str) -> str:
    """Return a text of YAML with a value at the end of a path of keys.

    Raises SpecError where the next key belongs into an empty mapping, or into flow style above a backend.
    """
    node = compose(text, "")
    depth = 0
    while isinstance(node, MappingNode) and depth < len(keys):
        values = [below for key, below in node.value if key.value == keys[depth]]
        if not values:
            break
        node = values[0]
        depth += 1
    if depth == len(keys) and node is not None:
        return text[: node.start_mark.index] + value + text[node.end_mark.index :]
    for key in reversed(keys[depth + 1 :]):
        value = f"{{{key}: {value}}}"
    is_flow = isinstance(node, MappingNode) and bool(node.flow_style)
    if depth == 0 and not is_flow:
        end = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{end}{keys[0]}:\n  {value[1:-1]}\n"
    if not isinstance(node, MappingNode) or not node.value or (is_flow and depth < 2):
        raise SpecError("flow style")
    mark = node.value[0][0].start_mark
    gap = ", " if is_flow else "\n" + " " * mark.column
    return f"{text[: mark.index]}{keys[depth]}: {value}{gap}{text[mark.index :]}"
