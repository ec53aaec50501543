"""Requests and answers of `lorad.records.routes`, as the transport takes and gives them."""

from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from lorad.errors import LoradError
from lorad.protocol.structs import with_decoder
from lorad.records.routes import Route

T = TypeVar("T")
Query = Mapping[str, str | int | None]  # the words of a query; those that are None are left out


def written(
    route: Route[Any], content: Struct | Query | None, names: Mapping[str, str] = {}
) -> tuple[str, str, Struct | None]:
    """Write a request as `Transport` takes it: method, path with query, and body. Raises NotFound."""
    address = route.address(names)
    if content is None or isinstance(content, Struct):
        return route.method, address, content
    query = urlencode({key: value for key, value in content.items() if value is not None})
    return route.method, f"{address}?{query}" if query else address, None


def answer_of(kind: type[T], answer: Any) -> T:
    """Make an answer a Struct of a kind. Raises LoradError where it does not fit."""
    try:
        return msgspec.convert(answer, with_decoder(kind))
    except msgspec.ValidationError as error:
        hint = "The daemon may be of another version: see `lorad daemon status`."
        raise LoradError(f"an answer is not understood: {error}", hint=hint) from None
