"""Who may ask: owners by their keys, `tml-` and at least 16 characters, in a file as the gateway's tokens are
(`lorad/box/tokens.py`).
"""

import hashlib
import hmac
import logging
import os
from pathlib import Path

from aiohttp import web

from lorad.box.tokens import Digests, Stamp, read_tokens, stamp_of
from lorad.errors import SpecError
from lorad.protocol.listener import may_call, user_name
from lorad.tinker.door.errors import HttpError

KEYS = "keys.yaml"  # in the door's directory, where config.yaml names no other file

log = logging.getLogger(__name__)


class Keys:
    """The file is read again when it changes; one that cannot be used lets nobody in."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: Stamp = None
        self._digests: Digests = {}

    def owner_of(self, request: web.Request) -> str:
        """Return whose key a request has. Raises HttpError 401.

        The client of the Hugging Face hub sends it as a token, where HF_TOKEN names it.
        """
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.owner(request.headers.get("X-API-Key", token))

    def owner(self, key: str) -> str:
        """Return whose key it is. Raises HttpError 401."""
        digest, found = hashlib.sha256(key.encode()).digest(), None
        for owner, digests in self._known().items():
            for known in digests:
                if hmac.compare_digest(digest, known):
                    found = owner  # all are compared, whichever fits
        if found is None:
            raise HttpError(401, "this is no key of this server: `lorad tinker env` prints TINKER_API_KEY")
        return found

    def _known(self) -> Digests:
        stamp = stamp_of(self._path)
        if stamp != self._stamp:
            self._digests, self._stamp = {}, stamp
            try:
                self._digests = read_tokens(self._path)
            except (OSError, SpecError) as error:
                log.error("nobody is let in by a key: %s", error)
        return self._digests


def behind_front(request: web.Request) -> str:
    """Return this process's user, whose key the front has found in the request.

    Raises HttpError 403 for who is neither the front nor that user.
    """
    peer = request.transport.get_extra_info("socket") if request.transport else None
    if peer is None or not may_call(peer):
        raise HttpError(403, "this door belongs to another user")
    return user_name(os.geteuid())
