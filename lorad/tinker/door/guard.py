"""Handles what all answers have in common: what errors look like."""

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from lorad.bounds import Bounds
from lorad.errors import LoradError, NotFound
from lorad.gateway.errors import ApiError
from lorad.gateway.guard import answer
from lorad.tinker.door.errors import BadRequest, HttpError

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
    except BadRequest as error:
        return answer({"detail": str(error)}, status=400)
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
