"""Requests that no client of lorad makes: wrong shapes, sizes, names and bytes, for every route."""

import json
import random
import string
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

NAMES = (
    "a",
    "b",
    "a@1",
    "a@1001",
    "a@0",
    "a@-1",
    "a@99999999999999999999",
    "@",
    "a@",
    "a@x",
    "..",
    "../a",
    "a/b",
    "%2e%2e",
    "a\0b",
    "\0",
    " ",
    "é" * 40,
    "\U0001f600",
    "a" * 64,
    "a" * 6000,
    "runs",
    ".tmp-a",
    "null",
    "-1",
    "a\nb",
    "a;b",
    "a'b",
    "a%00b",
    "{run}",
    "*",
    "~",
    "$HOME",
    "A",
    "con",
    "a\u202eb",
    "\x7f",
    "a\\b",
    "%",
    "%zz",
    "%ff",
    "a" * 200 + "@1",
)
QUERIES = (
    "",
    "all=1",
    "all=x",
    "all=-1",
    "all=1e9",
    "after=-1",
    "after=99999999999999999999999",
    "after=0x10",
    "limit=-5",
    "limit=0",
    "limit=9223372036854775807",
    "limit=9223372036854775808",
    "offset=-99999999999",
    "offset=1.5",
    "of=../x",
    "of=engine-99999",
    "of=pool",
    "run=a",
    "run=%00",
    "run=" + "x" * 3000,
    "step=1",
    "step=-1",
    "a=%ff%fe",
    "&&&==&",
    "%",
    "step=%F0%9F%98%80",
    "run=a&run=b",
    "after=٣",
    "limit=" + "9" * 4000,
    "run[]=a",
    "step=NaN",
    "offset=" + "-" * 50,
)
SPECS = (
    "",
    "{}",
    "[",
    "a: b",
    "trainer: {steps: 6}",
    "- 1",
    "name: a",
    "name: ../a",
    "seed: 1e400",
    "\0",
    "&a [*a]",
    "!!x 1",
    "{" * 500,
    "trainer: {steps: 99999999999999999999}",
    "model: {path: '\\0'}",
    "model: {path: /dev/zero}",
    "\ufeffseed: 1",
    "lora: {adapter_path: /dev/zero}",
    "lora: {target_modules: []}",
    "data: {train: /dev/zero}",
    "reward: /dev/zero:f",
    "rollout: {engine_args: {a: [[[[[1]]]]]}}",
)
TEXTS = (
    *NAMES,
    *SPECS,
    "/",
    "/dev/zero",
    "/proc/self/mem",
    "/etc/passwd",
    "rel/ative",
    "~",
    "x" * 100_000,
    "\\u0000",
)
NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 1.5, -0.0, 1e308, 10**4000)
KEYS = (
    "spec",
    "source",
    "cwd",
    "overrides",
    "name",
    "step",
    "steps",
    "fresh",
    "dry_run",
    "directory",
    "version",
    "prompt",
    "rollback",
    "sampling",
    "model",
    "adapters",
    "grid",
    "keep",
    "every",
    "n",
    "max_new_tokens",
    "stop",
    "aliases",
    "__x__",
    "model_path",
    "adapter",
    "names",
    "backend",
    "metric",
    "halving",
    "timeout",
    "texts",
    "seed",
    "temperature",
)
BODIES = (
    b"",
    b"null",
    b"[]",
    b"{}",
    b'""',
    b"0",
    b"true",
    b"{",
    b"}",
    b"\xff\xfe\x00",
    b"\x00" * 100,
    b"[" * 50_000,
    b"-",
    b'{"a":' * 2_000,
    b'{"spec": "\\ud800"}',
    b'{"spec": "\\u0000"}',
    b"1e999",
    b"NaN",
    b"9" * 5_000,
    b"\xef\xbb\xbf{}",
    b'{"name": "a", "name": "b"}',
    b'{"\xff": 1}',
    b"\x1f\x8b\x08\x00" + b"\x00" * 50,
    b"{} {}",
    b" " * 70_000,
    b"//x",
)
METHODS = (
    "GET",
    "POST",
    "DELETE",
    "PUT",
    "PATCH",
    "HEAD",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "G\u00c4T",
    "get",
    "X" * 200,
)
HEADERS = (
    b"",
    b"Content-Encoding: gzip\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Expect: 100-continue\r\n",
    b"Host: x\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 99999999999\r\n",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
    b"Content-Type: multipart/form-data; boundary=\xff\r\n",
    b"Cookie: a=\x01\r\n",
    b"Range: bytes=-1\r\n",
    b": x\r\n",
    b"X: " + b"y" * 9_000 + b"\r\n",
    b"Content-Type: application/json; charset=utf-32\r\n",
    b"If-Modified-Since: x\r\n",
)


def value(chance: random.Random, depth: int = 0) -> Any:
    """Any JSON value; large numbers, foreign names and shapes more often than they deserve."""
    kinds: list[Callable[[], Any]] = [
        lambda: chance.choice(TEXTS),
        lambda: chance.choice(NUMBERS),
        lambda: chance.choice((None, True, False)),
        lambda: "".join(chance.choices(string.printable, k=chance.randint(0, 30))),
    ]
    if depth < 4:
        kinds += [
            lambda: [value(chance, depth + 1) for _ in range(chance.randint(0, 4))],
            lambda: {chance.choice(KEYS): value(chance, depth + 1) for _ in range(chance.randint(0, 4))},
        ]
    return chance.choice(kinds)()


def body(chance: random.Random) -> bytes:
    roll = chance.random()
    if roll < 0.3:
        return chance.choice(BODIES)
    if roll < 0.35:
        return chance.randbytes(chance.randint(0, 2_000))
    keys = chance.sample(KEYS, k=chance.randint(0, 6))
    wanted = {key: value(chance, 4 if chance.random() < 0.7 else 0) for key in keys}
    if chance.random() < 0.5:
        wanted["version"] = "a@1002"
    likely = {"spec": chance.choice(SPECS), "source": "a.yaml", "cwd": chance.choice(("/", "rel", "\0"))}
    return json.dumps(wanted | likely if chance.random() < 0.6 else wanted).encode()


def target(chance: random.Random, path: str) -> bytes:
    """The path of a route with its parts filled in, and a query."""
    parts = []
    for part in path.split("/"):
        name = chance.choice(NAMES if chance.random() < 0.6 else ("a", "a@1001", "a@1003"))
        filled = quote(name, safe="") if chance.random() < 0.8 else name.encode().decode("latin-1")
        parts.append(filled if part.startswith("{") else part)
    query = chance.choice(QUERIES)
    whole = "/".join(parts) + (f"?{query}" if query else "")
    return whole.replace("\n", "%0A").replace("\r", "%0D").replace(" ", "%20").encode()


def request(chance: random.Random, method: str, path: str) -> bytes:
    """One whole request, or nearly."""
    method = method if chance.random() < 0.8 else chance.choice(METHODS)
    data, extra = body(chance), chance.choice(HEADERS) if chance.random() < 0.3 else b""
    length = (
        b"" if b"Content-Length" in extra or b"chunked" in extra else b"Content-Length: %d\r\n" % len(data)
    )
    head = (
        method.encode() + b" " + target(chance, path) + b" HTTP/1.1\r\nHost: lorad\r\nConnection: close\r\n"
    )
    return head + length + extra + b"\r\n" + data
