"""The builtin reward `judge`: a model behind an OpenAI API says how good a completion is.

It runs in a process of rewards, many calls at once. What it was answered is kept by content, if a directory
is named. What fails is said, never scored.
"""

import asyncio
import contextlib
import hashlib
import http.client
import json
import os
import random
import re
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from lorad.box.private import read_key

_TRIES = 6
_BACK_OFF_SECONDS = 0.5
_LONGEST_BACK_OFF = 30.0
_MARGIN_SECONDS = 0.2  # before the time of the call is over, so that its cost is counted
_MOST_BYTES = 4 << 20
_ABANDONED_SECONDS = 3600.0  # after which a half-written file is somebody's who is gone
_TEMPORARY = ".half-"
_PASSING = {408, 409, 425, 429}
_ADVICE = {
    **dict.fromkeys((401, 403), " (its key is in the file that reward.key_file names)"),
    404: " (does it serve the model {}, and does reward.url end as the server has it, as in /v1?)",
}
_COUNTED = ("calls", "failed_calls", "cached", "prompt_tokens", "completion_tokens")
_COLUMN = re.compile(r"\{(prompt|completion|answer)\}")


class _JudgeScore(NamedTuple):
    """A reward, or an error, and what either has cost."""

    value: float | None
    error: str
    costs: dict[str, float]


class _JudgeSettings(NamedTuple):
    """Keys of the spec, with absolute paths.

    bounds: lowest and highest score.
    price: what a million tokens cost.
    """

    url: str
    model: str
    template: str
    pattern: str
    bounds: list[float]
    max_tokens: int
    key_file: str | None
    cache: str | None
    price: list[float] | None
    timeout: float
    concurrency: int


class _Failed(Exception):
    """There is no score.

    again: seconds after which it may be tried once more; None: it need not be.
    """

    def __init__(self, why: str, again: float | None = None) -> None:
        super().__init__(why)
        self.again = again


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key is for one server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def judge(**settings: Any) -> Callable[..., Awaitable[_JudgeScore]]:
    """Return the function that scores, by `_JudgeSettings`. Raises SpecError for a wrong key file."""
    server = _Judge(_JudgeSettings(**settings))
    if "{answer}" not in server.template:

        async def score(prompt: str, completion: str) -> _JudgeScore:
            return await server.score({"prompt": prompt, "completion": completion})

        return score

    async def compared(prompt: str, completion: str, answer: str) -> _JudgeScore:
        return await server.score({"prompt": prompt, "completion": completion, "answer": answer})

    return compared


