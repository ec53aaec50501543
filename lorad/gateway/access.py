"""Decides who may ask.

On the socket, this user and root may, as the kernel names them, or all users if a shared daemon lets all see
everything. On TCP, whoever has a token (see `lorad/box/tokens.py`) or the key of the home's owner may.
"""

import hmac
import os
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from lorad.box.tokens import Tokens
from lorad.gateway.errors import ApiError
from lorad.http.serve import peer_uid
from lorad.protocol.listener import may_call, user_name


class GatewayAccess:
    """Knows who may ask a gateway.

    Args:
        tokens: The file of tokens; None where nobody has any.
        key: The key of this user; None where they have none.
        for_all: Every user of the machine may ask on the socket.
        private: The gateway serves several owners, and each may ask for their own versions alone.
    """

    def __init__(
        self, tokens: Path | None, *, key: str | None = None, for_all: bool = False, private: bool = False
    ) -> None:
        self._tokens = Tokens(tokens)
        self._key = key
        self._for_all = for_all
        self._private = private

    def owner(self, request: web.Request) -> str:
        """Return who asks. Raises ApiError 401 and 403."""
        uid = peer_uid(request)
        if uid is not None:
            if not self._for_all and not may_call(uid):
                raise ApiError(
                    403, "This gateway belongs to another user.", kind="permission_error", code="not_allowed"
                )
            return user_name(uid)
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip()
        owner = self._tokens.owner(token)
        presented = token.encode(errors="surrogateescape")
        if self._key is not None and hmac.compare_digest(presented, self._key.encode()):
            owner = user_name(os.geteuid())
        if scheme.lower() != "bearer" or owner is None:
            text = "Give the key of this gateway, or a token of it, as API key."
            raise ApiError(401, text, code="invalid_api_key")
        return owner

    def viewer(self, request: web.Request) -> Callable[[int | None], bool]:
        """Return a function that says whether the client may see a uid's versions. Raises as `owner`."""
        asker = self.owner(request) if self._private else ""
        if not self._private or asker in (user_name(0), user_name(os.geteuid())):
            return lambda owner_uid: True
        return lambda owner_uid: owner_uid is None or asker == user_name(owner_uid)
