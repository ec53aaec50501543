"""Handles what all requests have in common: whose key they have, and what errors look like.

Owners are known by their keys, which are `tml-` and at least 16 characters, in a file like the gateway's
tokens: see `lorad/box/tokens.py`.
"""

import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from lorad.bounds import Bounds
from lorad.box.tokens import Tokens
from lorad.errors import LoradError, NotFound
from lorad.gateway.errors import ApiError
from lorad.gateway.guard import answer
from lorad.http.serve import peer_uid
from lorad.protocol.listener import may_call, user_name
from lorad.tinker.door.errors import HttpError

log = logging.getLogger(__name__)

BODY_BYTES = 64 << 20  # the client cuts its requests at about 5 MB, and a long datum is not cut
CONNECTIONS = Bounds(idle=75.0, write=60.0, of_one=1024, of_own=4096)
BEHIND_FRONT = Bounds(idle=75.0, write=60.0, of_one=4096, of_own=4096)  # of an owner's door
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def healthz(_: web.Request) -> web.Response:
    return answer({"status": "ok"})


@web.middleware
async def guarded(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Let nothing but the client's errors out."""
    try:
        return await handler(request)
    except HttpError as error:
        return answer({"detail": error.detail}, status=error.status)
    except ApiError as error:
        return answer({"detail": error.message}, status=error.status)
    except NotFound as error:
        return answer({"detail": error.in_full}, status=404)
    except web.HTTPRequestEntityTooLarge:
        return answer({"detail": f"the request is larger than {BODY_BYTES} bytes"}, status=413)
    except web.HTTPException as error:
        text = f"{request.method} {request.path} is not supported by lorad: {error.reason}"
        return answer({"detail": text}, status=error.status)
    except (LoradError, OSError) as error:  # a full disk, a daemon away: the client asks again
        log.exception("%s %s", request.method, request.path)
        return answer({"detail": str(error)}, status=503)
    except Exception:
        log.exception("%s %s", request.method, request.path)
        return answer(
            {"detail": "this is a defect of lorad; the log of its door has the details"}, status=500
        )


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
