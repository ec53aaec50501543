"""textual-serve behind a door: its page, its WebSockets and its files, on loopback, for who has a key."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from string import Template

from aiohttp import web
from textual_serve.server import Server, to_int

from lorad.bounds import Bounds
from lorad.errors import Conflict
from lorad.protocol.bounded import Doorkeeper, bounded
from lorad.tui.web.door import Door
from lorad.tui.web.session import Session, command

SESSIONS = 8  # at once: each is a process
CONNECTIONS = Bounds()  # everybody on the box reaches loopback: who sends no whole request is sent away
_HEARTBEAT = 15.0  # seconds: a browser that answers no ping is gone
_FULL = f"{SESSIONS} sessions are open already: close one of their tabs, then load this page again.\n"
_PAGE = Path(__file__).with_name("page.html")
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(home: Path, *, port: int = 0, readonly: bool = False) -> None:
    """Serves until it is interrupted; then all its sessions have ended. port: 0 takes a free one.

    Raises Conflict.
    """
    with listener(port) as listening:
        asyncio.run(Site(home, listening, readonly=readonly).live())


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


class Site(Server):
    """Serves everything under `door.base`; there is no other way in."""

    def __init__(self, home: Path, listening: socket.socket, *, readonly: bool = False) -> None:
        self._listening, self._home, self._argv = listening, str(home), command(readonly)
        self._sessions: set[Session] = set()
        host, port = listening.getsockname()
        self.door = Door(port)
        super().__init__("lorad tui", host=host, port=port, title="lorad")

    async def live(self) -> None:
        runner = bounded(await self._make_app(), shutdown_timeout=1.0)
        await runner.setup()
        door = Doorkeeper(runner.server, CONNECTIONS)
        server = await asyncio.get_running_loop().create_server(door, sock=self._listening)
        self._introduce()
        try:
            await self._interrupted()
        finally:
            server.close()
            await asyncio.gather(*(session.stop() for session in self._sessions))
            await runner.cleanup()

    async def _make_app(self) -> web.Application:
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
        return app

    async def handle_index(self, request: web.Request) -> web.Response:
        """Its own page: that of textual-serve asks a server on the internet for a font."""
        self._make_room()
        size = min(max(to_int(request.query.get("fontsize", ""), 16), 6), 64)
        page = Template(_PAGE.read_text()).substitute(host=request.host, base=self.door.base, size=size)
        return web.Response(text=page, content_type="text/html")

    async def handle_script(self, request: web.Request) -> web.FileResponse:
        return web.FileResponse(_PAGE.with_suffix(".js"))

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        self._make_room()
        websocket = web.WebSocketResponse(heartbeat=_HEARTBEAT)
        session = Session(self._argv, self._home, websocket, self.download_manager, self.door.base)
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

    # -- the terminal where it was started -------------------------------------------------------------------
    def _introduce(self) -> None:
        _say(
            "lorad's screens in a browser, for you alone. From another machine, run there first: "
            f"{self._tunnel()}"
        )
        _say("This URL is good for one visit; enter prints another one, ctrl+c ends everything.")
        print(self.door.offer(), flush=True)
        with contextlib.suppress(PermissionError):  # a file or nothing: nobody presses enter there
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._pressed)

    def _tunnel(self) -> str:
        return f"ssh -L {self.port}:127.0.0.1:{self.port} {socket.gethostname()}"

    def _pressed(self) -> None:
        if os.read(sys.stdin.fileno(), 4096):
            print(self.door.offer(), flush=True)
        else:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())

    async def _interrupted(self) -> None:
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in _ENDS:
            loop.add_signal_handler(number, over.set)
        await over.wait()


def _say(text: str) -> None:
    """stdout has the URLs alone."""
    print(text, file=sys.stderr, flush=True)
