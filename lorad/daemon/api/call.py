"""A request as handlers see it, checked: its path, query and body."""

import asyncio
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from lorad.bounds import BODY_BYTES
from lorad.daemon.process.users import Caller
from lorad.errors import Conflict, NotFound, SpecError
from lorad.records.requests import RequestBody

T = TypeVar("T", bound=RequestBody)
_Number = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # what SQLite takes
_HINT = "Use the lorad command or lorad.client."
_TOO_LARGE = "the request is larger than {} bytes"
_NUL = b"\\u0000"  # in JSON it is always escaped


class Call(NamedTuple):
    """One request."""

    request: web.Request
    caller: Caller
    body: bytes

    @property
    def run(self) -> str:
        return self.request.match_info["run"]

    def json(self, kind: type[T]) -> T:
        """Read the JSON body as `kind`, within its bounds. Raises SpecError, TooLarge."""
        if len(self.body) > kind.MOST_BYTES:
            raise TooLarge(_TOO_LARGE.format(kind.MOST_BYTES), hint="Make it smaller.")
        if _NUL in self.body and _NUL in self.body.replace(rb"\\", b""):  # without escaped backslashes
            raise SpecError("the request holds a NUL character", hint="No name, path or text has one.")
        try:
            return msgspec.json.decode(self.body or b"{}", type=kind)
        except msgspec.ValidationError as error:
            hint = "Give another value. If this one should fit: is lorad as old as its daemon?"
            raise SpecError(f"the request does not fit: {error}", hint=hint) from None
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise SpecError(f"the request is not JSON: {error}", hint=_HINT) from None

    def text(self, key: str) -> str | None:
        return self.request.query.get(key)

    def number(self, key: str, default: int) -> int:
        """Read an integer of the query. Raises SpecError."""
        value = self.request.query.get(key, "")
        try:
            return msgspec.convert(value, _Number, strict=False) if value else default
        except msgspec.ValidationError:
            raise SpecError(f"{key}={value} is not a whole number", hint=f"Give {key} as digits.") from None


class TooLarge(SpecError):
    """A request of more bytes than it may have."""

    status = 413


class TooSlow(Conflict):
    """A request that did not arrive in time."""

    status = 408


async def read_body(request: web.Request, seconds: float) -> bytes:
    """Read the body, empty without one. Raises SpecError, NotFound, TooLarge and TooSlow."""
    if "\0" in request.path:
        raise NotFound(f"no such request: {request.path!r}", hint=_HINT)
    if any("\0" in key + value for key, value in request.query.items()):
        raise SpecError("the request's address holds a NUL character", hint=_HINT)
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        message = f"the request did not arrive within {seconds:.0f} seconds"
        raise TooSlow(message, hint="Send it again.") from None
    except web.HTTPRequestEntityTooLarge:
        raise TooLarge(_TOO_LARGE.format(BODY_BYTES), hint="Make it smaller.") from None
    except web.RequestPayloadError as error:
        raise SpecError(f"the request cannot be read: {error}", hint=_HINT) from None
