"""The ways to every screen of the TUI on the frozen world, and pictures of what is there."""

import inspect
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from textual.pilot import Pilot
from textual.widgets import Input, TextArea

from lorad.box.config import Config, Tui
from lorad.client.client import Client
from lorad.tui.app import LoradApp
from tests.kit.frozen.world import Watched
from tests.kit.tui_world import screen_text

User = Pilot[None]
Walk = Callable[[User], Awaitable[None]]
Step = str | tuple[str, ...]
SECONDS = 40.0
QUIET = 8  # looks, so often in a row nothing may have changed
# in a picture: what is somebody else's or another one each time goes, and what only makes it larger
SHORTER = (
    (re.compile(r"@font-face \{.*?\}\n\s*", re.DOTALL), ""),
    (re.compile(r"\s*<!-- .*? -->"), ""),
    (re.compile(r"\bterminal-\d+-"), "t-"),
    (re.compile(r'<clipPath id="t-line-.*?</clipPath>\s*', re.DOTALL), ""),
    (re.compile(r' clip-path="url\(#t-line-\d+\)"'), ""),
    (re.compile(r"&#160;"), "\u00a0"),
    (re.compile(r"[ \t]+\n"), "\n"),
)


class Pictured(LoradApp):
    """Its pictures are the same each time, and of the fonts of who looks at them."""

    CSS_PATH = str(Path(inspect.getfile(LoradApp)).with_name("lorad.tcss"))

    def export_screenshot(self, *, title: str | None = None, simplify: bool = False) -> str:
        picture = super().export_screenshot(title=title, simplify=simplify)
        for pattern, instead in SHORTER:
            picture = pattern.sub(instead, picture)
        return picture


def app_of(client: Client, theme: str = "dark") -> Pictured:
    app = Pictured(client, config=Config(tui=Tui(theme=theme)))
    app.animation_level = "none"
    return app


def app(user: User) -> Pictured:
    assert isinstance(user.app, Pictured)
    return user.app


def transport(client: Client) -> Watched:
    assert isinstance(client._http, Watched)
    return client._http


async def has(user: User, *words: str, quiet: int = 1) -> None:
    """Until these are on the screen. quiet: and, so many looks long, nothing is asked and nothing changes."""
    watched, before, seen, deadline = transport(app(user).client), "", 0, time.monotonic() + SECONDS
    while seen < quiet:
        await user.pause(0.03)
        assert user.app.is_running and user.app._exception is None, "the application ended"
        for field in [*user.app.screen.query(Input), *user.app.screen.query(TextArea)]:
            field.cursor_blink = False
        now = screen_text(user)
        is_still = quiet == 1 or (now == before and not watched.state.busy)
        seen, before = seen + 1 if is_still and all(word in now for word in words) else 0, now
        assert time.monotonic() < deadline, f"not on the screen: {words}\n{now}"


async def shows(user: User, *words: str) -> None:
    await has(user, *words, quiet=QUIET)


async def go(user: User, way: tuple[Step, ...], last: tuple[str, ...]) -> None:
    for step in way:
        await (has(user, step) if isinstance(step, str) else user.press(*step))
    await shows(user, *last)


def walk(*way: Step, last: tuple[str, ...] = ()) -> Walk:
    """Walk from the dashboard: wait for a string, press the keys of a tuple. last:
    what is shown at the end.
    """

    async def walk(user: User) -> None:
        await has(user, "judge-fails")
        await go(user, way, last)

    return walk


def tab(number: int, *way: Step, last: tuple[str, ...] = (), of: str = "support-bot") -> Walk:
    """The same from a tab of a run."""

    async def walk(user: User) -> None:
        await has(user, "judge-fails")
        app(user).open_run(of)
        await has(user, "attempt")
        await go(user, ((str(number),), *way), last)

    return walk


async def lost(user: User) -> None:
    await shows(user, "judge-fails")
    transport(app(user).client).cut(True)
    await shows(user, "No daemon since")


