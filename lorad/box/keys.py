"""Keys of the door for Tinker's client: a file as `lorad/box/tokens.py` reads it, which lorad writes itself.

Only the sha256 of a key is kept.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from lorad.box.config import TinkerSettings
from lorad.box.paths import Home
from lorad.box.tokens import read_tokens
from lorad.errors import NotFound
from lorad.files import write_whole

_PREFIX, _BYTES = "tml-", 32  # the client takes no key that begins otherwise
_FILE = "keys.yaml"


def keys_file(home: Home, settings: TinkerSettings) -> Path:
    """Return the file that config.yaml names, or the one in the home."""
    return settings.keys or home.tinker / _FILE


def read_keys(path: Path) -> dict[str, list[str]]:
    """owner -> sha256 (hex) of each key; {} without a file. Raises SpecError, OSError."""
    if not path.exists():
        return {}
    return {owner: [digest.hex() for digest in digests] for owner, digests in read_tokens(path).items()}


def make_key(path: Path, owner: str) -> str:
    """Make a key of an owner and return it; it is shown nowhere again. Raises SpecError, OSError."""
    key = _PREFIX + secrets.token_urlsafe(_BYTES)
    with _locked(path):
        known = read_keys(path)
        known.setdefault(owner, []).append(hashlib.sha256(key.encode()).hexdigest())
        _write(path, known)
    return key


def revoke_key(path: Path, beginning: str) -> str:
    """Forget the key whose sha256 begins so, and return whose it was.

    Raises NotFound unless there is exactly one.
    """
    with _locked(path):
        return _revoked(path, beginning)


def _revoked(path: Path, beginning: str) -> str:
    known = read_keys(path)
    found = [(owner, key) for owner, keys in known.items() for key in keys if key.startswith(beginning)]
    if len(found) != 1 or not beginning:
        told = f"{len(found)} keys have a sha256 that begins with" if found else "no key has a sha256 like"
        raise NotFound(f"{told} {beginning!r}", hint="`lorad tinker keys` lists them.")
    owner, key = found[0]
    known[owner].remove(key)
    _write(path, {who: keys for who, keys in known.items() if keys})
    return owner


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Have no other process change the file within the block."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, known: dict[str, list[str]]) -> None:
    import yaml

    plain = {owner: [f"sha256:{digest}" for digest in digests] for owner, digests in known.items()}
    write_whole(path, yaml.safe_dump(plain).encode())
