"""`lorad tui --serve` as a process, and visitors who ask it by hand."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import IO
from urllib.parse import urlsplit

import aiohttp
import psutil

from tests.kit.world import REPOSITORY, World


@dataclass
class Served:
    """What was started; `url` is the one that it printed last."""

    process: subprocess.Popen[str]
    url: str
    words: IO[str]

    @property
    def root(self) -> str:
        return f"http://{urlsplit(self.url).netloc}"

    def another(self) -> str:
        """The URL that enter prints."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.url = self.process.stdout.readline().strip()
        return self.url

    def sessions(self) -> list[psutil.Process]:
        """Their processes; the daemon may be a child of the server too."""
        return [child for child in psutil.Process(self.process.pid).children() if is_session(child)]


def is_session(process: psutil.Process) -> bool:
    try:
        return "tui" in process.cmdline()
    except psutil.Error:  # it has just ended
        return False


@contextmanager
def served(made: World, *arguments: str) -> Iterator[Served]:
    argv = [sys.executable, "-m", "lorad", "tui", "--serve", *arguments]
    environment = os.environ | {"LORAD_HOME": str(made.home.root), "PYTHONPATH": str(REPOSITORY)}
    with (made.root / "words").open("w+") as words:
        pipe = subprocess.PIPE
        process = subprocess.Popen(argv, env=environment, stdin=pipe, stdout=pipe, stderr=words, text=True)
        try:
            assert process.stdout
            yield Served(process, process.stdout.readline().strip(), words)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)


class Visitor:
    """A browser's HTTP without the browser. `base`: where it was sent to after it brought its token."""

    def __init__(self, http: aiohttp.ClientSession, root: str, base: str) -> None:
        self.http, self.root, self.base = http, root, base

    async def status(self, path: str, headers: dict[str, str] | None = None) -> int:
        async with self.http.get(self.root + path, headers=headers, allow_redirects=False) as answer:
            return answer.status

    async def terminal(self, origin: str | None = None) -> aiohttp.ClientWebSocketResponse:
        """Its screens: 80x24, from its own page unless `origin` is another. Raises WSServerHandshakeError."""
        origin = self.root if origin is None else origin
        url = f"{self.root}{self.base}ws?width=80&height=24"
        return await self.http.ws_connect(url, headers={"Origin": origin} if origin else {})


@asynccontextmanager
async def visit(server: Served) -> AsyncIterator[Visitor]:
    """Somebody who came in."""
    jar = aiohttp.CookieJar(unsafe=True)  # of an address too
    async with (
        aiohttp.ClientSession(cookie_jar=jar) as http,
        http.get(server.another(), allow_redirects=False) as answer,
    ):
        assert answer.status == 303
        yield Visitor(http, server.root, answer.headers["Location"])