def typed(text: str) -> tuple[str, ...]:
    return tuple("space" if letter == " " else letter for letter in text)


ASKED = ("c", *typed("How many pencils?"), "enter")
OPEN_DEVICE = ("colon", *typed("open device cuda:0"))
WALKS: dict[str, Walk] = {
    "dashboard": walk(last=("support-bot",)),
    "curves": tab(1, last=("step 312",)),
    "samples": tab(2, last=("answer: 112",)),
    "transcript": tab(2, "agent/0", ("a", "j", "enter"), last=("turn 1",), of="one-answer"),
    "evaluation": tab(
        2,
        "agent/0",
        ("t",),
        "Samples of what",
        (*"hard", "enter"),
        "eval hard step 80",
        ("h",),
        last=("its other steps", "step 20 #0"),
        of="one-answer",
    ),
    "two_runs": tab(
        2,
        "answer: 112",
        ("b",),
        "Beside the samples",
        (*typed("bold-lr"), "enter"),
        last=("in step 118 of bold-lr", "bold-lr step 118"),
    ),
    "versions": tab(3, last=("◉ current",), of="sorter"),
    "checkpoints": tab(4, last=("newest, whole",)),
    "logs": tab(5, last=("samples scored",)),
    "spec": tab(6, last=("path: Qwen/Qwen3-8B",)),
    "events": tab(7, last=("@312 is current",)),
    "serving": walk(("M",), "canary", ("G",), last=("support-v3@60", "5.22 req/s")),
    "pool": walk(("slash", *typed("bold-lr"), "enter"), ("l",), last=("prompt cache", "serves")),
    "device": walk((*OPEN_DEVICE, "enter"), last=("utilisation", "lorad devices")),
    "columns": walk(("c",), last=("Columns",)),
    "nodes": walk(("N",), last=("gpu-3", "not heard of", "lorad nodes")),
    "bill": walk(("B",), last=("since", "lorad bill --by user")),
    "chat": walk(("M",), "canary", ("G",), "support-v3@60", ASKED, last=("#### 56",)),
    "new_run": walk(("n",), "small", ("enter",)),
    "ask": walk(("slash", *"gsm8k", "enter"), ("r",), last=("Resume gsm8k-32k",)),
    "confirm": walk(("slash", *typed("state:running sorter"), "enter"), ("x",), last=("Kill sorter?",)),
    "help": walk(("question_mark",), last=("keys that work here",)),
    "command": walk(("colon", *typed("stop so")), last=("stop RUN", "sorter-hot")),
    "palette": walk(("ctrl+p",), last=("Search",)),
    "lost": lost,
}
BOXES: dict[str, Walk] = {
    "boxes": walk(("b",), "2 of 3 boxes answer", ("G",), last=("`ssh h3` has to work.",)),
    "all_runs": walk(
        ("colon", *typed("box all"), "enter"), "of 2 of 3 boxes", ("G",), last=("h3: host h3 cannot", "far")
    ),
}
ODD: dict[str, Walk] = {  # what no terminal and no chart may be hurt by
    "hostile": tab(2, "answer: 112", ("G",), last=("not markup",)),
    "chances": tab(2, "agent/0", ("c", "enter", "G"), last=("probability", "not markup"), of="one-answer"),
    "special": tab(2, "agent/0", ("i", "z"), last=("I·calculate·it.", "<tool_call>"), of="one-answer"),
    "markdown": tab(
        2, "agent/0", ("m", *typed("fend:done"), "enter"), last=("2 of 8 samples",), of="one-answer"
    ),
    "not_finite": tab(1, last=("step 31",), of="judge-fails"),
    "million": tab(1, last=("1,003,520",), of="million"),
    "marked": walk(
        ("slash", *typed("state:running"), "enter"),
        "of 18 shown",
        ("space", "space", "enter"),
        "--metric reward",
        ("u", "u"),
        last=("time 0s",),
    ),
    "filtered": walk(("slash", *typed("owner:bob"), "enter"), last=("essays",)),
}
