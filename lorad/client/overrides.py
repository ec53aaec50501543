"""Read the file of a spec as a user names it, and make paths absolute in `key=value` as typed beside it.

There they begin at the working directory, and not at the directory of the spec.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lorad.box.paths import Home
from lorad.client.boxes.hosts import Place, place
from lorad.errors import SpecError
from lorad.files import expanded

_SIZE_LIMIT = 1 << 20  # bytes of a spec; an endless file is read no further
_DATA = ("data.train", "data.eval")
_FUNCTIONS = ("reward", "reward.name", "algorithm.loss", "algorithm.advantage")
_FILES = (
    *("lora.adapter_path", "rollout.key_file", "rollout.admin_key_file"),
    *("reward.python", "reward.key_file", "reward.cache"),
)
_REFERENCE = "algorithm.kl.reference"
_MODELS = ("model.path", "algorithm.teacher")
KEYS = (*_DATA, *_FUNCTIONS, *_MODELS, _REFERENCE, *_FILES)  # whose values may be paths
_OF_SETS = {"data": "data.eval", "reward": "reward", "name": "reward.name", "python": "reward.python"}
"""By a key of a set of held-out problems, the key of a run that means the same."""
_DATA_FILES = (".jsonl", ".parquet", ".csv", ".json")


def read_spec(spec: str) -> tuple[str, str, Path]:
    """Return the text, its name in messages, and the directory where its relative paths begin.

    spec: a file's name, or `-` for stdin.

    Raises SpecError for what cannot be read.
    """
    path = expanded(spec)
    source = "<stdin>" if spec == "-" else spec
    try:
        with sys.stdin.buffer if spec == "-" else path.open("rb") as file:
            data = file.read(_SIZE_LIMIT + 1)
        if len(data) > _SIZE_LIMIT:
            hint = "A spec is a page of YAML; data goes into its own files."
            raise SpecError(f"{source}: larger than 1 MiB", hint=hint)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SpecError(f"{source}: {reason}", hint="`lorad init` writes a spec to start from.") from None
    return text, source, Path.cwd() if spec == "-" else path.absolute().parent


def from_here(overrides: Sequence[str], where: "Place | None" = None) -> list[str]:
    """Make paths absolute; tasks, builtin rewards, hub ids and everything else stay as they are.

    where: the home that they are for; by default that of the commands of this process.
    """
    if not isinstance(where or place(), Home):  # they are paths of another machine
        return [*overrides]
    return [changed(override, Path.cwd()) for override in overrides]


def changed(override: str, cwd: Path) -> str:
    """Make the paths of one `key=value` absolute."""
    key, equals, text = override.partition("=")
    meaning = key.strip()
    section, _, last = meaning.rpartition(".")
    if section.startswith("eval.sets."):
        meaning = _OF_SETS.get(last, meaning)
    if not equals or meaning not in KEYS:
        return override
    # a sweep separates by commas
    values = [text] if text.lstrip()[:1] in ("'", '"', "{", "[") else text.split(",")
    return f"{key}={','.join(_anchored(meaning, value, cwd) for value in values)}"


def _anchored(key: str, text: str, cwd: Path) -> str:
    """Make the paths of a value absolute. What cannot be read stays, and is refused later."""
    value = text.strip()
    if key in _DATA and value[:1] in ("[", "{"):
        from lorad.spec.yaml import compose, plain  # slow: completion reads this module too

        try:
            node = compose(value, "override")
            sources = None if node is None else plain(node, "override")
        except SpecError:
            return value

        def anchored(name: Any) -> Any:
            is_file = isinstance(name, str) and name[:1] not in ("/", "~") and _is_path(_DATA[0], name, cwd)
            return os.path.normpath(cwd / name) if is_file else name

        if isinstance(sources, dict):
            return json.dumps({anchored(name): share for name, share in sources.items()}, ensure_ascii=False)
        if isinstance(sources, list):
            return json.dumps([anchored(name) for name in sources], ensure_ascii=False)
        return value
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        value = value[1:-1]
    if not value or value[0] in "/~[{" or value == "null" or not _is_path(key, value, cwd):
        return text
    return json.dumps(os.path.normpath(cwd / value), ensure_ascii=False)


def _is_path(key: str, value: str, cwd: Path) -> bool:
    """Check whether the value of a key is a path, and not the name of something builtin or on the hub."""
    if key in _DATA:
        return value.lower().endswith(_DATA_FILES)
    if key in _FUNCTIONS:
        return ":" in value
    if key == _REFERENCE:
        return value.startswith(".") or (cwd / value).is_dir()
    if key in _MODELS:
        return (value.startswith(".") or (cwd / value).is_dir()) and not value.startswith("builtin:")
    return True
