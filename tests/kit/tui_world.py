"""A client that answers from memory, for tests of what the screens draw."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

import msgspec
from msgspec import Struct
from textual.css.stylesheet import Stylesheet
from textual.pilot import Pilot

from lorad.box.config import Config
from lorad.client.client import Client
from lorad.client.transport import Json, Transport
from lorad.errors import DaemonUnreachable
from lorad.tui.app import LoradApp
from lorad.tui.details.screen import DetailScreen
from lorad.tui.widgets.line import Line
from lorad.tui.widgets.table import Rows

HOSTILE = "[bold red]x[/] \x1b[31mred \x1b]0;title\x07"
SHOWN = r"[bold red]x[/] \x1b[31mred \x1b]0;title\x07"

_parse, _PARSED = Stylesheet._parse_rules, dict[Any, Any]()


def _parsed_once(sheet: Stylesheet, css: str, *more: Any, **options: Any) -> Any:
    """The rules of a style sheet, which are the same for each app: without this, each parses all of them."""
    key = (css, *more, *options.items(), frozenset(sheet._variables.items()))
    if key not in _PARSED:
        _PARSED[key] = _parse(sheet, css, *more, **options)
    return _PARSED[key]


Stylesheet._parse_rules = _parsed_once  # type: ignore[method-assign,assignment]
User = Pilot[None]
T = TypeVar("T")
GIB = 1 << 30
POOL = {
    "pool": "qwen-1",
    "state": "ready",
    "model": "Qwen/Qwen3-8B",
    "tenants": ["bold", "calm"],
    "devices": ["cuda:0"],
    "runs": [{"run": "bold", "phase": "train"}, {"run": "calm", "phase": "idle"}],
    "capacity": {"versions": 6, "max_versions": 8, "max_rank": 32},
    "engine": {"name": "sglang"},
    "trainer": {"name": "fsdp"},
    "engine_tokens_per_second": 4211.0,
    "trainer_tokens_per_second": 9050.4,
}
DEVICE = {
    "device": "cuda:0",
    "name": "H100",
    "memory_total": 80 * GIB,
    "memory_used": 71 * GIB,
    "utilization": 0.93,
    "pool": "qwen-1",
    "lease": {"pool": "qwen-1", "user": "ann", "since": time.time() - 9000},
    "processes": [{"pid": 40122, "user": "carol", "name": "python", "memory": 38 * GIB, "ours": False}],
}


def shaped(kind: type[T], row: Json) -> T:
    """A row as `Client` returns it."""
    return msgspec.convert(row, kind)


def a_run(name: str, **more: Any) -> Json:
    figures = {
        "step": 3,
        "steps": 10,
        "reward": 0.5,
        "eval_first": 0.3,
        "eval_last": 0.6,
        "version": 3,
        "attempt": 1,
    }
    words = {
        "state": "running",
        "reason": None,
        "detail": "",
        "waiting": "",
        "owner": "ann",
        "pool": "tiny-1",
    }
    rates = {"tokens_per_second": 1000.0, "step_seconds": 1.0}
    return {"name": name, "created_at": time.time() - 600, "rates": rates, **figures, **words, **more}


def a_step(number: int, reward: float) -> Json:
    metrics = {
        "reward": reward,
        "seconds": 1.0,
        "seconds_sample": 0.5,
        "seconds_train": 0.4,
        "seconds_publish": 0.1,
    }
    return {"step": number, "attempt": 1, "at": 1000.0 + number, "version": number, "metrics": metrics}


class World:
    """What the daemon would know; `asked` lists the requests that it got."""

    def __init__(self, *runs: Json) -> None:
        self.runs = list(runs)
        self.steps: list[Json] = []
        self.log = ""
        self.alive = True
        self.asked: list[tuple[str, str]] = []
        # by path without /v1/ and query: what is said instead, or made by a callable
        self.answers: dict[str, Any] = {}
        self.bodies: list[tuple[str, Json]] = []  # of requests that change something: path and body
        self.doing = ""  # what is said of a request that changes something, while it is done
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
        path, _, query = path.removeprefix("/v1/").partition("?")
        found = self.world.answers.get(path)
        if found is None or not self.world.alive:
            return self._answer(path.split("/"), dict(parse_qsl(query)))
        answer = found(dict(parse_qsl(query))) if callable(found) else found
        return {"items": answer} if isinstance(answer, list) else answer

    def ask(self, method: str, path: str, body: Struct | None = None) -> Json:
        if method != "GET":
            return self.post(path, body)
        if path.startswith("/v1/runs?names="):
            names = unquote(path.partition("=")[2]).split(",")
            return {"items": [run for run in self.get("/v1/runs")["items"] if run["name"] in names]}
        return {"items": []} | self.get(path)

    def post(self, path: str, body: Struct | None = None) -> Json:
        path, sent = path.removeprefix("/v1/"), {} if body is None else msgspec.to_builtins(body)
        self.world.bodies.append((path, sent))
        if self.world.doing and self.on_doing is not None:
            self.on_doing(self.world.doing)
        if (found := self.world.answers.get(f"POST {path}")) is not None:
            reply: Json = found(sent) if callable(found) else found
            return reply
        _, run, verb = path.split("/")
        self.world.asked.append((verb, run))
        return a_run(run, state="stopping")

    def _answer(self, path: list[str], query: dict[str, str]) -> Json:
        world = self.world
        if not world.alive:
            raise DaemonUnreachable("no daemon answers")
        match path:
            case ["runs"]:
                return {"items": [dict(run) for run in world.runs]}
            case ["runs", _, "steps"]:
                return {"items": list(world.steps)}
            case ["runs", _, "logs"]:
                text = world.log[int(query["offset"]) :]
                return {"text": text, "offset": len(world.log), "size": len(world.log)}
            case ["runs", _, _]:
                return {"items": []}
            case ["runs", name]:
                return next(dict(run) for run in world.runs if run["name"] == name)
        return {"pid": 1, "caller": {"user": "ann", "admin": True}}

    def stream(self, method: str, path: str, body: Struct | None) -> Iterator[Json]:
        after = int(parse_qs(urlsplit(path).query)["after"][0])
        cursor = len(self.world.told) if after < 0 else after
        while True:
            found = self.world.news_after(cursor)
            yield from found or [{"id": cursor, "run": None, "kind": "idle", "at": 0.0, "data": {}}]
            cursor += len(found)


def an_event(id: int, run: str | None, kind: str = "eval", **data: Any) -> Json:
    return {"id": id, "run": run, "kind": kind, "at": time.time(), "data": data}


def busy_world() -> World:
    """A run whose KL ran away, one that is well, one that waits; a pool, a device with a stranger, two
    events.
    """
    signals = {"at": time.time(), "kl": 0.9}
    bold = a_run("bold", signals=signals, pool="qwen-1", base="Qwen/Qwen3-8B", recent=[0.1, None, 0.9])
    world = World(
        bold, a_run("calm", pool="qwen-1", created_at=900.0), a_run("waits", state="queued", waiting="no GPU")
    )
    events = [an_event(1, "calm", "state", state="running"), an_event(2, "bold", score=0.5, version=3)]
    world.answers |= {"pools": [POOL], "devices": [DEVICE], "events": events}
    return world


@asynccontextmanager
async def using(
    world: World, size: tuple[int, int] = (120, 40), *, readonly: bool = False, config: Config | None = None
) -> AsyncIterator[User]:
    """A user in front of a world whose runs are on the screen."""
    app = LoradApp(Client(transport=Prepared(world)), readonly=readonly, config=config)
    async with app.run_test(size=size) as user:
        await until(user, lambda: screen_text(user) != "")
        yield user
        world.live(False)


def at_rest(user: User) -> bool:
    """Whether the screen shows all that its widgets were given: Textual draws a few times a second."""
    screen = user.app.screen
    return not (screen._layout_required or screen._dirty_widgets or screen._repaint_required)


async def rest(user: User, seconds: float) -> None:
    """Let the app work. `Pilot.pause` sends each widget a message, too, waits for all of them, and draws."""
    assert user.app._exception is None, "the application ended"
    await asyncio.sleep(seconds)


async def until(user: User, condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition holds and the screen is drawn."""
    deadline = time.monotonic() + seconds
    while not (condition() and at_rest(user)):
        assert time.monotonic() < deadline, screen_text(user)
        await rest(user, 0.02)


def table(user: User) -> Rows:
    """Return the table of runs on the dashboard."""
    return user.app.screen_stack[0].query_one("#runs", Rows)


def names(user: User) -> list[str]:
    """List the runs on the dashboard's page, in order."""
    return list(table(user).on_page)


def detail(user: User) -> str:
    """Name the detail that is shown, such as `pool`; "" for another screen."""
    screen = user.app.screen
    return screen.NAME if isinstance(screen, DetailScreen) else ""


def line(user: User, id: str) -> str:
    return user.app.screen.query_one(id, Line).said.plain


def screen_text(user: User) -> str:
    """Every character on the screen."""
    screen = user.app.screen
    return "\n".join("".join(part.text for part in row) for row in screen._compositor.render_strips()).strip()
