"""Runs textual-serve behind a door: its page, WebSockets and files, on loopback, for who has a key."""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from string import Template

from aiohttp import web
from textual_serve.app_service import AppService
from textual_serve.download_manager import DownloadManager
from textual_serve.server import Server, to_int

from lorad.bounds import Bounds
from lorad.errors import Conflict
from lorad.http.serve import serve as serve_within
from lorad.text import printable
from lorad.tui.web.door import Door

_READY = b"__GANGLION__\n"  # what WebDriver says first
_GRACE = 3.0  # seconds that a process has to end on its own
SESSIONS = 8  # at once: each is a process
CONNECTIONS = Bounds()  # everybody on the box reaches loopback: who sends no whole request is sent away
_HEARTBEAT = 15.0  # seconds: a browser that answers no ping is gone
_FULL = f"{SESSIONS} sessions are open already: close one of their tabs, then load this page again.\n"
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Session(AppService):
    """A process whose screens a browser shows; it has ended when `stop` returns.

    argv: the command, without a shell.
    base: the path under which downloads lie.
    """

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
        self._argv = argv
        self._home = home
        self._socket = socket
        self._base = base

    async def run(self) -> None:
        """Hand on what the process writes, until it has ended.

        That is read also when the browser is gone: a process that cannot write cannot end.
        """
        process = self._process
        assert process is not None and process.stdout is not None and process.stderr is not None
        notes = asyncio.create_task(_tell(process.stderr))
        with contextlib.suppress(asyncio.IncompleteReadError):
            await process.stdout.readuntil(_READY)
            take = {b"D": self.on_data, b"M": self.on_meta, b"P": self.on_packed}
            while True:
                kind = await process.stdout.readexactly(1)
                size = int.from_bytes(await process.stdout.readexactly(4), "big")
                payload = await process.stdout.readexactly(size)
                with contextlib.suppress(ConnectionError):
                    await take[kind](payload)
        await notes
        await self.remote_close()

    async def stop(self) -> None:
        """End the process by the end of its stdin (see Driver); kill it when it hangs."""
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

    async def _write_text(self, text: str) -> None:
        """Send a message; of a download the path for which the browser has its key."""
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


_PAGE = Path(__file__).with_name("page.html")


def serve(home: Path, *, port: int = 0, readonly: bool = False) -> None:
    """Serve until interrupted; then all sessions have ended. port: 0 takes a free one.

    Raises Conflict.
    """
    with listener(port) as listening:
        asyncio.run(WebSite(home, listening, readonly=readonly).live())


def listener(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
    except OSError as error:
        listening.close()
        hint = "Name another one, or none: then a free one is taken."
        raise Conflict(f"--port {port}: {os.strerror(error.errno or 0)}", hint=hint) from None
    return listening


class WebSite(Server):
    """Serves everything under `door.base`; there is no other way in."""

    def __init__(self, home: Path, listening: socket.socket, *, readonly: bool = False) -> None:
        self._listening = listening
        self._home = str(home)
        self._argv = [sys.executable, "-m", "lorad", "tui", *(["--readonly"] if readonly else [])]
        self._sessions: set[_Session] = set()
        host, port = listening.getsockname()
        self.door = Door(port)
        super().__init__("lorad tui", host=host, port=port, title="lorad")

    async def live(self) -> None:
        """Serve, with the first URL and how to reach it printed, until a signal comes."""
        base = self.door.base
        app = web.Application(middlewares=[self.door.guard])
        app.add_routes(
            [
                web.get(f"{base}/", self.handle_index),
                web.get(f"{base}/page.js", self.handle_script),
                web.get(f"{base}/ws", self.handle_websocket),
                web.get(f"{base}/download/{{key}}", self.handle_download),
                web.static(f"{base}/static", self.statics_path),
            ]
        )
        app.on_response_prepare.append(self.door.mark)
        app.on_shutdown.append(self._stop_sessions)
        async with serve_within(app, [self._listening], CONNECTIONS, name="lorad tui", goodbye=1.0):
            self._introduce()
            over = asyncio.Event()
            for number in _ENDS:
                asyncio.get_running_loop().add_signal_handler(number, over.set)
            await over.wait()

    async def _stop_sessions(self, _: web.Application) -> None:
        await asyncio.gather(*(session.stop() for session in self._sessions))

    async def handle_index(self, request: web.Request) -> web.Response:
        """Answer with our own page: the page of textual-serve asks a server on the internet for a font."""
        self._make_room()
        size = min(max(to_int(request.query.get("fontsize", ""), 16), 6), 64)
        page = Template(_PAGE.read_text()).substitute(host=request.host, base=self.door.base, size=size)
        return web.Response(text=page, content_type="text/html")

    async def handle_script(self, request: web.Request) -> web.FileResponse:
        return web.FileResponse(_PAGE.with_suffix(".js"))

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        self._make_room()
        websocket = web.WebSocketResponse(heartbeat=_HEARTBEAT)
        session = _Session(self._argv, self._home, websocket, self.download_manager, self.door.base)
        self._sessions.add(session)
        try:
            await websocket.prepare(request)
            await session.start(*(to_int(request.query.get(name, ""), 80) for name in ("width", "height")))
            await self._process_messages(websocket, session)
        finally:
            await session.stop()
            self._sessions.discard(session)
        return websocket

    def _make_room(self) -> None:
        if len(self._sessions) >= SESSIONS:
            raise web.HTTPServiceUnavailable(text=_FULL)

    def _introduce(self) -> None:
        """Say in the terminal how the server is reached, and print the first URL."""
        tunnel = f"ssh -L {self.port}:127.0.0.1:{self.port} {socket.gethostname()}"
        print(  # on stderr: stdout has the URLs alone
            "lorad's screens in a browser, for you alone. From another machine, run there first: " + tunnel,
            "This URL is good for one visit; enter prints another one, ctrl+c ends everything.",
            sep="\n",
            file=sys.stderr,
            flush=True,
        )
        print(self.door.offer(), flush=True)
        with contextlib.suppress(PermissionError):  # a file or nothing: nobody presses enter there
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._pressed)

    def _pressed(self) -> None:
        """Print another URL where somebody pressed enter in the terminal."""
        if os.read(sys.stdin.fileno(), 4096):
            print(self.door.offer(), flush=True)
        else:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
