"""A headless Chromium, driven over its DevTools protocol: just enough of it to use the terminal of a page."""

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
    *("--window-size=1500,900", "--disable-dev-shm-usage", "--hide-scrollbars"),
)
# xterm.js draws to a canvas, and the page keeps its terminal to itself: this sees it being assigned.
PEEK = """
Object.defineProperty(Object.prototype, "terminal", {configurable: true, set(value) {
    Object.defineProperty(this, "terminal", {value, writable: true, configurable: true, enumerable: true});
    window.seen = value;
}});
"""
LINES = """
window.seen
    ? Array.from({length: seen.rows}, (_, y) => seen.buffer.active.getLine(y)?.translateToString(true) ?? "")
    : []
"""
CELL = (
    "(() => {const {left, top, width, height} = "
    "document.querySelector('.xterm-screen').getBoundingClientRect();"
)
CELL += "return [left, top, width / seen.cols, height / seen.rows]})()"
SECONDS = 30.0


class Tab:
    """One page. What it was refused or complained about is in `complaints`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.asked: list[str] = []  # URLs
        self.statuses: dict[str, int] = {}  # by URL
        self.complaints: list[str] = []

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        # as if it were the window in front
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=PEEK)
        await self.call("Page.navigate", url=url)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = coming = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(SECONDS):
            answer = await coming
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    async def listen(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if answer := self._answers.pop(told.get("id", 0), None):
                answer.set_result(told)
            else:
                self._note(told.get("method", ""), told.get("params", {}))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])
        elif method == "Network.responseReceived":
            self.statuses[told["response"]["url"]] = told["response"]["status"]
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.complaints.append(told["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))

    async def value(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    async def lines(self) -> list[str]:
        """What the terminal of the page shows."""
        return list(await self.value(LINES) or [])

    async def said(self, words: str) -> None:
        """Waits until the page itself, not its terminal, has these words."""
        for _ in range(int(SECONDS / 0.05)):
            if words in (text := str(await self.value("document.body?.innerText"))):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"not within {SECONDS:.0f} s: {words}\n{text}")

    async def until(self, true: Callable[[str], Any], what: str) -> list[str]:
        """The lines of the terminal as soon as `true(text)` is."""
        for _ in range(int(SECONDS / 0.05)):
            if true("\n".join(lines := await self.lines())):
                return lines
            await asyncio.sleep(0.05)
        raise AssertionError(
            f"not within {SECONDS:.0f} s: {what}\n" + "\n".join(lines) + f"\n{self.complaints}"
        )

    async def press(self, key: str) -> None:
        """A character, or the name of a key: Enter, Escape."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}.get(key, 0)
        text = "\r" if key == "Enter" else key if len(key) == 1 else ""
        down: dict[str, Any] = {"type": "keyDown", "key": key, "text": text, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", **down)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def click(self, column: int, row: int) -> None:
        """On a cell of the terminal."""
        left, top, width, height = await self.value(CELL)
        at = {
            "x": left + (column + 0.5) * width,
            "y": top + (row + 0.5) * height,
            "button": "left",
            "clickCount": 1,
        }
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, **at)

    async def picture(self) -> bytes:
        """A PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def chromium() -> AsyncIterator[Callable[[str], Any]]:
    """A browser that knows nobody: the function opens a Tab at a URL."""
    assert BROWSER is not None
    profile = Path(tempfile.mkdtemp(prefix="lr-"))
    argv = [BROWSER, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*argv, stdin=quiet, stdout=quiet, stderr=quiet)
    listeners: list[asyncio.Task[None]] = []
    try:
        async with aiohttp.ClientSession() as http:
            root = f"http://127.0.0.1:{await debugging_port(profile)}"

            async def tab(url: str) -> Tab:
                async with http.put(f"{root}/json/new") as answer:
                    where = (await answer.json())["webSocketDebuggerUrl"]
                made = Tab(await http.ws_connect(where, max_msg_size=0))
                listeners.append(asyncio.create_task(made.listen()))
                await made.open(url)
                return made

            yield tab
    finally:
        for listener in listeners:
            listener.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        shutil.rmtree(profile, ignore_errors=True)


async def debugging_port(profile: Path) -> int:
    path = profile / "DevToolsActivePort"
    for _ in range(int(SECONDS / 0.05)):
        if path.exists() and (text := path.read_text()).count("\n"):
            return int(text.split("\n")[0])
        await asyncio.sleep(0.05)
    raise AssertionError(f"Chromium did not start within {SECONDS:.0f} s")
