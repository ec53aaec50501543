"""Handles what all answers have in common: who may have them, and what errors look like."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from lorad.errors import LoradError
from lorad.gateway.access import GatewayAccess
from lorad.gateway.errors import ApiError, from_lorad
from lorad.gateway.limits import BODY_BYTES, BODY_SECONDS, RequestLimits

log = logging.getLogger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
VERSION = "x-lorad-version"
HEALTH = "/health"
EVENT_STREAM = "text/event-stream"


def guard(access: GatewayAccess, limits: RequestLimits) -> Middleware:
    """Make the middleware that lets strangers in to `/health` alone, and nothing but OpenAI's errors out."""

    @web.middleware
    async def guarded(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            if request.method == "GET" and request.path == HEALTH:
                return await handler(request)
            owner = access.owner(request)
            with limits.place(owner) if request.method == "POST" else contextlib.nullcontext():
                return await handler(request)
        except ApiError as error:
            return _failed(error)
        except LoradError as error:
            log.warning("%s: %s: %s", request.path, type(error).__name__, error)
            return _failed(from_lorad(error))
        except web.HTTPRequestEntityTooLarge:
            return _failed(ApiError(413, f"The request is larger than {BODY_BYTES} bytes."))
        except web.HTTPException as error:
            text = f"{request.method} {request.path} is not served here: {error.reason}."
            return _failed(ApiError(error.status, text, code="unknown_url"))
        except Exception:
            log.exception("%s %s", request.method, request.path)
            text = "This is a defect of lorad; the gateway's log has the details."
            return _failed(ApiError(500, text, kind="server_error"))

    return guarded


async def health(_: web.Request) -> web.Response:
    """Tell whoever watches that the process is up; this says nothing about pools and versions."""
    return answer({})


def _failed(error: ApiError) -> web.Response:
    return answer(error.body, status=error.status, headers=error.headers)


def answer(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    data = msgspec.json.encode(body)
    return web.Response(body=data, status=status, headers=headers, content_type="application/json")


async def arrived(request: web.Request) -> bytes:
    """Return the body of a request. Raises ApiError when it takes too long to arrive."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, "The request did not arrive in time.") from None


def event(body: Any) -> bytes:
    """Write a body as a server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
