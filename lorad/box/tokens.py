"""The file of tokens by which a gateway, or the door for Tinker's client, knows who asks it over TCP.

YAML, of owner -> token or list of tokens. A token may stand there as `sha256:` and the digest in hex. The
file must be readable by its owner only, and is read again when it changes.
"""

import contextlib
import hashlib
import hmac
import logging
from pathlib import Path

from lorad.box.config import GatewaySettings
from lorad.box.private import read_private
from lorad.errors import SpecError

_DIGEST = "sha256:"
_MOST_BYTES = 1 << 20
_SHORTEST = 16  # characters of a token; shorter ones can be guessed
_Digests = dict[str, list[bytes]]

log = logging.getLogger(__name__)


class Tokens:
    """Owners by their tokens. A changed file is read again; None and a useless file let nobody in."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._stamp: tuple[int, ...] | None = None
        self._digests: _Digests = {}

    def owner(self, token: str) -> str | None:
        """Return whose token it is; None for nobody's. A header may have any bytes in it."""
        if self._path is None:
            return None
        stamp: tuple[int, ...] = ()  # changes with the file, its mode or its owner
        with contextlib.suppress(OSError):
            status = self._path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
        if stamp != self._stamp:
            self._digests = {}
            self._stamp = stamp
            try:
                self._digests = read_tokens(self._path)
            except (OSError, SpecError) as error:
                log.error("nobody is let in by a token: %s", error)
        digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        holder = None
        for owner, digests in self._digests.items():
            for stored in digests:
                if hmac.compare_digest(digest, stored):
                    holder = owner  # all are compared, whichever fits
        return holder


def tokens_trouble(settings: GatewaySettings) -> str:
    """Return why nobody is let in over TCP, with what to do; "" where all is well, or it is not asked for."""
    if settings.tokens is None:
        return ""
    try:
        owners = read_tokens(settings.tokens)
    except OSError as error:
        advice = "Write `owner: token` into it, one a line, and chmod 600 it."
        why = f"{settings.tokens}: {error.strerror}. {advice}"
    except SpecError as error:
        why = f"{error.message}. {error.hint}"
    else:
        why = "" if owners else f"{settings.tokens} names no owners. Write `owner: token`, one a line."
    return f"gateway.tokens of config.yaml: {why} Until then everybody gets 401 over TCP." if why else ""


def read_tokens(path: Path) -> _Digests:
    """Map each owner to the sha256 of each of their tokens. Raises SpecError, OSError."""
    import yaml

    try:
        data = yaml.safe_load(read_private(path, _MOST_BYTES).decode())
    except (yaml.YAMLError, UnicodeDecodeError):  # its words would quote the file
        raise SpecError(f"{path} is not YAML", hint="Write `owner: token`, one a line.") from None
    if not isinstance(data, dict):
        raise SpecError(f"{path} names no owners", hint="Write `owner: token`, one a line.")
    digests: _Digests = {}
    for owner, entry in data.items():
        digests[str(owner)] = []
        for token in entry if isinstance(entry, list) else [entry]:
            if isinstance(token, str) and token.startswith(_DIGEST):
                digest = b""
                with contextlib.suppress(ValueError):
                    digest = bytes.fromhex(token.removeprefix(_DIGEST))
                if len(digest) != hashlib.sha256().digest_size:
                    raise SpecError(f"{path} has a sha256 that is none", hint="It is 64 hexadecimal digits.")
            elif isinstance(token, str) and len(token) >= _SHORTEST:
                digest = hashlib.sha256(token.encode()).digest()
            else:
                raise SpecError(
                    f"{path} has a token that is no string of at least {_SHORTEST} characters",
                    hint="Quote it.",
                )
            digests[str(owner)].append(digest)
    return digests
