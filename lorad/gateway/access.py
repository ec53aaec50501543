"""Who may ask: on the socket this user and root, by the kernel's word, or all users where a shared daemon lets all see
everything; on TCP who has a token.

The file of tokens is YAML, of owner -> token or list of tokens. A token may stand there as `sha256:` and the digest in
hex. It must be readable by its owner only, and is read again when it changes.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import pwd
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from lorad.errors import SpecError
from lorad.gateway.errors import ApiError
from lorad.protocol.listener import may_call, uid_of

log = logging.getLogger(__name__)

DIGEST = "sha256:"
SHORTEST = 16  # characters of a token; shorter ones can be guessed
Digests = dict[str, list[bytes]]
Stamp = tuple[int, ...] | None


class Access:
    """tokens: None when there is no TCP. for_all: every user of the machine may ask on the socket.

    private: this is the gateway of several owners, each of whom may ask for their own versions alone.
    """

    def __init__(self, tokens: Path | None, *, for_all: bool = False, private: bool = False) -> None:
        self._tokens, self._for_all, self._private = tokens, for_all, private
        self._stamp: Stamp = None
        self._digests: Digests = {}

    def owner(self, request: web.Request) -> str:
        """Who asks. Raises ApiError 401 and 403."""
        peer: socket.socket | None = request.transport.get_extra_info("socket") if request.transport else None
        if peer is None:
            raise ApiError(400, "The connection is gone.")
        if peer.family == socket.AF_UNIX:
            if not self._for_all and not may_call(peer):
                raise ApiError(
                    403, "This gateway belongs to another user.", kind="permission_error", code="not_allowed"
                )
            return name_of(uid_of(peer))
        return self._bearer(request.headers.get("Authorization", ""))

    def sees(self, request: web.Request, owner_uid: int | None) -> bool:
        """Whether whoever asks may know of a version of this user's. Raises as `owner` does."""
        if not self._private or owner_uid is None:
            return True
        return self.owner(request) in (name_of(owner_uid), name_of(0), name_of(os.geteuid()))

    def _bearer(self, header: str) -> str:
        scheme, _, token = header.partition(" ")
        digest = hashlib.sha256(token.strip().encode()).digest()
        found = None
        for owner, digests in self._known().items():
            for known in digests:
                if hmac.compare_digest(digest, known):
                    found = owner  # all are compared, whichever fits
        if scheme.lower() != "bearer" or found is None:
            raise ApiError(401, "Give a token of this gateway as API key.", code="invalid_api_key")
        return found

    def _known(self) -> Digests:
        """A file that cannot be used lets nobody in."""
        if self._tokens is None:
            return {}
        stamp = stamp_of(self._tokens)
        if stamp != self._stamp:
            self._digests, self._stamp = {}, stamp
            try:
                self._digests = read_tokens(self._tokens)
            except (OSError, SpecError) as error:
                log.error("nobody is let in by a token: %s", error)
        return self._digests


def stamp_of(path: Path) -> Stamp:
    """Another one when the file, its mode or its owner changed; empty when there is none."""
    try:
        there = path.stat()
    except OSError:
        return ()
    return there.st_ino, there.st_mtime_ns, there.st_ctime_ns, there.st_size


def read_tokens(path: Path) -> Digests:
    """owner -> sha256 of each token. Raises SpecError, OSError."""
    import yaml

    there = path.stat()
    if there.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or there.st_uid not in (os.getuid(), 0):
        raise SpecError(f"{path} is readable by others", hint=f"chmod 600 {path}")
    try:
        data = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):  # its words would quote the file
        raise SpecError(f"{path} is not YAML", hint="Write `owner: token`, one a line.") from None
    if not isinstance(data, dict):
        raise SpecError(f"{path} names no owners", hint="Write `owner: token`, one a line.")
    return {str(owner): [digest_of(token, path) for token in several(given)] for owner, given in data.items()}


def several(given: Any) -> Iterator[Any]:
    yield from given if isinstance(given, list) else [given]


def digest_of(token: Any, path: Path) -> bytes:
    if isinstance(token, str) and token.startswith(DIGEST):
        try:
            digest = bytes.fromhex(token.removeprefix(DIGEST))
        except ValueError:
            digest = b""
        if len(digest) == hashlib.sha256().digest_size:
            return digest
        raise SpecError(f"{path} has a sha256 that is none", hint="It is 64 hexadecimal digits.")
    if not isinstance(token, str) or len(token) < SHORTEST:
        raise SpecError(f"{path} has a token that is no string of at least {SHORTEST} characters", hint="Quote it.")
    return hashlib.sha256(token.encode()).digest()


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
