"""One browser tab: a `lorad tui` of its own behind a WebSocket."""

import asyncio
import contextlib
import json
import shlex
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

from aiohttp import web
from textual_serve.app_service import AppService
from textual_serve.download_manager import DownloadManager

from lorad.text import printable

_READY = b"__GANGLION__\n"  # what WebDriver says first
_GRACE = 3.0  # seconds that a process has to end on its own


class Session(AppService):
    """`start` it, feed it, `stop` it: then its process has ended. argv: the command, without a shell; base:
    the path under which downloads lie."""

    def __init__(
        self,
        argv: Sequence[str],
        home: str,
        socket: web.WebSocketResponse,
        downloads: DownloadManager,
        base: str,
    ) -> None:
        super().__init__(
            shlex.join(argv),
            write_bytes=socket.send_bytes,
            write_str=self._write_text,
            close=self._close,
            download_manager=downloads,
        )
        self._argv, self._home, self._socket, self._base = argv, home, socket, base

    async def run(self) -> None:
        """Hand on what the process writes, until it has ended; then there is nothing left to look at."""
        process = self._process
        assert process is not None and process.stdout is not None and process.stderr is not None
        notes = asyncio.create_task(_tell(process.stderr))
        with contextlib.suppress(asyncio.IncompleteReadError):
            await self._hand_on(process.stdout)
        await notes
        await self.remote_close()

    async def stop(self) -> None:
        """The end of its stdin ends it (see Driver); one that hangs is killed."""
        if self._process is None:
            return
        await self._download_manager.cancel_app_downloads(app_service_id=self.app_service_id)
        self.stdin.close()
        try:
            async with asyncio.timeout(_GRACE):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._task is not None:
            await self._task

    async def _open_app_process(self, width: int = 80, height: int = 24) -> Process:
        environment = self._build_environment(width, height)
        environment |= {"LORAD_HOME": self._home, "TEXTUAL_DRIVER": "lorad.tui.web.driver:Driver"}
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment, start_new_session=True
        )
        self._stdin = self._process.stdin
        return self._process

    async def _hand_on(self, stdout: asyncio.StreamReader) -> None:
        """Raises IncompleteReadError at its end. What is written to a browser that is gone is read all the
        same: a process that cannot write cannot end."""
        await stdout.readuntil(_READY)
        take = {b"D": self.on_data, b"M": self.on_meta, b"P": self.on_packed}
        while True:
            kind = await stdout.readexactly(1)
            size = int.from_bytes(await stdout.readexactly(4), "big")
            payload = await stdout.readexactly(size)
            with contextlib.suppress(ConnectionError):
                await take[kind](payload)

    async def _write_text(self, text: str) -> None:
        """A download lies under the path that the browser has its key for, which the page's script does not
        know.
        """
        kind, *rest = json.loads(text)
        if kind == "deliver_file_start":
            text = json.dumps(["open_url", {"url": f"{self._base}/download/{rest[0]}", "new_tab": True}])
        await self._socket.send_str(text)

    async def _close(self) -> None:
        await self._socket.close()


async def _tell(stderr: asyncio.StreamReader) -> None:
    """Copy what the process prints on stderr, such as an error at its start, to the server's own stderr."""
    while text := await stderr.read(4096):
        sys.stderr.write(printable(text.decode(errors="replace")))
        sys.stderr.flush()


def command(readonly: bool) -> list[str]:
    """Return the command that each tab runs."""
    return [sys.executable, "-m", "lorad", "tui", *(["--readonly"] if readonly else [])]
