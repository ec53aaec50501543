"""Decides who may ask.

On the socket that is this user and root, by the kernel's word, or all users if a shared daemon lets all see
everything; on TCP it is who has a token, see `lorad/box/tokens.py`.
"""

import hashlib
import hmac
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from lorad.box.tokens import Digests, Stamp, read_tokens, stamp_of
from lorad.errors import SpecError
from lorad.gateway.errors import ApiError
from lorad.protocol.listener import may_call, uid_of, user_name

log = logging.getLogger(__name__)


class Access:
    """tokens: None when there is no TCP. for_all: every user of the machine may ask on the socket.

    private: this is the gateway of several owners, each of whom may ask for their own versions alone.
    """

    def __init__(self, tokens: Path | None, *, for_all: bool = False, private: bool = False) -> None:
        self._tokens, self._for_all, self._private = tokens, for_all, private
        self._stamp: Stamp = None
        self._digests: Digests = {}

    def owner(self, request: web.Request) -> str:
        """Return who asks. Raises ApiError 401 and 403."""
        peer: socket.socket | None = request.transport.get_extra_info("socket") if request.transport else None
        if peer is None:
            raise ApiError(400, "The connection is gone.")
        if peer.family == socket.AF_UNIX:
            if not self._for_all and not may_call(peer):
                raise ApiError(
                    403, "This gateway belongs to another user.", kind="permission_error", code="not_allowed"
                )
            return user_name(uid_of(peer))
        return self._bearer(request.headers.get("Authorization", ""))

    def viewer(self, request: web.Request) -> Callable[[int | None], bool]:
        """Return a function that says whether the client may see versions of a uid.

        Raises what `owner` raises.
        """
        asker = self.owner(request) if self._private else ""
        if not self._private or asker in (user_name(0), user_name(os.geteuid())):
            return lambda owner_uid: True
        return lambda owner_uid: owner_uid is None or asker == user_name(owner_uid)

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
