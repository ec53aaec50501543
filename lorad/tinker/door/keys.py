"""Decides who may ask: owners by their keys, which are `tml-` and at least 16 characters.

The keys stand in a file like the gateway's tokens: see `lorad/box/tokens.py`.
"""

import os
from pathlib import Path

from aiohttp import web

from lorad.box.tokens import Tokens
from lorad.http.serve import peer_uid
from lorad.protocol.listener import may_call, user_name
from lorad.tinker.door.errors import HttpError


class Keys:
    """Reads the keys in a file."""

    def __init__(self, path: Path) -> None:
        self._tokens = Tokens(path)

    def owner_of(self, request: web.Request) -> str:
        """Return whose key a request has. Raises HttpError 401.

        The client of the Hugging Face hub sends the key as a token, where HF_TOKEN names it.
        """
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.owner(request.headers.get("X-API-Key", token))

    def owner(self, key: str) -> str:
        """Return whose key it is. Raises HttpError 401."""
        owner = self._tokens.owner(key)
        if owner is None:
            raise HttpError(401, "this is no key of this server: `lorad tinker env` prints TINKER_API_KEY")
        return owner


def behind_front(request: web.Request) -> str:
    """Return this process's user, whose key the front has found in the request.

    Raises HttpError 403 for everybody but the front and that user.
    """
    uid = peer_uid(request)
    if uid is None or not may_call(uid):
        raise HttpError(403, "this door belongs to another user")
    return user_name(os.geteuid())
