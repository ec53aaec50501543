"""A request as handlers see it: path, query and body, checked."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from lorad.daemon.process.users import Caller
from lorad.errors import SpecError

T = TypeVar("T", bound=Struct)
Number = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # what SQLite takes


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
            return msgspec.convert(value, Number, strict=False) if value else default
        except msgspec.ValidationError:
            raise SpecError(f"{key}={value} is not a whole number", hint=f"Give {key} as digits.") from None
