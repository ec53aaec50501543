"""`python -m tests.kit.frozen.pictures [NAME …]`: pictures of README and docs, by the TUI on real runs of
this home, as SVG and as PNG.

A run that the home lacks is made: `adder`, which takes ten minutes on two cores, `sorter` and `finder`. The
picture that moves is of a run that goes on meanwhile.
"""

import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from lorad.box.paths import Home, default_home
from lorad.client import launch
from lorad.client.client import Client
from lorad.client.transport import Json, Transport
from lorad.errors import NotFound
from tests.kit.frozen.png import png
from tests.kit.frozen.walks import Pictured, User, app, app_of, typed
from tests.kit.tui_world import screen_text

ROOT = Path(__file__).parents[3]
PICTURES = ROOT / "examples" / "pictures"
SIZE = (140, 42)
LEARNING, SMALL = "tui-learning", (110, 32)
RUNS = {"finder": "lookup.yaml", "sorter": "demo.yaml", "adder": "smollm2-addition.yaml"}
ALIAS = "adder-bot"
STEPS = (1, 4, 8, 14, 20, 30, 45, 60)  # of demo.yaml, at which the moving picture has a frame
SECONDS = 0.9  # for each of them; the last one stays for three times that
PATIENCE = 300.0  # seconds for a screen, whose pool may have to start
Walk = Callable[[User], Awaitable[None]]


class Elsewhere(Transport):
    """The answers of a daemon, whose home is called /srv/lorad in them."""

    def ask(self, method: str, path: str, body: msgspec.Struct | None = None) -> Json:
        answer = json.dumps(super().ask(method, path, body))
        shown: Json = json.loads(answer.replace(str(default_home()), "/srv/lorad"))
        return shown


async def shows(user: User, *words: str) -> None:
    """Wait until these are on the screen, and it has drawn what belongs to them."""
    deadline = time.monotonic() + PATIENCE
    while not all(word in screen_text(user) for word in words):
        assert time.monotonic() < deadline, f"not on the screen: {words}\n{screen_text(user)}"
        await user.pause(0.1)
    await user.pause(1.5)


def walk(*keys: str, last: tuple[str, ...] = ()) -> Walk:
    """Walk from the dashboard by these keys."""

    async def way(user: User) -> None:
        await shows(user, *RUNS)
        for key in keys:
            await user.press(key)
            await user.pause(0.5)
        await shows(user, *last)

    return way


def tab(number: int, *keys: str, of: str = "adder", last: tuple[str, ...] = ()) -> Walk:
    """Walk to a tab of a run, and from there by these keys."""

    async def way(user: User) -> None:
        await shows(user, *RUNS)
        app(user).open_run(of)
        await shows(user, "attempt")
        await user.press(str(number))
        await user.pause(1.5)
        for key in keys:
            await user.press(key)
            await user.pause(0.5)
        await shows(user, *last)

    return way


SHOWN: dict[str, Walk] = {
    "tui-runs": walk(),
    "tui-run": tab(1, last=("eval",)),
    "tui-samples": tab(2, "j", last=("answer:",)),
    "tui-transcript": tab(2, "a", "j", "enter", of="finder", last=("turn 1",)),
    "tui-versions": tab(3, last=("current",)),
    "tui-serving": walk("M", "c", *typed("What is 23 + 45?"), "enter", last=("= 68", "= 100")),
    "tui-new-run": walk("n", "enter", last=("model",)),
    "tui-command": walk("colon", *typed("stop ad"), last=("stop RUN",)),
}


def taken(client: Client, way: Walk, still: Path) -> str:
    """Return a picture of the end of a way. still: where the same is written as PNG."""

    async def take() -> str:
        shown = app_of(client)
        async with shown.run_test(size=SIZE) as user:
            await way(user)
            return _picture(shown, still)

    return asyncio.run(take())


def _picture(shown: Pictured, still: Path) -> str:
    png(shown.screen, still)
    return shown.export_screenshot(title="lorad tui", simplify=True)


def learning(client: Client, still: Path) -> str:
    """Return a picture of a run that learns, taken while it does."""
    name = _start(client, "demo.yaml", "learning")

    async def take() -> list[str]:
        shown, frames = app_of(client), list[str]()
        async with shown.run_test(size=SMALL) as user:
            await shows(user, name)
            app(user).open_run(name)
            await user.press("1")
            for step in STEPS:
                while client.show(name).step < step:
                    await user.pause(0.1)
                await user.pause(0.7)
                frames.append(_picture(shown, still))
        return frames

    frames = asyncio.run(take())
    client.remove(name)
    return moving(frames)


def _start(client: Client, spec: str, name: str) -> str:
    path = ROOT / "examples" / spec
    client.run(path.read_text(), source=str(path), cwd=str(path.parent), overrides=[], name=name)
    return name


def _made(client: Client) -> None:
    """See to it that the runs are there and over, and that a version of one is served."""
    for name, spec in RUNS.items():
        try:
            client.show(name)
        except NotFound:
            _start(client, spec, name)
        while client.show(name).state != "ended":
            time.sleep(1)
    if ALIAS not in {alias.alias for alias in client.aliases()}:
        client.swap(ALIAS, "adder@0")
        client.swap(ALIAS, "adder")


def moving(frames: Sequence[str]) -> str:
    """One picture that shows frames one after the other, for ever; without animations, the last."""
    number, seconds = len(frames), (len(frames) + 2) * SECONDS
    head = re.search(r'viewBox="([^"]*)"', frames[0])
    assert head
    style = [
        f"@keyframes {name} "
        f"{{ 0% {{ opacity: 1 }} {100 * stays * SECONDS / seconds:.3f}%, to {{ opacity: 0 }} }}"
        for name, stays in (("show", 1), ("stay", 3))
    ]
    for at in range(number):
        name, begins = ("show" if at < number - 1 else "stay"), at * SECONDS - seconds
        shown = (
            f"opacity: {int(at == number - 1)}; animation: {name} {seconds:.2f}s step-end {begins:.2f}s "
            "infinite"
        )
        style.append(f".frame-{at} {{ {shown} }}")
    parts = [f'<g class="frame-{at}">{own(frame, at)}</g>' for at, frame in enumerate(frames)]
    lines = [
        f'<svg viewBox="{head[1]}" xmlns="http://www.w3.org/2000/svg">',
        "<style>",
        *style,
        "</style>",
        *parts,
    ]
    return "\n".join([*lines, "</svg>", ""])


def own(frame: str, number: int) -> str:
    """Rename the classes of a frame so that no other frame has them."""
    return re.sub(r"\bt-(?=[a-z])", f"t{number}-", frame)


def main(*names: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    launch.connected()
    home = Home(default_home())
    client = Client(home, transport=Elsewhere(home.socket, timeout=600.0))
    _made(client)
    with tempfile.TemporaryDirectory(prefix="lr-") as state:
        os.environ["XDG_STATE_HOME"] = state  # what somebody chose to see is not in them
        for name in names or (*SHOWN, LEARNING):
            still = PICTURES / f"{name}.png"
            picture = learning(client, still) if name == LEARNING else taken(client, SHOWN[name], still)
            (PICTURES / f"{name}.svg").write_text(picture)
            sizes = f"{len(picture.encode()) / 1024:.0f} KiB, PNG {still.stat().st_size / 1024:.0f} KiB"
            print(f"examples/pictures/{name}.svg: {sizes}")


if __name__ == "__main__":
    main(*sys.argv[1:])
