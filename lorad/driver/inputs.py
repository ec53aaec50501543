"""What an attempt reads beside the weights, kept with the run: the text of its reward, and digests of the
rest.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lorad.driver.session import Session
from lorad.protocol.inputs import Input, look

OF_MODEL = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja"),
)
KEPT = "reward.py"  # in the directory of the attempt


def keep_inputs(session: Session, model: Path) -> dict[str, Input]:
    """Describe each input file, by its key of the spec or `model: file`. Raises OSError when the reward's
    text cannot be kept.
    """
    found: dict[str, Input] = {}
    if (file := session.rewarder.file) is not None:
        source = session.rewarder.source
        (session.run_dir.attempt(session.params.attempt).work / KEPT).write_bytes(source)
        mtime = file.stat().st_mtime_ns if file.exists() else 0
        found["reward"] = Input(str(file), len(source), mtime, hashlib.sha256(source).hexdigest())
    data = {"data.train": session.spec.data.train, "data.eval": session.spec.data.eval}
    for key, name in data.items():
        with contextlib.suppress(OSError):  # a task, or of the hub
            found |= (
                {key: look(Path(session.params.cwd) / Path(name).expanduser(), hashed=False)} if name else {}
            )
    for name in OF_MODEL if not session.spec.model.path.startswith("builtin:") else ():
        with contextlib.suppress(OSError):
            found[f"model: {name}"] = look(model / name)
    return found


def compare_inputs(session: Session, before: Mapping[str, Any], now: Mapping[str, Input]) -> None:
    """Warn of every file whose text changed since the attempt before; changed data are detected by their
    rows.
    """
    for key, old in msgspec.convert(before, dict[str, Input]).items():
        new = now.get(key)
        if new is not None and old.sha256 and new.sha256 != old.sha256:
            digests = f"sha256 {old.sha256[:12]}, now {new.sha256[:12]}"
            session.warn(f"{key}: {new.path} is not what it was in the attempt before ({digests})")
