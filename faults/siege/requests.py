"""Requests on every route of the daemon, each part of whose bodies is taken to its bound and beyond."""

import inspect
import json
import re
import reprlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from msgspec.inspect import type_info

from faults.hostile import NAMES, QUERIES
from lorad.daemon.api.verbs import ROUTES
from lorad.records.requests import RequestBody

RUN, WAITING, ALIAS = "mine", "waiting", "front"
NUMBERS = (0, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 1e308, 5e-324)
WRONG: tuple[Any, ...] = (None, [], {}, "x", "\0", json.loads("[" * 900 + "]" * 900), {"a": {"a": {"a": 1}}})
WHOLES: dict[str, Callable[[], bytes]] = {
    "depth": lambda: b"[" * 4_000_000,
    "depth of tables": lambda: b'{"a":' * 700_000,
    "lists": lambda: b'{"x": [' + b"[]," * 1_300_000 + b"[]]}",
    "keys": lambda: b"{" + b",".join(b'"k%d":1' % number for number in range(300_000)) + b"}",
    "digits": lambda: b'{"x": ' + b"9" * 4_000_000 + b"}",
    "backslashes": lambda: b'{"x": "' + b"\\\\" * 1_900_000 + b'"}',
    "no text": lambda: b'{"x": "\xff\xfe\xed\xa0\x80"}',
    "NUL": lambda: b'{"x": "\\u0000"}',
    "a list": lambda: b"[1, 2]",
    "too much": lambda: b" " * 5_000_000,
}
# what a request has beside the part that is tried: refused at the end, so that nothing is made of it
USUAL: dict[str, Any] = {
    "spec": "{lora: {rank: 0}}",
    "source": "a.yaml",
    "cwd": "/",
    "overrides": ["lora.rank=0"],
    "directory": "/nonexistent/x",
    "version": f"{RUN}@1",
    "model": "none",
    "owner": "none",
    "data": "sort",
    "name": "..",
    "prompts": [[5]],
    "sampling": {"max_new_tokens": 1},
    "dry_run": True,
    "size": 3,
}
PLACES = {
    "run": RUN,
    "version": f"{RUN}@1",
    "alias": ALIAS,
    "device": "cpu",
    "group": "night",
    "pool": "none",
    "bundle": "0" * 64,
}
OTHERS = {
    ("POST", "/v1/runs/{run}/edit"): "/v1/runs/waiting/edit",  # only what waits is edited
    ("DELETE", "/v1/runs/{run}"): "/v1/runs/none",
    ("DELETE", "/v1/versions/{version}"): "/v1/versions/mine@99",
}


class Asked(NamedTuple):
    """One request. what: which part of it is strange. body: makes it."""

    route: str
    what: str
    method: str
    path: str
    body: Callable[[], bytes | None] = lambda: None


def body_of(handler: Callable[..., Any]) -> type[RequestBody] | None:
    """Find the Struct that a handler reads its body as; None where it reads none."""
    found = re.search(r"call\.json\((\w+)\)", inspect.getsource(handler))
    return None if found is None else handler.__globals__[found[1]]


def requests() -> Iterator[Asked]:
    """Yield requests on every route of the table."""
    for method, route, handler, _ in ROUTES:
        path = OTHERS.get((method, route), route)
        usual = re.sub(r"{(\w+)}", lambda part: PLACES[part[1]], path)
        kind = body_of(handler)
        plain = partial(usual_body, kind)
        yield Asked(route, "usual", method, usual, plain)
        for what, body in bodies(kind) if kind is not None else ():
            yield Asked(route, what, method, usual, body)
        for what, body in WHOLES.items() if method in ("POST", "PUT") else ():
            yield Asked(route, what, method, usual, body)
        for query in filter(_is_sendable, QUERIES if method == "GET" else ()):
            yield Asked(route, query[:40], method, f"{usual}?{query}")
        for name in filter(_is_sendable, NAMES if "{" in path else ()):
            strange = re.sub(r"{\w+}", name.replace("\\", r"\\"), path)
            yield Asked(route, f"name {name[:30]}", method, strange, plain)


def _is_sendable(text: str) -> bool:
    """Return whether Python's own client sends it as it is."""
    return text.isascii() and text.isprintable() and " " not in text


def usual_body(kind: type[RequestBody] | None) -> bytes | None:
    return None if kind is None else json.dumps(usual_of(kind)).encode()


def usual_of(kind: type[RequestBody]) -> dict[str, Any]:
    return {key: USUAL[key] for key in kind.__struct_fields__ if key in USUAL}


def bodies(kind: type[RequestBody]) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield what makes bodies of which one field is strange each."""
    for field in type_info(kind).fields:  # type: ignore[attr-defined]
        for number, value in enumerate(extremes(field.type, kind.MOST_BYTES - 2000)):
            strange = usual_of(kind) | {field.name: value}
            yield f"{field.name} {number}: {reprlib.repr(value)}", partial(_encoded, strange)


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def extremes(kind: Any, most: int) -> Iterator[Any]:
    """Yield values of a type at its bounds and beyond, and some of other types. most: bytes of JSON."""
    inspected = msgspec.inspect
    match kind:
        case inspected.StrType() | inspected.BytesType():
            yield from texts(min(kind.max_length or 40, most))
            yield "x" * ((kind.max_length or 40) + 1)
        case inspected.ListType():
            count = kind.max_length or 100
            for value in islice(extremes(kind.item_type, most // 8), 25):
                size = len(_encoded(value)) + 1
                yield [value] * max(1, min(count, most // size))
            yield [next(extremes(kind.item_type, 8))] * (count + 1)
            yield [f"a*{number}" for number in range(min(count, most // 10))]
            yield [f"k{number}.k.k=[" + "1," * 50 + "]" for number in range(min(count, most // 130))]
        case inspected.DictType():
            count = kind.max_length or 100
            for value in islice(extremes(kind.value_type, most // 8), 12):
                size = len(_encoded(value)) + 9
                yield {f"k{number}": value for number in range(max(1, min(count, most // size)))}
            yield {"k" * 200_000: 1.0}
        case inspected.StructType():
            for field in kind.fields:
                usual = (
                    USUAL["sampling"] if field.name != "sampling" and kind.cls.__name__ == "Sampling" else {}
                )
                for value in extremes(field.type, most):
                    yield usual | {field.name: value}
        case inspected.UnionType():
            for one in kind.types:
                yield from extremes(one, most)
        case inspected.IntType() | inspected.FloatType():
            yield from NUMBERS
    yield from WRONG


def texts(most: int) -> Iterator[str]:
    """Yield texts of about so many characters, of what is slow to read in one way or another."""
    for piece in (
        "x",
        "a.",
        "*a",
        "[",
        "{a: ",
        "- ",
        "1,",
        "k: v\n",
        "\U0001f600",
        "\ufeff",
        "'",
        "~nosuchuser/",
        "../",
    ):
        yield (piece * most)[: max(1, most // (4 if ord(piece[0]) > 255 else 1))]
    if most > 200:
        yield f"nosuch.x=1 # {'x' * (most - 20)}"
        yield f"nosuch.x=[{'1,' * (most // 2 - 10)}]"
        yield "".join(f"key{number}: v\n" for number in range(most // 12))[:most]
        yield "{" + "".join(f"k{number}: [{'[], ' * 20}], " for number in range(most // 100)) + "}"
        yield "".join(f"{' ' * min(number, 30)}{'k' * 100}:\n" for number in range(most // 130))
