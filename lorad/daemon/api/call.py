"""A request as handlers see it: path, query and body, whole, in time and checked."""

import asyncio
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from lorad.bounds import BODY_BYTES
from lorad.daemon.process.users import Caller
from lorad.errors import Conflict, NotFound, SpecError

T = TypeVar("T", bound=Struct)
_Number = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # what SQLite takes
_HINT = "Use the lorad command or lorad.client."


class Call(NamedTuple):
    """One request."""

    request: web.Request
    caller: Caller
    body: Any

    @property
    def run(self) -> str:
        return self.request.match_info["run"]

    def json(self, kind: type[T]) -> T:
        """Convert the body to `kind`. Raises SpecError."""
        try:
            return msgspec.convert(self.body or {}, kind)
        except msgspec.ValidationError as error:
            hint = "Give another value. If this one should fit: is lorad as old as its daemon?"
            raise SpecError(f"the request does not fit: {error}", hint=hint) from None

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
    """A request that is larger than any should be."""

    status = 413


class TooSlow(Conflict):
    """A request that did not arrive in time."""

    status = 408


async def read_body(request: web.Request, seconds: float) -> Any:
    """Read the JSON body, None without one. Raises SpecError, NotFound, TooLarge and TooSlow."""
    _refuse_nul(request)
    try:
        async with asyncio.timeout(seconds):
            data = await request.read()
    except TimeoutError:
        raise TooSlow(
            f"the request did not arrive within {seconds:.0f} seconds", hint="Send it again."
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise TooLarge(f"the request is larger than {BODY_BYTES} bytes", hint="Make it smaller.") from None
    except web.RequestPayloadError as error:
        raise SpecError(f"the request cannot be read: {error}", hint=_HINT) from None
    return _parsed(data) if data else None


def _parsed(data: bytes) -> Any:
    """Raises SpecError: for what is not JSON, too deep, or holds text that no file or database takes."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise SpecError(f"the request is not JSON: {error}", hint=_HINT) from None
    if b"\\u0000" in data and _has_nul(body):
        raise SpecError("the request holds a NUL character", hint="No name, path or text has one.")
    return body


def _refuse_nul(request: web.Request) -> None:
    """Raises SpecError, NotFound."""
    if "\0" in request.path:
        raise NotFound(f"no such request: {request.path!r}", hint=_HINT)
    if any("\0" in key + value for key, value in request.query.items()):
        raise SpecError("the request's address holds a NUL character", hint=_HINT)


def _has_nul(value: Any) -> bool:
    match value:
        case str():
            return "\0" in value
        case dict():
            return any(_has_nul(key) or _has_nul(inner) for key, inner in value.items())
        case list():
            return any(_has_nul(inner) for inner in value)
    return False
