"""Paths in `key=value` that were typed on the command line begin where the shell is,
not where the spec lies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

DATA = ("data.train", "data.eval")
REWARD = ("reward", "reward.name")
FILES = ("lora.adapter_path", "rollout.key_file", "rollout.admin_key_file")
REFERENCE = "algorithm.kl.reference"
KEYS = (*DATA, *REWARD, "model.path", REFERENCE, *FILES)  # whose values may be paths
DATA_FILES = (".jsonl", ".parquet")


def from_here(overrides: Sequence[str]) -> list[str]:
    """Make paths absolute; tasks, builtin rewards, hub ids and everything else stay as they are."""
    return [changed(override, Path.cwd()) for override in overrides]


def changed(override: str, cwd: Path) -> str:
    key, equals, text = override.partition("=")
    if not equals or key.strip() not in KEYS:
        return override
    # a sweep separates by commas
    values = [text] if text.lstrip()[:1] in ("'", '"', "{", "[") else text.split(",")
    return f"{key}={','.join(anchored(key.strip(), value, cwd) for value in values)}"


def anchored(key: str, text: str, cwd: Path) -> str:
    value = text.strip()
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        value = value[1:-1]
    if not value or value[0] in "/~[{" or value == "null" or not is_path(key, value, cwd):
        return text
    return json.dumps(os.path.normpath(cwd / value), ensure_ascii=False)


def is_path(key: str, value: str, cwd: Path) -> bool:
    if key in DATA:
        return value.lower().endswith(DATA_FILES)
    if key in REWARD:
        return ":" in value
    if key == REFERENCE:
        return value.startswith(".") or (cwd / value).is_dir()
    if key == "model.path":
        return (value.startswith(".") or (cwd / value).is_dir()) and not value.startswith("builtin:")
    return True
