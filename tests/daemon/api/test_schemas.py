"""The requests and answers of every route: fields, their types and their defaults stay as they are kept in
tests/data/schemas.txt, whatever the Structs are called and wherever they stand.

`make snapshots` writes the file again; look at what `git diff` changed before you keep it.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from aiohttp import web
from msgspec import inspect as types

from lorad.daemon.api.verbs import ROUTES as HANDLERS
from lorad.errors import NotFound
from lorad.records.routes import ROUTES, Api

KEPT = Path(__file__).parents[2] / "data/schemas.txt"
LIMITS = ("ge", "gt", "le", "lt", "multiple_of", "pattern", "min_length", "max_length")
AS_IT_IS = (web.Response, web.StreamResponse, msgspec.Raw)  # answers that a handler writes itself
ENDLESS = ("ErrorFacts",)  # they contain themselves


def lines_of(kind: types.Type, place: str) -> Iterator[str]:
    """Yield the fields of a Struct, those of Structs in it indented by their path."""
    if isinstance(kind, types.StructType):
        for field in kind.fields:
            name = f"{place}.{field.encode_name}"
            yield f"{name}: {in_words(field.type)}{default_of(field)}"
            for part in structs_in(field.type):
                yield from lines_of(part, name)


def structs_in(kind: types.Type) -> Iterator[types.StructType]:
    """Yield the Structs that a type is made of."""
    if isinstance(kind, types.StructType) and kind.cls.__name__ not in ENDLESS:
        yield kind
    for part in parts_of(kind):
        yield from structs_in(part)


def parts_of(kind: types.Type) -> tuple[types.Type, ...]:
    match kind:
        case types.Metadata():
            return (kind.type,)
        case types.ListType() | types.VarTupleType():
            return (kind.item_type,)
        case types.DictType():
            return (kind.key_type, kind.value_type)
        case types.UnionType():
            return kind.types
        case _:
            return ()


def in_words(kind: types.Type) -> str:
    """Write a type without the names of its Structs."""
    limits = [f"{name}={limit}" for name in LIMITS if (limit := getattr(kind, name, None)) is not None]
    match kind:
        case types.LiteralType():
            return f"one of {', '.join(map(str, kind.values))}"
        case types.EnumType():
            return f"one of {', '.join(map(str, kind.cls))}"
        case types.Metadata():
            return in_words(kind.type)
    name = type(kind).__name__.removesuffix("Type")
    return " ".join([name, *limits, *(f"({in_words(part)})" for part in parts_of(kind))])


def default_of(field: types.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f" = {msgspec.json.encode(field.default_factory()).decode()}"
    if field.default is not msgspec.NODEFAULT:
        return f" = {msgspec.json.encode(field.default).decode()}"
    return "" if field.required else " = left out"


def decoded_by(handler: Callable[..., Any]) -> Any:
    """Find the Struct that a handler decodes; None where it takes no body."""
    (name, *_) = re.findall(r"call\.json\((\w+)\)", inspect.getsource(handler)) or [""]
    return handler.__globals__[name] if name else None


def schema(kind: Any) -> str:
    known = types.type_info(kind)
    inside = [line for part in structs_in(known) for line in lines_of(part, "")]
    return "\n".join([in_words(known), *inside])


def test_routes_keep_their_shapes(request: pytest.FixtureRequest) -> None:
    first: dict[str, str] = {}
    text = ""
    for route in ROUTES.values():
        for what, kind in (("request", route.request), ("answer", route.answer)):
            name = f"{what} of {route.method} {route.path}"
            shape = "none" if kind is None else schema(kind)
            before = first.setdefault(shape, name)
            text += f"{name}: {shape if before == name or kind is None else f'as {before}'}\n"
    if request.config.getoption("update_snapshots"):
        KEPT.write_text(text)
    assert text == KEPT.read_text()


@pytest.mark.parametrize("handler", [handler for _, _, handler, _ in HANDLERS])
def test_handlers_take_what_their_route_says(handler: Callable[..., Any]) -> None:
    route = ROUTES[handler.__name__]
    answer = get_type_hints(handler)["return"]
    assert decoded_by(handler) in (route.request, None)
    assert route.answer in (answer, *get_args(answer)) or answer in AS_IT_IS


def test_each_route_has_a_handler() -> None:
    assert [handler.__name__ for _, _, handler, _ in HANDLERS] == [*ROUTES]


def test_a_name_is_one_part_of_an_address() -> None:
    assert Api.show_run.address({"run": "a/kill?b"}) == "/v1/runs/a%2Fkill%3Fb"
    for name in ("", ".", ".."):
        with pytest.raises(NotFound):
            Api.remove.address({"run": name})
