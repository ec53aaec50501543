"""Makes the keys that open the door for Tinker's client and a home's gateway, and keeps them private.

The door's are in a file as `lorad/box/tokens.py` reads it. Only the sha256 of a key is kept there. The user
who made it with `lorad tinker env` has the key itself in a file of their own, as other command lines keep
theirs: `~/.config/lorad/tinker-keys.json`, mode 0600, by home.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from lorad.box.config import TinkerSettings
from lorad.box.paths import Home
from lorad.box.private import read_private
from lorad.box.tokens import read_tokens
from lorad.errors import NotFound, SpecError
from lorad.files import write_whole

_PREFIX = "tml-"  # the client takes no key that begins otherwise
_BYTES = 32
_GATEWAY_PREFIX = "sk-lorad-"
_OWN_FILE = "lorad/tinker-keys.json"
_OWN_BYTES = 1 << 20


def keys_file(home: Home, settings: TinkerSettings) -> Path:
    """Return the file that config.yaml names, or the one in the home."""
    return settings.keys or home.tinker / "keys.yaml"


def read_keys(path: Path) -> dict[str, list[str]]:
    """Return the sha256 (hex) of each key by owner; {} without a file. Raises SpecError, OSError."""
    if not path.exists():
        return {}
    return {owner: [digest.hex() for digest in digests] for owner, digests in read_tokens(path).items()}


def make_key(path: Path, owner: str) -> str:
    """Make a key of an owner and return it; it is shown nowhere again. Raises SpecError, OSError."""
    key = _PREFIX + secrets.token_urlsafe(_BYTES)
    with _locked(path):
        digests = read_keys(path)
        digests.setdefault(owner, []).append(hashlib.sha256(key.encode()).hexdigest())
        _write(path, digests)
    return key


def revoke_key(path: Path, beginning: str) -> str:
    """Forget the only key whose sha256 begins so, and return its owner. Raises NotFound."""
    with _locked(path):
        digests = read_keys(path)
        pairs = [(owner, key) for owner, keys in digests.items() for key in keys]
        fitting = [pair for pair in pairs if pair[1].startswith(beginning)]
        if len(fitting) != 1 or not beginning:
            several = f"{len(fitting)} keys have a sha256 that begins with"
            raise NotFound(
                f"{several if fitting else 'no key has a sha256 like'} {beginning!r}",
                hint="`lorad tinker keys` lists them.",
            )
        owner, key = fitting[0]
        digests[owner].remove(key)
        _write(path, {who: keys for who, keys in digests.items() if keys})
    return owner


def gateway_key(home: Home, *, new: bool = False) -> str:
    """Return the key of the home's owner for the port of their gateway, and keep it in a file of its own.

    It is new where there is none, where others may have read it, and with `new`. Raises OSError.
    """
    path = home.gateway_key
    with _locked(path):
        if not new:
            with contextlib.suppress(OSError, SpecError):
                return read_private(path, _OWN_BYTES, links=False).decode()
        key = _GATEWAY_PREFIX + secrets.token_urlsafe(_BYTES)
        write_whole(path, key.encode())
        return key


def own_key(home: Home) -> str:
    """Return the key of this user for a home; "" where none was kept. Raises SpecError, OSError."""
    return _own_keys(_own_file()).get(str(home.root), "")


def keep_own_key(home: Home, key: str) -> None:
    """Keep the key of this user for a home, instead of the one before. Raises SpecError, OSError."""
    path = _own_file()
    with _locked(path):
        write_whole(path, json.dumps(_own_keys(path) | {str(home.root): key}, indent=1).encode())


def _own_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / _OWN_FILE


def _own_keys(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    text = read_private(path, _OWN_BYTES)
    try:
        keys = json.loads(text)
    except ValueError:  # its own words would quote the file
        keys = None
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys.values()):
        raise SpecError(f"{path} is not a file of keys", hint="Remove it; the next command makes a new key.")
    return keys


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


def _write(path: Path, digests: dict[str, list[str]]) -> None:
    import yaml

    plain = {owner: [f"sha256:{digest}" for digest in own] for owner, own in digests.items()}
    write_whole(path, yaml.safe_dump(plain).encode())