class _Judge:
    """A judge's server: what is sent to it, and how its replies are read."""

    def __init__(self, settings: _JudgeSettings) -> None:
        """Raises SpecError for a wrong key file."""
        self._settings = settings
        self.template = settings.template
        self._url = settings.url.rstrip("/") + "/chat/completions"
        self._pattern = re.compile(settings.pattern)
        self._low, self._high = settings.bounds
        self._timeout = settings.timeout
        self._key = read_key(settings.key_file) if settings.key_file else ""
        self._cache = _Cache(Path(settings.cache)) if settings.cache else None
        self._threads = ThreadPoolExecutor(settings.concurrency, "judge")
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._locks: dict[str, tuple[asyncio.Lock, list[None]]] = {}

    async def score(self, columns: dict[str, str]) -> _JudgeScore:
        value = None
        error = ""
        costs = dict.fromkeys(_COUNTED, 0.0)
        failures = list[str]()
        text = _COLUMN.sub(lambda name: columns.get(name[1], ""), self.template)
        body = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": self._settings.max_tokens,
        }
        name = hashlib.sha256(json.dumps([self._url, body], sort_keys=True).encode()).hexdigest()
        deadline = time.monotonic() + self._timeout - min(_MARGIN_SECONDS, self._timeout / 4)
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0)), self._alone(name):
                value = await self._scored(name, body, costs, failures)
        except TimeoutError:
            last = f": {failures[-1]}" if failures else f" from the judge at {self._settings.url}"
            error = f"no score within {self._timeout:g} s{last}"
        except _Failed as failed:
            error = str(failed)
        if (price := self._settings.price) is not None:
            paid = costs["prompt_tokens"] * price[0] + costs["completion_tokens"] * price[1]
            costs["price"] = paid / 1e6
        return _JudgeScore(value, error.replace(self._key, "…") if self._key else error, costs)

    @contextlib.asynccontextmanager
    async def _alone(self, name: str) -> Any:
        """Ask what is the same once; the others find it in the cache."""
        if self._cache is None:
            yield
            return
        lock, waiting = self._locks.setdefault(name, (asyncio.Lock(), []))
        waiting.append(None)
        try:
            async with lock:
                yield
        finally:
            waiting.pop()
            if not waiting:
                self._locks.pop(name, None)

    async def _scored(
        self, name: str, body: dict[str, Any], costs: dict[str, float], failures: list[str]
    ) -> float:
        """Ask the judge for a score, and again after a failure that may pass. Raises _Failed.

        failures: a list that each failure is added to.
        """
        if self._cache is not None and (kept := self._cache.get(name)) is not None:
            with contextlib.suppress(_Failed):  # kept with another pattern
                value = self._read(kept)
                costs["cached"] += 1
                return value
        for number in range(_TRIES):
            try:
                costs["calls"] += 1
                loop = asyncio.get_running_loop()
                reply = await loop.run_in_executor(self._threads, self._post, json.dumps(body).encode())
                try:
                    completion = json.loads(reply)
                    for key in ("prompt_tokens", "completion_tokens"):
                        costs[key] += int((completion.get("usage") or {}).get(key) or 0)
                    text = completion["choices"][0]["message"]["content"]
                except (ValueError, KeyError, IndexError, TypeError, AttributeError):
                    raise _Failed("the judge's server answered no completion") from None
                if not isinstance(text, str):
                    raise _Failed("the judge said nothing")
                break
            except _Failed as failed:
                costs["failed_calls"] += 1
                failures.append(str(failed))
                if failed.again is None or number == _TRIES - 1:
                    raise
                wait = _BACK_OFF_SECONDS * 2**number * random.uniform(0.5, 1.5)
                await asyncio.sleep(max(failed.again, min(wait, _LONGEST_BACK_OFF)))
        value = self._read(text)
        if self._cache is not None:
            self._cache.put(name, text)
        return value

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, body, headers)
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                return bytes(response.read(_MOST_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(500).decode(errors="replace").strip()
            passes = error.code in _PASSING or error.code >= 500
            after = error.headers.get("Retry-After", "") if passes else ""
            again = float(after) if after.isdigit() else 0.0
            advice = _ADVICE.get(error.code, "").format(self._settings.model)
            why = f"the judge at {self._settings.url} answered {error.code}: {said}{advice}"
            raise _Failed(why, again if passes else None) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            advice = "start its server, or correct reward.url"
            raise _Failed(
                f"the judge at {self._settings.url} cannot be reached: {why} ({advice})", 0.0
            ) from None

    def _read(self, text: str) -> float:
        """Return the last number of the pattern, from 0 to 1 within the range. Raises _Failed."""
        said = None
        for match in self._pattern.finditer(text):
            said = match[1]
        try:
            number = float(said or "")
        except ValueError:
            raise _Failed(f"there is no score in what the judge said: {text[-200:]!r}") from None
        if not self._low <= number <= self._high:
            raise _Failed(f"the judge's score {number:g} is not from {self._low:g} to {self._high:g}")
        return (number - self._low) / (self._high - self._low)


class _Cache:
    """Texts by name in a directory of any number of processes. A text is there whole or not at all."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for half in root.glob(f"*/{_TEMPORARY}*"):
            with contextlib.suppress(OSError):
                if time.time() - half.stat().st_mtime > _ABANDONED_SECONDS:
                    half.unlink()

    def get(self, name: str) -> str | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads((self._root / name[:2] / name).read_bytes())
            if kept["sha256"] == hashlib.sha256(kept["text"].encode()).hexdigest():
                return str(kept["text"])
        return None

    def put(self, name: str, text: str) -> None:
        """Keep a text; a full disk keeps none."""
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        with contextlib.suppress(OSError):
            folder = self._root / name[:2]
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor, half = tempfile.mkstemp(prefix=_TEMPORARY, dir=folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(json.dumps({"sha256": digest, "text": text}).encode())
                os.replace(half, folder / name)
            except OSError:
                os.unlink(half)
                raise
