"""A client that answers from memory, for tests of what the screens draw."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lorad.errors import DaemonUnreachable
from lorad.transport import Json, Transport


def a_run(name: str, **more: Any) -> Json:
    figures = {"step": 3, "steps": 10, "reward": 0.5, "eval_first": 0.3, "eval_last": 0.6, "version": 3, "attempt": 1}
    words = {"state": "running", "reason": None, "detail": "", "waiting": "", "owner": "ann", "pool": "tiny-1"}
    rates = {"tokens_per_second": 1000.0, "step_seconds": 1.0}
    return {"name": name, "created_at": time.time() - 600, "rates": rates, **figures, **words, **more}


def a_step(number: int, reward: float) -> Json:
    metrics = {"reward": reward, "seconds": 1.0, "seconds_sample": 0.5, "seconds_train": 0.4, "seconds_publish": 0.1}
    return {"step": number, "attempt": 1, "at": 1000.0 + number, "version": number, "metrics": metrics}


class World:
    """What the daemon would know; `asked` is what it was told to do."""

    def __init__(self, *runs: Json) -> None:
        self.runs = list(runs)
        self.steps: list[Json] = []
        self.log = ""
        self.alive = True
        self.asked: list[tuple[str, str]] = []
        self.told: list[Json] = []
        self.news = threading.Condition()

    def tell(self, run: str, kind: str = "state") -> None:
        """Something happened."""
        with self.news:
            self.told.append({"id": len(self.told) + 1, "run": run, "kind": kind, "at": 0.0, "data": {}})
            self.news.notify_all()

    def news_after(self, cursor: int) -> list[Json]:
        with self.news:
            self.news.wait_for(lambda: not self.alive or len(self.told) > cursor, timeout=1.0)
            if not self.alive:
                raise DaemonUnreachable("the daemon went away")
            return self.told[cursor:]

    def live(self, alive: bool) -> None:
        with self.news:
            self.alive = alive
            self.news.notify_all()


class Prepared(Transport):
    """Serves a world; the stream ends and every answer fails while the world is not alive."""

    def __init__(self, world: World) -> None:
        super().__init__(Path("/nowhere"), 1.0)
        self.world = world

    def get(self, path: str) -> Json:
        return self._answer(path.partition("?")[0].split("/")[2:])

    def list_of(self, path: str) -> list[Json]:
        items: list[Json] = self.get(path)["items"]
        return items

    def post(self, path: str, body: Json) -> Json:
        _, run, verb = path.split("/")[2:]
        self.world.asked.append((verb, run))
        return a_run(run, state="stopping")

    def _answer(self, path: list[str]) -> Json:
        world = self.world
        if not world.alive:
            raise DaemonUnreachable("no daemon answers")
        match path:
            case ["runs"]:
                return {"items": [dict(run) for run in world.runs]}
            case ["runs", _, "steps"]:
                return {"items": list(world.steps)}
            case ["runs", _, "logs"]:
                return {"text": world.log, "offset": len(world.log), "size": len(world.log)}
            case ["runs", _, _]:
                return {"items": []}
            case ["runs", name]:
                return next(dict(run) for run in world.runs if run["name"] == name)
        return {"pid": 1}

    def stream(self, method: str, path: str, body: Json | None) -> Iterator[Json]:
        after = int(parse_qs(urlsplit(path).query)["after"][0])
        cursor = len(self.world.told) if after < 0 else after
        while True:
            found = self.world.news_after(cursor)
            yield from found or [{"id": cursor, "run": None, "kind": "idle", "at": 0.0, "data": {}}]
            cursor += len(found)
